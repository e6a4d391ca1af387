//! A cluster, accessed through its coordinator.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use zeroshard_model::{Error, JobSpec, JobVersion, Placement, Restore, Result};
use zeroshard_net::{
    Deadline,
    transport::{Connection, MAX_CONTROL_MESSAGE},
};
use zeroshard_proto::{
    pb::{self, coordinator_service_client::CoordinatorServiceClient},
    status::from_status,
};

use crate::{
    Options, Status, Traffic,
    retry::{Next, Tries},
    shards::Shards,
    status::status_request,
};

/// A connection to a cluster. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cluster {
    pub(crate) connection: Connection,
    /// Role and address, for messages.
    pub(crate) peer: String,
    pub(crate) options: Options,
    pub(crate) shards: Arc<Shards>,
}

/// The description of a job that a reader needs.
#[derive(Debug, Clone)]
pub struct Description {
    /// The spec of the job.
    pub spec: JobSpec,
    /// The id, which distinguishes the job from earlier and later jobs of the same name.
    pub id: u64,
    /// The membership generation.
    pub epoch: u64,
    /// The placement of the slices.
    pub placement: Placement,
    /// The current version; `None` before the initial parameters are complete.
    pub version: Option<u64>,
    /// The number of the version's line ([`zeroshard_model::Line`]). `None` for ranks, which the
    /// epoch protects.
    pub line: Option<u64>,
}

/// A job that is to be made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CreateJob {
    /// What the job is.
    pub spec: JobSpec,
    /// The version of another job from which the job continues: see
    /// [`zeroshard_model::Fork`]. For each copied tensor, every uploading rank either uploads
    /// its part or calls [`crate::Job::keep`].
    pub from: Option<JobVersion>,
    /// With `from`: optimizer state and numbers of applied steps begin as in a new run.
    pub fresh_state: bool,
    /// The checkpoint from which the job starts. Nothing is uploaded: [`crate::Job::version`] is
    /// that of the checkpoint from the beginning.
    pub restore: Option<Restore>,
}

impl CreateJob {
    /// A job that does not continue from another job.
    pub fn new(spec: JobSpec) -> Self {
        Self { spec, from: None, fresh_state: false, restore: None }
    }
}

impl From<&JobSpec> for CreateJob {
    fn from(spec: &JobSpec) -> Self {
        Self::new(spec.clone())
    }
}

impl Cluster {
    /// The status of the servers and jobs, and the version and the clock of the coordinator.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn status(&self) -> Result<Status> {
        let status = self
            .retry("an answer", |mut client| async move { client.status(status_request()).await });
        status.await?.try_into()
    }

    /// Creates the job, unless it exists already. If it continues from another job, the content of
    /// that job has been copied when this returns.
    ///
    /// # Errors
    /// [`Error::JobExists`] if it exists with a different spec or predecessor, [`Error::Timeout`]
    /// if too few servers connect, [`Error::JobFailed`] if they do not have enough memory; for the
    /// predecessor, [`Error::UnknownJob`], [`Error::JobReplaced`], [`Error::JobFailed`], and
    /// [`Error::VersionGone`] if it has made another step; for a checkpoint,
    /// [`Error::NoCheckpoint`], [`Error::CheckpointDamaged`] and [`Error::Storage`].
    pub async fn create_job(&self, job: impl Into<CreateJob>) -> Result<()> {
        let CreateJob { spec, from, fresh_state, restore } = job.into();
        spec.validate()?;
        let (spec, from) = (Some((&spec).into()), from.as_ref().map(Into::into));
        let restore = restore.as_ref().map(Into::into);
        let request = pb::CreateJobRequest { spec, from, fresh_state, restore };
        self.retry("the job to be made", |mut client| {
            let request = request.clone();
            async move { client.create_job(request).await }
        })
        .await?;
        Ok(())
    }

    /// Saves the current version of a job at `url`, or where the policy of the job says. Returns
    /// the version and the size of the checkpoint in bytes. Training continues meanwhile.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::Storage`]; [`Error::Timeout`], after which the save
    /// continues.
    pub async fn save_checkpoint(&self, job: &str, url: Option<&str>) -> Result<(u64, u64)> {
        let (job, url) = (job.to_owned(), url.unwrap_or_default().to_owned());
        self.save(pb::SaveCheckpointRequest { job, job_id: 0, url, unless_saved: false }).await
    }

    pub(crate) async fn save(&self, request: pb::SaveCheckpointRequest) -> Result<(u64, u64)> {
        let saved = self.retry("the checkpoint", |mut client| {
            let request = request.clone();
            async move { client.save_checkpoint(request).await }
        });
        let pb::SaveCheckpointResponse { version, bytes } = saved.await?;
        Ok((version, bytes))
    }

    /// Deletes the job and frees its memory on the servers.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::Timeout`].
    pub async fn delete_job(&self, job: &str) -> Result<()> {
        // A repeated call needs the id: a job of the name may have been created since.
        let (id, mut tries) = (AtomicU64::new(0), 0);
        let deleted = self.retry("the job to be deleted", |mut client| {
            tries += 1;
            let (job, id) = (job.to_owned(), &id);
            async move {
                if id.load(Relaxed) == 0 {
                    let status = client.status(status_request()).await?.into_inner();
                    let found = status.jobs.iter().find(|of| of.name == job);
                    id.store(found.map_or(0, |found| found.job_id), Relaxed);
                }
                client.delete_job(pb::DeleteJobRequest { job, job_id: id.load(Relaxed) }).await
            }
        });
        match deleted.await {
            // An earlier try has deleted it, and its answer was lost.
            Err(Error::UnknownJob { .. } | Error::JobReplaced { .. })
                if tries > 1 && id.load(Relaxed) != 0 =>
            {
                Ok(())
            }
            deleted => deleted.map(drop),
        }
    }

    /// The description of the job that a reader needs.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::Timeout`].
    pub async fn describe_job(&self, job: &str) -> Result<Description> {
        let answer = self
            .retry("the job's description", |mut client| {
                let request = pb::DescribeJobRequest { job: job.to_owned() };
                async move { client.describe_job(request).await }
            })
            .await?;
        Ok(Description {
            spec: answer.spec.unwrap_or_default().try_into()?,
            id: answer.job_id,
            epoch: answer.epoch,
            placement: answer.placement.unwrap_or_default().try_into()?,
            version: answer.version,
            line: Some(answer.line),
        })
    }

    /// Returns a job to its checkpoint of an earlier version, and waits until it continues. Its
    /// ranks keep their leases, and their calls end with [`Error::RolledBack`]. `url`: the place of
    /// the checkpoint; `None`: that of the job's policy. `skips`: batches that the steps after
    /// `version` skip ([`crate::Job::line`]). Returns the number of the new line.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::NoCheckpoint`]; [`Error::Refused`] if the job is not
    /// at a later version, or if a step before `version` has used one of the batches;
    /// [`Error::Storage`]; [`Error::Timeout`], after which the job may still return.
    pub async fn rewind(
        &self,
        job: &str,
        version: u64,
        url: Option<&str>,
        skips: &[Range<u64>],
    ) -> Result<u64> {
        let of = self.describe_job(job).await?;
        let request = pb::RewindJobRequest {
            job: job.to_owned(),
            job_id: of.id,
            version,
            url: url.unwrap_or_default().to_owned(),
            skips: skips.iter().map(Into::into).collect(),
            from_line: of.line.unwrap_or_default(),
        };
        let rewound = self.retry("the job to return to a checkpoint", |mut client| {
            let request = request.clone();
            async move { client.rewind_job(request).await }
        });
        Ok(rewound.await?.line)
    }

    /// The address of the coordinator, as the caller has named it.
    pub fn address(&self) -> &str {
        self.peer.strip_prefix("coordinator ").unwrap_or(&self.peer)
    }

    /// The number of payload bytes that all jobs of this connection have transferred.
    pub fn traffic(&self) -> Traffic {
        self.shards.traffic()
    }

    /// The generated client of the coordinator for calls over `connection`.
    pub(crate) fn client(connection: Connection) -> CoordinatorServiceClient<Connection> {
        CoordinatorServiceClient::new(connection)
            .max_decoding_message_size(MAX_CONTROL_MESSAGE)
            .max_encoding_message_size(MAX_CONTROL_MESSAGE)
    }

    /// [`Self::tries`] for a call to the coordinator, which gets the remaining time as its limit.
    pub(crate) async fn retry<T, F>(
        &self,
        what: &str,
        mut call: impl FnMut(CoordinatorServiceClient<Connection>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        self.tries(&self.peer, what, |left| call(Self::client(self.connection.within(left)))).await
    }

    /// Calls `peer` until a call succeeds, an error is final, or the deadline passes. `call`
    /// receives the remaining time. (It is not an `AsyncFnMut`, because the future of one is not
    /// known to be `Send`.)
    pub(crate) async fn tries<T, F>(
        &self,
        peer: &str,
        what: &str,
        mut call: impl FnMut(Duration) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let mut tries = Tries::until(Deadline::after(self.options.timeout));
        loop {
            let call = call(tries.timeout());
            let answer = tries.limit(|| format!("{what} from {peer}"), call).await?;
            let error = match answer {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) => from_status(&status, peer),
            };
            if let Next::Refresh(error) = tries.next(error).await? {
                return Err(error);
            }
        }
    }
}
