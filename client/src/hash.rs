//! The hash of a job's whole state.

use futures_util::future::try_join_all;
use zeroshard_proto::{
    Error, Result,
    pb::{self, shard_client::ShardClient},
    transport::MAX_CONTROL_MESSAGE,
};

use crate::{Cluster, Description};

/// BLAKE3 of the version and of every slice's digest, in manifest order.
pub(crate) async fn state_hash(cluster: &Cluster, of: &Description, version: u64) -> Result<String> {
    let digests = of.placement.servers().iter().map(async |server| {
        let shard = cluster.shards.get(server)?;
        let what = format!("digests of {}", shard.peer);
        let answer = cluster.retry(&what, async |wait_ms| {
            let request = pb::DigestRequest { job: of.spec.name.clone(), version, wait_ms };
            let client = ShardClient::new(shard.pull.clone());
            client.max_decoding_message_size(MAX_CONTROL_MESSAGE).digest(request).await
        });
        Ok::<_, Error>(answer.await?.slices)
    });
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
