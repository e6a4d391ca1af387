//! The connection of a follower to a mirror.

use std::time::Duration;

use zeroshard_model::Result;
use zeroshard_net::transport::{Connection, MAX_CONTROL_MESSAGE};
use zeroshard_proto::pb::mirror_service_client::MirrorServiceClient;

use crate::Cluster;

/// A mirror.
#[derive(Debug, Clone)]
pub(super) struct Mirror {
    /// The address, for messages.
    pub(super) peer: String,
    connection: Connection,
}

impl Mirror {
    /// Connects at the first call, with the credentials for the cluster.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for an invalid address.
    pub(super) fn new(cluster: &Cluster, address: &str) -> Result<Self> {
        let connection = cluster.shards.connect(address)?;
        Ok(Self { peer: format!("mirror {address}"), connection })
    }

    pub(super) fn client(&self, within: Duration) -> MirrorServiceClient<Connection> {
        let client = MirrorServiceClient::new(self.connection.within(within));
        client.max_decoding_message_size(MAX_CONTROL_MESSAGE)
    }
}
