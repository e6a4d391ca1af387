//! A rank's calls to the coordinator and the servers outside a step: the state of the job, saves,
//! the rank's data for checkpoints, and the end of its lease.

use std::{sync::PoisonError, time::Duration};

use bytes::Bytes;
use zeroshard_model::{AppliedSteps, Error, JobSpec, Placement, Result, checkpoint::MAX_USER_DATA};
use zeroshard_net::Deadline;
use zeroshard_proto::pb;

use super::{
    Job, Member,
    membership::{CHANGE_TIMEOUT, Membership, SentData},
};
use crate::{cluster::Description, retry::drops_job, state};

/// How long a save may take. It has the same limit in the coordinator.
const SAVE_LIMIT: Duration = Duration::from_secs(3600);

/// The pause before servers are asked again that did not know of a new placement.
const CHANGE_PAUSE: Duration = Duration::from_millis(20);

impl Job {
    /// The hash of the job's whole state at `version`, which must be the current version.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn state_hash(&self, version: u64) -> Result<String> {
        let cluster = &self.0.cluster;
        self.in_current_epoch(version, |of| async move { state::hash(cluster, &of, version).await })
            .await
    }

    /// The steps applied to each tensor, by its index, at `version`, which must be the current
    /// version. Skipped steps do not count, and neither do steps without a gradient of the tensor.
    /// Tensors that are not trained have none.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn applied_steps(&self, version: u64) -> Result<Vec<AppliedSteps>> {
        let cluster = &self.0.cluster;
        let steps = |of| async move { state::applied_steps(cluster, &of, version).await };
        self.in_current_epoch(version, steps).await
    }

    /// Reads from the servers of the current placement, and again if the placement changes
    /// meanwhile.
    async fn in_current_epoch<T, F: Future<Output = Result<T>>>(
        &self,
        version: u64,
        read: impl Fn(Description) -> F,
    ) -> Result<T> {
        let mut limit = None;
        loop {
            let described = self.described(version)?;
            let epoch = described.epoch;
            let error = match self.while_in(epoch, read(described)).await {
                Err(error @ Error::StaleEpoch { .. }) => error,
                Err(error)
                    if self.0.spec.replicas > 1
                        && (drops_job(&error) || matches!(error, Error::NotHere { .. })) =>
                {
                    error
                }
                result => return result,
            };
            // The servers and this rank do not learn of a new placement at the same time.
            let limit = limit.get_or_insert_with(|| Deadline::after(CHANGE_TIMEOUT));
            if limit.left().is_zero() {
                return Err(error);
            }
            let _ = self.wait_for_change(epoch, limit.at_most(CHANGE_PAUSE)).await;
        }
    }

    fn described(&self, version: u64) -> Result<Description> {
        let Membership { epoch, placement, .. } = self.current()?;
        let (spec, placement) = (JobSpec::clone(&self.0.spec), Placement::clone(&placement));
        let (id, version) = (self.0.id, Some(version));
        Ok(Description { spec, id, epoch, placement, version, line: None })
    }

    /// Waits until `version`, the one that the last step has made, is saved where the policy of the
    /// job says, for up to an hour. Does nothing if it has been saved already. Returns the size of
    /// the checkpoint in bytes.
    ///
    /// # Errors
    /// [`Error::RolledBack`]: the job has returned to an earlier version, which is saved.
    /// [`Error::Invalid`] if the job has no policy or is at a later version,
    /// [`Error::UserDataLost`], [`Error::Storage`], [`Error::Timeout`].
    pub async fn save(&self, version: u64) -> Result<u64> {
        self.check_restored(version)?;
        let Member { cluster, spec, id, .. } = &*self.0;
        let (job, url) = (spec.name.clone(), String::new());
        let request = pb::SaveCheckpointRequest { job, job_id: *id, url, unless_saved: true };
        let deadline = Deadline::after(SAVE_LIMIT);
        loop {
            match cluster.save(request.clone()).await {
                Err(Error::Timeout { .. }) if !deadline.left().is_zero() => {}
                Ok((saved, _)) if saved < version => {
                    self.end_rolled_back();
                    return Err(self.rolled_back(saved));
                }
                Ok((saved, _)) if saved > version => {
                    let what = format!("version to save of job {:?}", spec.name);
                    let expected = format!("{saved}, the current version");
                    return Err(Error::invalid(what, version, expected));
                }
                saved => return saved.map(|(_, bytes)| bytes),
            }
        }
    }

    /// Sends this rank's data for checkpoints of `version`, the one that its last step has made: at
    /// most [`MAX_USER_DATA`] bytes. A step that was committed with
    /// [`Commit::user_data_follows`](crate::Commit::user_data_follows) needs it before the next
    /// commit: checkpoints of the version wait for it.
    ///
    /// # Errors
    /// [`Error::RolledBack`]: the job has returned to an earlier version. [`Error::LeaseLost`],
    /// [`Error::Invalid`], [`Error::Timeout`].
    pub async fn send_user_data(&self, version: u64, user_data: impl Into<Bytes>) -> Result<()> {
        // The epoch is read first: if the job is restored after the check, the data is older.
        let epoch = self.epoch();
        self.check_restored(version)?;
        let Member { cluster, spec, id, rank, .. } = &*self.0;
        let deadline = Deadline::after(cluster.options.timeout);
        let data = user_data.into();
        self.keep_data(epoch, version, &data);
        loop {
            let lease = self.lease();
            let request = pb::SendUserDataRequest {
                job: spec.name.clone(),
                job_id: *id,
                lease,
                rank: *rank,
                version,
                user_data: data.clone(),
            };
            let sent = cluster.retry("the receipt of the data of this rank", |mut client| {
                let request = request.clone();
                async move { client.send_user_data(request).await }
            });
            match self.unless_ended(sent).await {
                Err(Error::LeaseLost { .. }) => self.wait_for_lease_after(lease, deadline).await?,
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// Keeps the data of this rank for a new coordinator, unless it will be refused.
    pub(super) fn keep_data(&self, epoch: u64, version: u64, data: &Bytes) {
        if data.len() > MAX_USER_DATA {
            return;
        }
        let sent = SentData { epoch, version, data: data.clone() };
        *self.0.user_data.lock().unwrap_or_else(PoisonError::into_inner) = sent;
    }

    /// Ends the lease in order. Ranks that wait for this rank in the open step receive
    /// [`Error::RankLeft`].
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leave(&self) -> Result<()> {
        self.end_lease(false).await
    }

    /// Ends the lease like [`Self::leave`], for a rank that has no more data. In a job with
    /// [`zeroshard_model::Departure::Absent`] the other ranks continue, and the gradients of this
    /// rank count as zeros.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leave_done(&self) -> Result<()> {
        self.end_lease(true).await
    }

    async fn end_lease(&self, done: bool) -> Result<()> {
        let Member { cluster, spec, id, .. } = &*self.0;
        let lease = self.lease();
        let request = pb::LeaveRequest { job: spec.name.clone(), lease, job_id: *id, done };
        let mut tries = 0;
        let left = cluster.retry("leave", |mut client| {
            tries += 1;
            let request = request.clone();
            async move { client.leave(request).await }
        });
        match left.await {
            // An earlier try has ended the lease, and with it the job.
            Err(Error::UnknownJob { .. } | Error::JobReplaced { .. }) if tries > 1 => Ok(()),
            left => left.map(drop),
        }
    }
}
