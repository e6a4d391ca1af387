//! The hash of a job's whole state.

use futures_util::future::try_join_all;
use zeroshard_proto::{
    Error, Result, Server,
    pb::{self, shard_client::ShardClient},
    transport::MAX_CONTROL_MESSAGE,
};

use crate::{Cluster, Description};

/// BLAKE3 of the version and of every slice's digest, in manifest order.
pub(crate) async fn state_hash(cluster: &Cluster, of: &Description, version: u64) -> Result<String> {
    let digests =
        of.placement.servers().iter().map(|server| digests(cluster, &of.spec.name, version, server));
    let mut slices = try_join_all(digests).await?.concat();
    slices.sort_unstable_by_key(|slice| slice.slice);
    let expected = 0..of.spec.manifest.slices().len() as u32;
    if !slices.iter().map(|slice| slice.slice).eq(expected) {
        let cause = format!("the servers gave {} digests, not one for each slice", slices.len());
        return Err(Error::Internal { cause });
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&version.to_le_bytes());
    for slice in &slices {
        hasher.update(&slice.digest);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

async fn digests(
    cluster: &Cluster,
    job: &str,
    version: u64,
    server: &Server,
) -> Result<Vec<pb::SliceDigest>> {
    let shard = cluster.shards.get(server)?;
    let what = format!("digests of {}", shard.peer);
    let answer = cluster.retry(&what, |_, wait_ms| {
        let request = pb::DigestRequest { job: job.to_owned(), version, wait_ms };
        let client = ShardClient::new(shard.pull.clone());
        let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
        async move { client.digest(request).await }
    });
    Ok(answer.await?.slices)
}
