//! Properties of a job that only the servers together know: the hash of its state, and the steps
//! applied to each tensor.

use futures_util::future::try_join_all;
use zeroshard_model::{AppliedSteps, Error, Result, Server};
use zeroshard_net::transport::{Connection, MAX_CONTROL_MESSAGE};
use zeroshard_proto::pb::{self, shard_service_client::ShardServiceClient};

use crate::{Cluster, Description};

/// BLAKE3 of the version and of every slice's digest, in manifest order.
pub(crate) async fn hash(cluster: &Cluster, of: &Description, version: u64) -> Result<String> {
    let job = &of.spec.name;
    let digests = of.placement.servers().iter().map(|server| async move {
        ask(cluster, server, "digests", |mut client| async move {
            client.digest(pb::DigestRequest { job: job.clone(), job_id: of.id, version }).await
        })
        .await
        .map(|answer| answer.slices)
    });
    let mut slices = try_join_all(digests).await?.concat();
    slices.sort_unstable_by_key(|slice| slice.slice);
    let expected = 0..of.spec.manifest.slices().len() as u32;
    // A server may have become the backup of a slice.
    let is_there = |slice: &u32| slices.binary_search_by_key(slice, |of| of.slice).is_ok();
    if let Some(slice) = expected.clone().find(|slice| !is_there(slice)) {
        return Err(Error::NotHere { job: job.clone(), slice });
    }
    if !slices.iter().map(|slice| slice.slice).eq(expected) {
        let cause =
            format!("the servers returned {} digests instead of one for each slice", slices.len());
        return Err(Error::Internal { cause });
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&version.to_le_bytes());
    for slice in &slices {
        hasher.update(&slice.digest);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The steps applied to each tensor.
pub(crate) async fn applied_steps(
    cluster: &Cluster,
    of: &Description,
    version: u64,
) -> Result<Vec<AppliedSteps>> {
    let job = &of.spec.name;
    let answers = of.placement.servers().iter().map(|server| async move {
        ask(cluster, server, "applied steps", |mut client| async move {
            client.steps(pb::StepsRequest { job: job.clone(), job_id: of.id, version }).await
        })
        .await
    });
    let mut steps = vec![AppliedSteps::default(); of.spec.manifest.tensors().len()];
    for answer in try_join_all(answers).await? {
        // They are equal for all slices of a tensor.
        for pb::SliceSteps { slice, applied, scalar_state } in answer.slices {
            if let Some(slice) = of.spec.manifest.slices().get(slice as usize) {
                let optimizer = &of.spec.groups[0];
                steps[slice.tensor] = AppliedSteps::of(optimizer, applied, &scalar_state)?;
            }
        }
    }
    Ok(steps)
}

async fn ask<T, F>(
    cluster: &Cluster,
    server: &Server,
    what: &str,
    mut call: impl FnMut(ShardServiceClient<Connection>) -> F,
) -> Result<T>
where
    F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
{
    let shard = cluster.shards.get(server)?;
    let call = |left| {
        let client = ShardServiceClient::new(shard.pull.within(left));
        call(client.max_decoding_message_size(MAX_CONTROL_MESSAGE))
    };
    cluster.tries(&shard.peer, what, call).await
}
