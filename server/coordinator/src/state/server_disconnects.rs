//! The servers of an open job that are not connected.

use std::collections::BTreeMap;

use crate::vocabulary::ids::{Now, ServerId};

/// The servers of an open job that are not connected.
#[derive(Debug, Default)]
pub struct Disconnects {
    servers: BTreeMap<ServerId, Disconnect>,
}

#[derive(Debug)]
struct Disconnect {
    /// Why its control stream has ended.
    cause: String,
    /// When the server is given up.
    until: Now,
}

impl Disconnects {
    /// The control stream of a server has ended. It is given up at the time `until`.
    pub(crate) fn begin(&mut self, server: ServerId, cause: &str, until: Now) {
        self.servers.insert(server, Disconnect { cause: cause.to_owned(), until });
    }

    /// The server has connected again, or was given up.
    pub(crate) fn end(&mut self, server: ServerId) {
        self.servers.remove(&server);
    }

    pub(crate) fn contains(&self, server: ServerId) -> bool {
        self.servers.contains_key(&server)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }

    /// One of the servers.
    pub(crate) fn first(&self) -> Option<ServerId> {
        self.servers.keys().next().copied()
    }

    /// Why the control stream of a server has ended.
    pub(crate) fn cause(&self, server: ServerId) -> Option<&str> {
        self.servers.get(&server).map(|disconnect| &*disconnect.cause)
    }

    /// A server that has been away for too long.
    pub(crate) fn overdue(&self, now: Now) -> Option<ServerId> {
        self.servers.iter().find(|(_, disconnect)| disconnect.until <= now).map(|(&id, _)| id)
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.servers.values().map(|disconnect| disconnect.until).min()
    }
}
