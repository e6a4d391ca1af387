//! Connections to the shard servers.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use zeroshard_proto::{
    Result, Server, Token,
    transport::{Connection, endpoint},
};

/// Payload bytes that have moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Of parameters, received.
    pub pulled_bytes: u64,
    /// Of gradients and initial parameters, sent; again where they were sent again.
    pub pushed_bytes: u64,
}

/// One shard server. Connections are opened when they are used, and again when they break.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    /// For messages: role, number, address.
    pub(crate) peer: String,
    /// One connection for each direction, so that a pull does not wait behind a push.
    pub(crate) pull: Connection,
    pub(crate) push: Connection,
}

/// All shard servers that this process has talked to.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    known: Mutex<HashMap<u64, Shard>>,
    token: Token,
    pub(crate) pulled: AtomicU64,
    pub(crate) pushed: AtomicU64,
}

impl Shards {
    /// The servers of a cluster with this token.
    pub(crate) fn new(token: Token) -> Self {
        Self { token, ..Self::default() }
    }

    /// # Errors
    /// [`zeroshard_proto::Error::Invalid`] if the server advertises what is no address, or for a token that no
    /// header can carry.
    pub(crate) fn get(&self, server: &Server) -> Result<Shard> {
        let mut known = self.known.lock().expect("no holder of the lock panics");
        if let Some(shard) = known.get(&server.id) {
            return Ok(shard.clone());
        }
        let shard = Shard {
            peer: format!("shard server {} at {}", server.id, server.address),
            pull: Connection::new(endpoint(&server.address)?.connect_lazy(), &self.token)?,
            push: Connection::new(endpoint(&server.address)?.connect_lazy(), &self.token)?,
        };
        known.insert(server.id, shard.clone());
        Ok(shard)
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            pulled_bytes: self.pulled.load(Ordering::Relaxed),
            pushed_bytes: self.pushed.load(Ordering::Relaxed),
        }
    }
}
