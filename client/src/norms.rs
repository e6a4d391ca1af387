//! Norms of parameters, for operators.

use std::time::Duration;

use futures_util::future::try_join_all;
use zeroshard_model::{Error, Manifest, Result};
use zeroshard_net::{Deadline, transport::MAX_CONTROL_MESSAGE};
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};

use crate::{Cluster, Description};

/// The norms of the parameters of a job at one version.
#[derive(Debug, Clone, PartialEq)]
pub struct Norms {
    /// The version.
    pub version: u64,
    /// The L2 norm of the master weights of each tensor, in the order of the manifest: that of its
    /// owner for a tied tensor, `None` for a buffer. Not finite if a weight is not.
    pub tensors: Vec<Option<f64>>,
}

impl Cluster {
    /// The norms of a job's parameters at its current version. Shard servers read all parameters,
    /// for one caller at a time. The norms do not depend on the number of servers.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for a job without initial parameters;
    /// [`Error::Timeout`], for example if steps are faster than a server reads its parameters.
    pub async fn norms(&self, job: &str) -> Result<Norms> {
        let read = |of, version, wait| self.norms_at(of, version, wait);
        self.at_version(job, None, read).await
    }

    async fn norms_at(&self, of: Description, version: u64, wait: Duration) -> Result<Norms> {
        let (job, manifest) = (&of.spec.name, &of.spec.manifest);
        let answers = of.placement.servers().iter().map(|server| async move {
            let shard = self.shards.get(server)?;
            let client = ShardServiceClient::new(shard.pull.within(wait));
            let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
            let request = pb::NormsRequest { job: job.clone(), job_id: of.id, version };
            let answer = client.norms(request).await;
            answer.map_err(|status| from_status(&status, &shard.peer))
        });
        let waiting_for = || format!("the norms of version {version} of job {job:?}");
        let answers = Deadline::after(wait).limit(waiting_for, try_join_all(answers)).await??;
        let mut sums = vec![None; manifest.slices().len()];
        for pb::SliceNorm { slice, sum_of_squares } in
            answers.into_iter().flat_map(|answer| answer.into_inner().slices)
        {
            if let Some(sum) = sums.get_mut(slice as usize) {
                *sum = Some(sum_of_squares);
            }
        }
        let tensors = (0..manifest.tensors().len()).map(|tensor| {
            let norm = of_tensor(manifest, tensor, &sums);
            // A server may have become the backup of the slice.
            norm.map_err(|slice| Error::NotHere { job: job.clone(), slice })
        });
        Ok(Norms { version, tensors: tensors.collect::<Result<_>>()? })
    }
}

/// The norm of a tensor from the sums of squares of slices; `None` for a buffer.
///
/// # Errors
/// A slice without a sum.
fn of_tensor(manifest: &Manifest, tensor: usize, sums: &[Option<f64>]) -> Result<Option<f64>, u32> {
    let owner = manifest.owner(tensor);
    if manifest.tensors()[owner].buffer {
        return Ok(None);
    }
    let mut sum: f64 = 0.0;
    for slice in manifest.slices_of(owner) {
        sum += sums[slice].ok_or(slice as u32)?;
    }
    Ok(Some(sum.sqrt()))
}
