//! Servers, their capacities, and placements in messages.

use zeroshard_model::{Error, Placement, Result, Server, memory::Capacity};

use crate::pb;

impl From<Server> for pb::Server {
    fn from(Server { id, incarnation, address }: Server) -> Self {
        Self { id, incarnation, address }
    }
}

impl From<pb::Server> for Server {
    fn from(pb::Server { id, incarnation, address }: pb::Server) -> Self {
        Self { id, incarnation, address }
    }
}

impl From<&Placement> for pb::Placement {
    fn from(placement: &Placement) -> Self {
        Self {
            servers: placement.servers().iter().cloned().map(Into::into).collect(),
            replicas: placement.replicas() as u32,
            owners: placement.all_owners().to_vec(),
        }
    }
}

impl TryFrom<pb::Placement> for Placement {
    type Error = Error;

    fn try_from(message: pb::Placement) -> Result<Self> {
        let servers = message.servers.into_iter().map(Server::from);
        Self::new(servers.collect(), message.replicas as usize, message.owners)
    }
}

impl From<Capacity> for pb::Capacity {
    fn from(Capacity { bytes, memory }: Capacity) -> Self {
        Self { bytes, memory_bytes: memory }
    }
}

impl From<pb::Capacity> for Capacity {
    fn from(pb::Capacity { bytes, memory_bytes }: pb::Capacity) -> Self {
        Self { bytes, memory: memory_bytes }
    }
}
