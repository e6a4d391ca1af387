//! Connections to the shard servers.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use zeroshard_model::{Placement, Result, Server};
use zeroshard_net::transport::{Connection, Credentials};

/// The number of payload bytes that have been transferred.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Parameters received.
    pub pulled_bytes: u64,
    /// Gradients and initial parameters sent, including repeated transmissions.
    pub pushed_bytes: u64,
}

/// One shard server. Connections are opened on first use, and opened again when they break.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    /// Role, number and address, for messages.
    pub(crate) peer: String,
    /// One connection for each direction, so that a pull does not wait behind a push.
    pub(crate) pull: Connection,
    pub(crate) push: Connection,
}

/// All shard servers to which this process has connected.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    /// The servers by id and incarnation, because a connection to an earlier incarnation cannot be
    /// used.
    known: Mutex<HashMap<(u64, u64), Shard>>,
    credentials: Credentials,
    pub(crate) pulled: AtomicU64,
    pub(crate) pushed: AtomicU64,
}

impl Shards {
    /// The servers of a cluster.
    pub(crate) fn new(credentials: Credentials) -> Self {
        Self { credentials, ..Self::default() }
    }

    /// The connections to a server.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] if the server advertises an invalid address.
    pub(crate) fn get(&self, server: &Server) -> Result<Shard> {
        let mut known = self.known.lock().expect("no holder of the lock panics");
        if let Some(shard) = known.get(&key(server)) {
            return Ok(shard.clone());
        }
        let shard = Shard {
            peer: format!("shard server {} at {}", server.id, server.address),
            pull: Connection::lazy(&server.address, &self.credentials)?,
            push: Connection::lazy(&server.address, &self.credentials)?,
        };
        known.insert(key(server), shard.clone());
        Ok(shard)
    }

    /// A connection to a server that no other call uses.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] if the server advertises an invalid address.
    pub(crate) fn separate(&self, server: &Server) -> Result<Connection> {
        self.connect(&server.address)
    }

    /// A connection to any process of the cluster at `address`, `host:port`.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for an invalid address.
    pub(crate) fn connect(&self, address: &str) -> Result<Connection> {
        Connection::lazy(address, &self.credentials)
    }

    /// Drops the connections to servers of the placement `before` that are not in `now`. If another
    /// job still uses one of them, it opens the connection again.
    pub(crate) fn forget(&self, before: &Placement, now: &Placement) {
        let mut known = self.known.lock().expect("no holder of the lock panics");
        for server in before.servers().iter().filter(|server| !now.servers().contains(server)) {
            known.remove(&key(server));
        }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            pulled_bytes: self.pulled.load(Ordering::Relaxed),
            pushed_bytes: self.pushed.load(Ordering::Relaxed),
        }
    }
}

fn key(server: &Server) -> (u64, u64) {
    (server.id, server.incarnation)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(id: u64, incarnation: u64) -> Server {
        Server { id, incarnation, address: format!("host:{incarnation}") }
    }

    #[tokio::test]
    async fn a_restarted_server_gets_a_new_connection_and_the_old_one_is_dropped() {
        let shards = Shards::default();
        let placement = |servers: Vec<Server>| Placement::new(servers, 1, vec![0]).unwrap();
        let before = placement(vec![server(1, 10), server(2, 20)]);
        let now = placement(vec![server(1, 11), server(2, 20)]);
        for server in before.servers() {
            shards.get(server).unwrap();
        }
        assert_eq!(shards.get(&server(1, 11)).unwrap().peer, "shard server 1 at host:11");
        shards.forget(&before, &now);
        let mut known: Vec<_> = shards.known.lock().unwrap().keys().copied().collect();
        known.sort_unstable();
        assert_eq!(known, [(1, 11), (2, 20)]);
    }
}
