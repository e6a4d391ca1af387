//! Shard servers that join and are lost.

use std::collections::BTreeSet;

use zeroshard_proto::{JobSpec, Placement, Server};

use super::{
    cluster::Cluster,
    events::{Action, Command, Link, Now, ServerId},
    state::{Job, Phase, ServerState},
};
use crate::listing::some_of;

impl Cluster {
    /// Registers a server. A known server with the same id or address is removed first, because it
    /// has restarted or connected again.
    pub(super) fn server_joined(
        &mut self,
        stream: u64,
        server: Server,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Server { id, incarnation, address } = server;
        if let Some(old) = self.servers.get(&id) {
            let cause = if old.incarnation == incarnation {
                "it connected again"
            } else {
                "it was restarted"
            };
            self.server_lost(Link { server: id, stream: old.stream }, cause, now, out);
        }
        let same = self.servers.iter().find(|(_, known)| known.address == address);
        if let Some((&server, known)) = same {
            let link = Link { server, stream: known.stream };
            self.server_lost(link, "another server connected with its address", now, out);
        }
        out.push(Action::Note(format!("shard server {address} joined, id {id:016x}")));
        self.servers.insert(id, ServerState { stream, incarnation, address, stats: None });
        out.push(Action::Command(id, Command::Welcome));
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            self.try_place(&name, out);
        }
    }

    /// Removes a server. Every job with slices on the server fails, because no other server has
    /// them.
    pub(super) fn server_lost(&mut self, link: Link, cause: &str, now: Now, out: &mut Vec<Action>) {
        if !self.is_current(link) {
            return;
        }
        let server = link.server;
        let gone = format!("{} was lost ({cause})", self.name(server));
        self.servers.remove(&server);
        out.push(Action::Note(gone.clone()));
        out.push(Action::Dismiss(link));
        let hit = |job: &&Job| job.phase.uses(server);
        let names: Vec<String> =
            self.jobs.values().filter(hit).map(|job| job.spec.name.clone()).collect();
        for name in names {
            if let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs.get_mut(&name) {
                // It may come back before the deadline.
                recovery.forget(server);
                continue;
            }
            if self.interrupt(&name, &gone, now, out) {
                continue;
            }
            let reason = match self.jobs.get(&name) {
                Some(Job { spec, phase: Phase::Open(open), .. }) => {
                    format!("{gone}; it held {}", held_by(server, spec, &open.placement))
                }
                _ => format!("{gone} while the job was being opened"),
            };
            self.fail(&name, &reason, now, out);
        }
    }

    /// Whether the control stream is the current stream of a connected server.
    pub(super) fn is_current(&self, link: Link) -> bool {
        self.servers.get(&link.server).is_some_and(|known| known.stream == link.stream)
    }

    /// The connected shard servers, by id.
    pub(super) fn live(&self) -> Vec<Server> {
        let server = |(&id, known): (&ServerId, &ServerState)| Server {
            id,
            incarnation: known.incarnation,
            address: known.address.clone(),
        };
        self.servers.iter().map(server).collect()
    }

    /// `shard server 127.0.0.1:7401`.
    pub(super) fn name(&self, server: ServerId) -> String {
        match self.servers.get(&server) {
            Some(known) => format!("shard server {}", known.address),
            None => format!("shard server {server:016x} (not connected)"),
        }
    }

    /// Lists some of the servers, by name.
    pub(super) fn names(&self, servers: &BTreeSet<ServerId>) -> String {
        some_of(servers.iter().map(|&server| self.name(server)))
    }
}

/// Describes the tensors of which `server` holds slices, for messages.
fn held_by(server: ServerId, spec: &JobSpec, placement: &Placement) -> String {
    let slices: Vec<usize> = placement.primary_slices(server).collect();
    let tensors: BTreeSet<usize> =
        slices.iter().map(|&slice| spec.manifest.slices()[slice].tensor).collect();
    let names =
        tensors.into_iter().map(|tensor| format!("{:?}", spec.manifest.tensors()[tensor].name));
    format!("{} of {} slices, of the tensors {}", slices.len(), placement.slices(), some_of(names))
}
