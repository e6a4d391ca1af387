//! Connections to the shard servers.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tonic::transport::Channel;
use zeroshard_proto::{Result, Server, transport::endpoint};

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
    pub(crate) pull: Channel,
    pub(crate) push: Channel,
}

/// All shard servers that this process has talked to.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    known: Mutex<HashMap<u32, Shard>>,
    pub(crate) pulled: AtomicU64,
    pub(crate) pushed: AtomicU64,
}

impl Shards {
    /// # Errors
    /// [`zeroshard_proto::Error::Invalid`] if the server advertises what is no address.
    pub(crate) fn get(&self, server: &Server) -> Result<Shard> {
        let mut known = self.known.lock().expect("no holder of the lock panics");
        if let Some(shard) = known.get(&server.id) {
            return Ok(shard.clone());
        }
        let shard = Shard {
            peer: format!("shard server {} at {}", server.id, server.address),
            pull: endpoint(&server.address)?.connect_lazy(),
            push: endpoint(&server.address)?.connect_lazy(),
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
