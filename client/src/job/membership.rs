//! What the coordinator says of the membership, and waiting for it.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::sync::watch;
use zeroshard_proto::{Error, Placement, Result, pb};

use super::Job;
use crate::cluster::Deadline;

/// The coordinator's news of a job's end is at most so much later than the servers'.
const NEWS_TIMEOUT: Duration = Duration::from_secs(5);

/// What the coordinator last said.
#[derive(Debug, Clone)]
pub(super) struct Membership {
    pub(super) epoch: u64,
    pub(super) version: Option<u64>,
    pub(super) placement: Arc<Placement>,
    /// Where the ranks that said so are reached.
    pub(super) peers: BTreeMap<u32, String>,
    /// Why the lease has ended, if it has.
    pub(super) ended: Option<Error>,
}

impl TryFrom<pb::Membership> for Membership {
    type Error = Error;

    fn try_from(message: pb::Membership) -> Result<Self> {
        Ok(Self {
            epoch: message.epoch,
            version: message.version,
            placement: Arc::new(message.placement.unwrap_or_default().try_into()?),
            peers: message.peers.into_iter().map(|peer| (peer.rank, peer.address)).collect(),
            ended: None,
        })
    }
}

/// Passes on what the coordinator says, until the lease ends.
pub(super) async fn watch_membership(
    mut stream: tonic::Streaming<pb::Membership>,
    told: watch::Sender<Membership>,
    peer: String,
    lost: Error,
) {
    let ended = loop {
        match stream.message().await {
            Ok(Some(message)) => match Membership::try_from(message) {
                Ok(membership) => _ = told.send_replace(membership),
                Err(error) => break error,
            },
            Ok(None) => break lost,
            Err(status) => match Error::from_status(&status, &peer) {
                error @ Error::JobFailed { .. } => break error,
                error => {
                    tracing::warn!(%error, "the membership stream broke");
                    break lost;
                }
            },
        }
    };
    told.send_modify(|membership| membership.ended = Some(ended));
}

impl Job {
    /// Notes that `step` is worked on in `epoch`.
    ///
    /// # Errors
    /// [`Error::StepAborted`], once, if that began in an earlier epoch: the servers have dropped what was pushed
    /// then.
    pub(super) fn enter_round(&self, step: u64, epoch: u64) -> Result<()> {
        let mut round = self.round.lock().unwrap_or_else(PoisonError::into_inner);
        match round.replace((step, epoch)) {
            Some((pushed, began)) if pushed == step && began != epoch => {
                *round = None;
                let job = self.spec.name.clone();
                let cause = format!("a rank was lost after its gradients were pushed in epoch {began}");
                Err(Error::StepAborted { job, step, epoch, cause })
            }
            _ => Ok(()),
        }
    }

    /// `work`, unless the lease ends before.
    pub(super) async fn unless_ended<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut membership = self.membership.clone();
        tokio::select! {
            biased;
            result = work => result,
            Ok(now) = membership.wait_for(|now| now.ended.is_some()) => {
                Err(now.ended.clone().expect("it was waited for"))
            }
        }
    }

    /// The coordinator's reason for what a server knows no more of than that it was told to drop the job.
    pub(super) async fn explained(&self, error: Error) -> Error {
        if !matches!(error, Error::JobFailed { .. } | Error::UnknownJob { .. }) {
            return error;
        }
        let mut membership = self.membership.clone();
        let ended = membership.wait_for(|now| now.ended.is_some());
        match tokio::time::timeout(NEWS_TIMEOUT, ended).await {
            Ok(Ok(now)) => now.ended.clone().unwrap_or(error),
            _ => error,
        }
    }

    pub(super) fn current(&self) -> Result<Membership> {
        let membership = self.membership.borrow().clone();
        match membership.ended {
            Some(error) => Err(error),
            None => Ok(membership),
        }
    }

    /// Waits until the coordinator has told of a later epoch than `epoch`.
    pub(super) async fn wait_for_news(&self, epoch: u64, deadline: Deadline) -> Result<()> {
        let mut membership = self.membership.clone();
        let later = membership.wait_for(|now| now.epoch > epoch || now.ended.is_some());
        let waiting_for = || format!("{} to tell of the epoch after {epoch}", self.cluster.peer);
        // The watcher keeps its end until the lease has ended, and says so first.
        let _ = deadline.limit(waiting_for, later).await?;
        self.current().map(|_| ())
    }

    /// The error of a step that was overtaken by a new epoch, once that is known here.
    pub(super) async fn aborted(&self, step: u64, error: Error, deadline: Deadline) -> Error {
        *self.round.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let new = match &error {
            Error::StepAborted { epoch, .. } => *epoch,
            Error::StaleEpoch { current, .. } => *current,
            _ => return error,
        };
        match self.wait_for_news(new.saturating_sub(1), deadline).await {
            Ok(()) if matches!(error, Error::StepAborted { .. }) => error,
            Ok(()) => Error::StepAborted {
                job: self.spec.name.clone(),
                step,
                epoch: self.epoch(),
                cause: "the membership changed".to_owned(),
            },
            Err(error) => error,
        }
    }
}
