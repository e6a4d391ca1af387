//! The shard servers of the cluster: those that are connected, and those that it misses.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::{Error, Result, Server, listing::some_of, memory::Capacity, name::server_id};

use crate::{
    placement::Zones,
    vocabulary::{
        commands::{About, Command, FailedThere},
        events::Action,
        ids::{Link, Now, ServerId},
        reports::Stats,
    },
};

/// The maximum number of missing servers that are remembered.
const MAX_MISSING: usize = 1000;

/// A connected shard server.
#[derive(Debug)]
pub struct ServerState {
    /// Its control stream.
    pub stream: u64,
    pub incarnation: u64,
    pub address: String,
    /// Its room for the arrays of slices; `None` if it has no known limit.
    pub capacity: Option<Capacity>,
    /// Its last report.
    pub stats: Option<Stats>,
    /// Why jobs had failed on it when it connected, by the id of the job.
    pub failed: BTreeMap<u64, FailedThere>,
    /// The version of the server; empty if it is unknown.
    pub version: String,
    /// `true` if the server is cordoned: it receives no new slices.
    pub cordoned: bool,
}

impl ServerState {
    /// Why the server does not have a job that it has had.
    pub(crate) fn lacks(&self, job_id: u64) -> String {
        let failed = self.failed.get(&job_id).map(|failed| failed.reason.clone());
        failed.unwrap_or_else(|| "it has dropped the job".to_owned())
    }
}

/// A server that was connected, until it connects again or an operator drains it.
#[derive(Debug, Clone)]
pub struct Missing {
    pub server: Server,
    /// When its control stream ended.
    pub since: Now,
    /// Why.
    pub cause: String,
}

/// The servers that are connected, and those that were.
#[derive(Debug, Default)]
pub struct Servers {
    connected: BTreeMap<ServerId, ServerState>,
    /// The servers that were connected, and were not drained before they left.
    missing: BTreeMap<ServerId, Missing>,
    /// The connected servers that are about to stop. The value is true for a server that was
    /// released.
    departing: BTreeMap<ServerId, bool>,
    /// The zones of servers that have one, also while they are away.
    zones: Zones,
    /// The names that operators gave to servers, also while they are away.
    names: BTreeMap<ServerId, String>,
}

impl Servers {
    /// Adds and welcomes a server. It is no longer missing.
    pub(crate) fn join(
        &mut self,
        stream: u64,
        server: Server,
        about: About,
        out: &mut Vec<Action>,
    ) {
        let Server { id, incarnation, address } = server;
        let About { name, zone, capacity, failed, version, cordoned } = about;
        for (kept, value) in [(&mut self.zones, zone), (&mut self.names, name)] {
            match value.is_empty() {
                true => kept.remove(&id),
                false => kept.insert(id, value),
            };
        }
        self.missing.retain(|other, missing| *other != id && missing.server.address != address);
        let stats = None;
        let state = ServerState {
            stream,
            incarnation,
            address,
            capacity,
            stats,
            failed,
            version,
            cordoned,
        };
        self.connected.insert(id, state);
        out.push(Action::Note(format!("{} joined, id {id:016x}", self.name(id))));
        out.push(Action::Command(id, Command::Welcome));
    }

    /// The streams that end when this server joins, and why: those of an earlier connection or
    /// process with its id, and of another server with its address.
    pub(crate) fn replaced_by(&self, server: &Server) -> Vec<(Link, &'static str)> {
        let old = self.connected.get(&server.id).map(|old| {
            let is_same = old.incarnation == server.incarnation;
            let cause = if is_same { "it connected again" } else { "it was restarted" };
            (Link { server: server.id, stream: old.stream }, cause)
        });
        let is_other = |(id, known): &(&ServerId, &ServerState)| {
            **id != server.id && known.address == server.address
        };
        let other = self.connected.iter().find(is_other).map(|(&id, known)| {
            let link = Link { server: id, stream: known.stream };
            (link, "another server connected with its address")
        });
        old.into_iter().chain(other).collect()
    }

    /// Returns whether a server was connected, and is missed.
    pub fn misses(&self, id: ServerId) -> bool {
        self.missing.contains_key(&id)
    }

    /// Removes a server. Returns its state, and whether it was about to stop.
    pub(crate) fn remove(&mut self, id: ServerId) -> Option<(ServerState, bool)> {
        let has_departed = self.departing.remove(&id).is_some();
        Some((self.connected.remove(&id)?, has_departed))
    }

    /// Misses a server that has left.
    pub(crate) fn miss(&mut self, missing: Missing) {
        if self.missing.len() < MAX_MISSING {
            self.missing.insert(missing.server.id, missing);
        }
    }

    /// Does not miss a server any more.
    pub(crate) fn forget_missing(&mut self, id: ServerId) {
        self.missing.remove(&id);
    }

    /// The missing servers.
    pub fn missing(&self) -> &BTreeMap<ServerId, Missing> {
        &self.missing
    }

    /// The missing server that an operator means.
    pub(crate) fn find_missing(&self, name: &str) -> Option<Server> {
        let mut servers = self.missing.values().map(|missing| &missing.server);
        servers.find(|server| is_named(server, name)).cloned()
    }

    /// The connected server with this address, id or name.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is none.
    pub(crate) fn find(&self, name: &str) -> Result<Server> {
        self.live().into_iter().find(|server| is_named(server, name)).ok_or_else(|| {
            Error::refused(format!(
                "no shard server with the address, id or name (--id) {name:?} is connected; \
                 `zsctl status` lists them"
            ))
        })
    }

    /// Cordons a connected server or uncordons it. Returns whether that changes its state.
    pub(crate) fn set_cordoned(&mut self, id: ServerId, cordoned: bool) -> bool {
        let Some(known) = self.connected.get_mut(&id) else { return false };
        std::mem::replace(&mut known.cordoned, cordoned) != cordoned
    }

    /// Stores the last report of a server.
    pub(crate) fn report(&mut self, id: ServerId, stats: Stats) {
        if let Some(known) = self.connected.get_mut(&id) {
            known.stats = Some(stats);
        }
    }

    /// A server is about to stop.
    pub(crate) fn depart(&mut self, id: ServerId) {
        self.departing.insert(id, false);
    }

    /// Returns whether the server has said that it is about to stop.
    pub fn is_departing(&self, id: ServerId) -> bool {
        self.departing.contains_key(&id)
    }

    /// The departing servers that were not released.
    pub(crate) fn unreleased(&self) -> impl Iterator<Item = ServerId> {
        self.departing.iter().filter(|(_, is_released)| !**is_released).map(|(&id, _)| id)
    }

    /// A departing server may stop.
    pub(crate) fn release(&mut self, id: ServerId) {
        self.departing.insert(id, true);
    }

    /// A connected server.
    pub fn get(&self, id: ServerId) -> Option<&ServerState> {
        self.connected.get(&id)
    }

    /// Returns whether the server is connected.
    pub fn is_connected(&self, id: ServerId) -> bool {
        self.connected.contains_key(&id)
    }

    /// The connected servers, by id.
    pub fn connected(&self) -> &BTreeMap<ServerId, ServerState> {
        &self.connected
    }

    /// Returns whether the control stream is the current stream of a connected server.
    pub(crate) fn is_current(&self, link: Link) -> bool {
        self.connected.get(&link.server).is_some_and(|known| known.stream == link.stream)
    }

    /// The connected shard servers that are not about to stop, by id.
    pub fn live(&self) -> Vec<Server> {
        let server = |(&id, known): (&ServerId, &ServerState)| Server {
            id,
            incarnation: known.incarnation,
            address: known.address.clone(),
        };
        let stay = |(id, _): &(&ServerId, &ServerState)| !self.departing.contains_key(id);
        self.connected.iter().filter(stay).map(server).collect()
    }

    /// The shard servers that may receive new slices, by id: they are connected, not about to stop,
    /// and not cordoned.
    pub(crate) fn placeable(&self) -> Vec<Server> {
        let mut servers = self.live();
        servers.retain(|server| !self.connected[&server.id].cordoned);
        servers
    }

    /// The zones of servers that have one.
    pub(crate) fn zones(&self) -> &Zones {
        &self.zones
    }

    /// The zone of a server; empty: it is a zone of its own.
    pub fn zone_of(&self, id: ServerId) -> String {
        self.zones.get(&id).cloned().unwrap_or_default()
    }

    /// The name that the operator gave a server; empty: none.
    pub fn given_name(&self, id: ServerId) -> String {
        self.names.get(&id).cloned().unwrap_or_default()
    }

    /// `shard server 127.0.0.1:7401`, or `shard server NAME (127.0.0.1:7401)`.
    pub(crate) fn name(&self, server: ServerId) -> String {
        let missing = self.missing.get(&server).map(|missing| &missing.server.address);
        match self.connected.get(&server).map(|known| &known.address).or(missing) {
            Some(address) => self.name_at(server, address),
            None => format!("shard server {server:016x} (not connected)"),
        }
    }

    /// The name of a server at this address, whether it is connected or not.
    pub(crate) fn name_at(&self, server: ServerId, address: &str) -> String {
        match self.names.get(&server) {
            Some(name) => format!("shard server {name} ({address})"),
            None => format!("shard server {address}"),
        }
    }

    /// Lists some of the servers, by name.
    pub(crate) fn names_of(&self, servers: &BTreeSet<ServerId>) -> String {
        some_of(servers.iter().map(|&server| self.name(server)))
    }
}

/// Returns whether an operator means this server: by its address, by the name that `--id` gave it,
/// or by its id in hexadecimal digits, as logs and tables show it, or in decimal digits, as in the
/// API.
fn is_named(server: &Server, name: &str) -> bool {
    let ids = [10, 16].map(|radix| ServerId::from_str_radix(name, radix).ok());
    server.address == name || server.id == server_id(name) || ids.contains(&Some(server.id))
}
