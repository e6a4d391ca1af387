//! Shard servers that join and are lost.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::{Server, listing::some_of};

use super::{
    absence::patience,
    cluster::Cluster,
    events::{About, Action, Command, Link, Now, ServerId},
    state::{Job, Phase, ServerState},
};

impl Cluster {
    /// Registers a server. A known server with the same id or address is removed first, because it
    /// has restarted or connected again.
    pub(super) fn server_joined(
        &mut self,
        stream: u64,
        server: Server,
        about: About,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Server { id, incarnation, address } = server;
        let About { name, zone, capacity, failed, version, cordoned } = about;
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
        for (kept, value) in [(&mut self.zones, zone), (&mut self.names, name)] {
            match value.is_empty() {
                true => kept.remove(&id),
                false => kept.insert(id, value),
            };
        }
        let state = ServerState {
            stream,
            incarnation,
            address,
            capacity,
            stats: None,
            failed,
            version,
            cordoned,
        };
        self.forget_missing(id, &state.address);
        self.servers.insert(id, state);
        out.push(Action::Note(format!("{} joined, id {id:016x}", self.name(id))));
        out.push(Action::Command(id, Command::Welcome));
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            self.try_place(&name, now, out);
        }
    }

    /// Removes a server. A job with slices on the server waits for its return (see [`patience`]); a
    /// job that is being opened fails.
    pub(super) fn server_lost(&mut self, link: Link, cause: &str, now: Now, out: &mut Vec<Action>) {
        if !self.is_current(link) {
            return;
        }
        let server = link.server;
        let has_departed = self.departing.remove(&server).is_some();
        let gone = format!("{} was lost ({cause})", self.name(server));
        self.note_loss(server, cause, has_departed, now, out);
        out.push(Action::Dismiss(link));
        let hit = |job: &&Job| job.phase.uses(server);
        let names: Vec<String> =
            self.jobs.values().filter(hit).map(|job| job.spec.name.clone()).collect();
        for name in names {
            let Some(Job { spec, phase, .. }) = self.jobs.get_mut(&name) else { continue };
            match phase {
                Phase::Recovering(recovery) => recovery.lose(server),
                Phase::Open(open) => {
                    open.miss(server, cause, now + patience(spec), out);
                    self.save_without(server, &name, cause, now, out);
                }
                _ => {
                    let reason = format!("{gone} while the job was being opened");
                    self.interrupt_or_fail(&name, &reason, now, out);
                }
            }
        }
        if has_departed {
            self.departed(server, now, out);
        }
        self.confirms_nothing(server, out);
        self.probe_missing(out);
    }

    /// Dials the servers that jobs wait for.
    pub(super) fn probe_missing(&self, out: &mut Vec<Action>) {
        let missing = self.jobs.values().flat_map(|job| match &job.phase {
            phase @ (Phase::Open(_) | Phase::Recovering(_)) => {
                phase.placement().map_or(&[][..], |placement| placement.servers())
            }
            _ => &[],
        });
        let missing = missing.filter(|server| !self.servers.contains_key(&server.id));
        let missing: BTreeMap<ServerId, &Server> =
            missing.map(|server| (server.id, server)).collect();
        out.extend(missing.into_values().map(|server| Action::Probe(server.clone())));
    }

    /// Returns whether the control stream is the current stream of a connected server.
    pub(super) fn is_current(&self, link: Link) -> bool {
        self.servers.get(&link.server).is_some_and(|known| known.stream == link.stream)
    }

    /// The connected shard servers that are not about to stop, by id.
    pub fn live(&self) -> Vec<Server> {
        let server = |(&id, known): (&ServerId, &ServerState)| Server {
            id,
            incarnation: known.incarnation,
            address: known.address.clone(),
        };
        let stay = |(id, _): &(&ServerId, &ServerState)| !self.departing.contains_key(id);
        self.servers.iter().filter(stay).map(server).collect()
    }

    /// The shard servers that may receive new slices, by id: they are connected, not about to stop,
    /// and not cordoned.
    pub(super) fn placeable(&self) -> Vec<Server> {
        let mut servers = self.live();
        servers.retain(|server| !self.servers[&server.id].cordoned);
        servers
    }

    /// `shard server 127.0.0.1:7401`, or `shard server NAME (127.0.0.1:7401)`.
    pub(super) fn name(&self, server: ServerId) -> String {
        let missing = self.missing.get(&server).map(|missing| &missing.server.address);
        match self.servers.get(&server).map(|known| &known.address).or(missing) {
            Some(address) => self.name_at(server, address),
            None => format!("shard server {server:016x} (not connected)"),
        }
    }

    /// The same for a server at this address, which may not be connected.
    pub(super) fn name_at(&self, server: ServerId, address: &str) -> String {
        match self.names.get(&server) {
            Some(name) => format!("shard server {name} ({address})"),
            None => format!("shard server {address}"),
        }
    }

    /// Lists some of the servers, by name.
    pub(super) fn names_of(&self, servers: &BTreeSet<ServerId>) -> String {
        some_of(servers.iter().map(|&server| self.name(server)))
    }
}
