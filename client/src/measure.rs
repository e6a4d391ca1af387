//! Measurements of the connection to a shard server.

use std::time::{Duration, Instant};

use zeroshard_model::{Result, Server};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};

use crate::Cluster;

/// The result of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// The version of the server.
    pub version: String,
    /// The clock of the server when it answered: milliseconds since 1970, UTC.
    pub unix_ms: u64,
    /// The time until the first message arrived.
    pub latency: Duration,
    /// The number of received bytes.
    pub bytes: u64,
    /// The time from the first to the last message.
    pub took: Duration,
}

impl Cluster {
    /// Receives this number of bytes, at most 256 MiB, from a shard server in one stream.
    ///
    /// # Errors
    /// [`LimitExceeded`](crate::Error::LimitExceeded) while another client measures the server,
    /// [`Unavailable`](crate::Error::Unavailable) or [`Timeout`](crate::Error::Timeout).
    pub async fn measure(&self, server: &Server, bytes: u64) -> Result<Measured> {
        let shard = self.shards.get(server)?;
        let deadline = Deadline::after(self.options.timeout);
        let client = ShardServiceClient::new(shard.pull.within(deadline.left()));
        let waiting_for = || format!("the measurement of {}", shard.peer);
        let measured = receive(client, bytes);
        let measured = deadline.limit(waiting_for, measured).await?;
        measured.map_err(|status| from_status(&status, &shard.peer))
    }
}

async fn receive(
    mut client: ShardServiceClient<zeroshard_net::transport::Connection>,
    bytes: u64,
) -> Result<Measured, tonic::Status> {
    let began = Instant::now();
    let mut messages = client.measure(pb::MeasureRequest { bytes }).await?.into_inner();
    let first = messages.message().await?.unwrap_or_default();
    let (latency, began) = (began.elapsed(), Instant::now());
    let mut received = first.data.len() as u64;
    while let Some(message) = messages.message().await? {
        received += message.data.len() as u64;
    }
    let (took, pb::MeasureResponse { version, unix_ms, .. }) = (began.elapsed(), first);
    Ok(Measured { version, unix_ms, latency, bytes: received, took })
}
