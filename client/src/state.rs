//! Properties of a job that only the servers together know: the hash of its state, and the steps
//! applied to each tensor.

use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::time::sleep;
use zeroshard_model::{AppliedSteps, Error, Result, Server};
use zeroshard_net::{
    Deadline,
    transport::{Connection, MAX_CONTROL_MESSAGE},
};
use zeroshard_proto::pb::{self, shard_service_client::ShardServiceClient};

use crate::{Cluster, Description, retry::drops_job};

/// The interval at which a reader that waits for servers checks whether slices have moved.
const MOVED_INTERVAL: Duration = Duration::from_millis(500);

impl Cluster {
    /// The hash of a job's whole state at its current version: hexadecimal BLAKE3. It depends on
    /// the training run, and not on the cluster.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::VersionGone`] if a step was applied meanwhile,
    /// [`Error::Timeout`].
    pub async fn state_hash(&self, job: &str) -> Result<String> {
        let deadline = Deadline::after(self.options.timeout);
        let mut ahead = 0;
        loop {
            let description = self.describe_job(job).await?;
            let version = description.version.ok_or_else(|| {
                Error::refused(format!("job {job:?} has no state yet; upload its parameters first"))
            })?;
            // A job that trains leaves a version before all servers have been asked. They wait for
            // a later one.
            let hash = hash(self, &description, version + ahead);
            let patience = if ahead > 0 { deadline.left() / 2 } else { deadline.left() };
            let hash = tokio::select! {
                hash = tokio::time::timeout(patience, hash) => hash,
                () = self.has_moved(job, &description) => continue,
            };
            match hash {
                Ok(Err(error)) if has_changed(&error) && !deadline.left().is_zero() => ahead += 1,
                Ok(hash) => return hash,
                // The job has stopped before this version.
                Err(_) if ahead > 0 && !deadline.left().is_zero() => ahead = 0,
                Err(_) => {
                    let waiting_for = format!("the shard servers to hash job {job:?}");
                    return Err(deadline.timeout(waiting_for));
                }
            }
        }
    }

    /// Waits until the placement of the job differs from `description`, so that a reader does not
    /// wait for a lost server.
    async fn has_moved(&self, job: &str, description: &Description) {
        loop {
            sleep(MOVED_INTERVAL).await;
            let found = self.describe_job(job).await;
            if found.is_ok_and(|found| found.placement != description.placement) {
                return;
            }
        }
    }
}

/// Returns whether the servers could not answer about a version because the job has moved on, or to
/// other servers.
fn has_changed(error: &Error) -> bool {
    matches!(error, Error::VersionGone { .. } | Error::NotHere { .. } | Error::StaleEpoch { .. })
        || drops_job(error)
}

/// BLAKE3 of the version and of every slice's digest, in manifest order.
pub(crate) async fn hash(cluster: &Cluster, of: &Description, version: u64) -> Result<String> {
    let job = &of.spec.name;
    let digests = of.placement.servers().iter().map(|server| async move {
        ask(cluster, server, "digests", |mut client| async move {
            let (job, line) = (job.clone(), of.line);
            client.digest(pb::DigestRequest { job, job_id: of.id, version, line }).await
        })
        .await
        .map(|answer| answer.slices)
    });
    state_hash_of(of, version, try_join_all(digests).await?.concat())
}

/// The hash of a job's state with these digests of its slices.
///
/// # Errors
/// [`Error::NotHere`] if one is missing, [`Error::Internal`] if there are too many.
pub(crate) fn state_hash_of(
    of: &Description,
    version: u64,
    mut slices: Vec<pb::SliceDigest>,
) -> Result<String> {
    let job = &of.spec.name;
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
    Ok(combined_hash(version, slices.iter().map(|slice| &slice.digest[..])))
}

/// Returns the hash of a job's state ([`Cluster::state_hash`]): hexadecimal BLAKE3 of the version
/// and of each slice's digest, in manifest order.
pub fn combined_hash<'a>(version: u64, digests: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&version.to_le_bytes());
    digests.into_iter().for_each(|digest| _ = hasher.update(digest));
    hasher.finalize().to_hex().to_string()
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
            let (job, line) = (job.clone(), of.line);
            client.steps(pb::StepsRequest { job, job_id: of.id, version, line }).await
        })
        .await
    });
    let mut steps = vec![AppliedSteps::default(); of.spec.manifest.tensors().len()];
    for answer in try_join_all(answers).await? {
        add_steps(of, answer.slices, &mut steps)?;
    }
    Ok(steps)
}

/// Adds the steps of slices to those of the tensors of a job.
///
/// # Errors
/// Those of [`AppliedSteps::of`].
pub(crate) fn add_steps(
    of: &Description,
    slices: Vec<pb::SliceSteps>,
    steps: &mut [AppliedSteps],
) -> Result<()> {
    // They are equal for all slices of a tensor.
    for pb::SliceSteps { slice, applied, scalar_state, averaged } in slices {
        if let Some(slice) = of.spec.manifest.slices().get(slice as usize) {
            let applied = of.spec.applied_to(slice.tensor, applied, &scalar_state)?;
            steps[slice.tensor] = AppliedSteps { averaged, ..applied };
        }
    }
    Ok(())
}

/// Calls a server, and repeats the call after transient errors until the cluster's timeout.
pub(crate) async fn ask<T, F>(
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
