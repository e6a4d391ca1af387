//! A rank's votes about a step: to commit it, to discard the attempt, or to rest. Before the
//! vote, a rank can ask for the sum of the gradients and its norm.

use std::sync::Arc;

use futures_util::future::{Either, select};
use tokio::sync::watch;
use zeroshard_model::{Error, Result};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind},
};
use zeroshard_proto::pb;

use super::{
    super::{Member, attempts::State, membership::CHANGE_TIMEOUT},
    Attempt,
};
#[cfg(doc)]
use crate::Job;
use crate::{Commit, Reduced, Rested, StateSelector, StepReport, Target};

impl Attempt {
    /// Announces that this rank has pushed all gradients of the step, and waits for the decision. A
    /// repeated call returns the same result.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::RankLeft`], [`Error::Disagreement`]
    /// with another rank, [`Error::Timeout`], which names the ranks that did not commit.
    pub async fn commit(&self, commit: Commit) -> Result<StepReport> {
        let Member { cluster, spec, .. } = &*self.job.0;
        let deadline = Deadline::after(cluster.options.timeout);
        if !commit.user_data.is_empty() {
            let State { epoch, step, .. } = *self.state;
            self.job.keep_data(epoch, step.saturating_add(1), &commit.user_data);
        }
        let request = pb::CommitRequest {
            turn: Some(self.turn()),
            groups: commit.groups.iter().map(Into::into).collect(),
            loss_scale: commit.loss_scale,
            max_norm: commit.max_norm,
            loss: commit.loss,
            gradient_factors: commit.gradient_factors,
            written: commit.written,
            user_data: commit.user_data,
            user_data_follows: commit.user_data_follows,
        };
        // The call is sent regardless of the known epoch, because the step may have been decided
        // before.
        let report = cluster.retry("the decision", |mut client| {
            let request = request.clone();
            async move { client.commit(request).await }
        });
        match self.span("commit").over(report).await {
            Ok(report) => {
                self.decided();
                // The placement may have changed for the next step. If the change does not arrive,
                // the next push is refused, and the next attempt waits for it.
                let limit = deadline.at_most(CHANGE_TIMEOUT);
                let _ = self.job.wait_for_change(report.next_epoch.saturating_sub(1), limit).await;
                Ok(StepReport::new(&report, &spec.manifest))
            }
            Err(error) => Err(self.noted(error, deadline).await),
        }
    }

    /// Commits, and fills the targets with the parameters of the version that the step produces.
    /// The pull is sent together with the commit, so that parameters arrive slice by slice while
    /// the servers still apply the step.
    ///
    /// # Errors
    /// Those of [`Self::commit`], after which the content of the targets is undefined; those of
    /// [`Job::pull`].
    pub async fn commit_and_pull(
        &self,
        commit: Commit,
        targets: Vec<Target<'_>>,
    ) -> Result<StepReport> {
        let pull = self.job.pull(self.state.step.saturating_add(1), targets);
        let commit = self.commit(commit);
        match select(Box::pin(commit), Box::pin(pull)).await {
            Either::Left((report, pull)) => {
                let report = report?;
                pull.await?;
                Ok(report)
            }
            Either::Right((pulled, commit)) => {
                // The result of the step has precedence over the error of the pull.
                let report = commit.await?;
                pulled?;
                Ok(report)
            }
        }
    }

    /// The norm of the step's mean gradient, as soon as every rank has pushed its gradients and
    /// before the step is decided, for callers whose commit depends on the norm. `loss_scale` is
    /// the same as in [`Commit`].
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::RankLeft`]. [`Error::Timeout`], which
    /// names the ranks whose gradients are missing.
    pub async fn reduce(&self, loss_scale: f64) -> Result<Reduced> {
        let Member { cluster, spec, .. } = &*self.job.0;
        let deadline = Deadline::after(cluster.options.timeout);
        let request = pb::ReduceRequest { turn: Some(self.turn()), loss_scale };
        let report = cluster.retry("the gradient's norm", |mut client| {
            let request = request.clone();
            async move { client.reduce(request).await }
        });
        match self.span("reduce").over(report).await {
            Ok(report) => Ok(Reduced::new(&report, &spec.manifest)),
            Err(error) => Err(self.noted(error, deadline).await),
        }
    }

    /// Fills the targets with the sums over the ranks of the gradients of this attempt, in f32, as
    /// soon as every rank has pushed them. One rank alone may call it.
    ///
    /// # Errors
    /// Those of [`Self::reduce`]; [`Error::VersionGone`] if the step was decided.
    pub async fn pull_gradient_sum(&self, targets: Vec<Target<'_>>) -> Result<()> {
        let deadline = Deadline::after(self.job.0.cluster.options.timeout);
        let pull = self.job.pull_part(self.state.step, StateSelector::GradientSum, targets);
        self.while_open(pull, deadline).await
    }

    /// Waits until this rank knows of `epoch`, of which another rank of its group has learned
    /// first. A later epoch than that of the attempt ends the attempt.
    ///
    /// # Errors
    /// [`Error::StepAborted`], [`Error::StepMismatch`], [`Error::RolledBack`]: the attempt has
    /// ended. [`Error::Timeout`].
    pub async fn reach_epoch(&self, epoch: u64) -> Result<()> {
        let deadline = Deadline::after(self.job.0.cluster.options.timeout);
        self.job.wait_for_change(epoch.saturating_sub(1), deadline).await?;
        self.check_epoch(deadline).await
    }

    /// Discards the gradients of this attempt, and waits until every rank has done so. The step can
    /// then be tried again with other gradients in the next attempt.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: the servers have already dropped the attempt.
    /// [`Error::StepMismatch`]: the step was decided. [`Error::Disagreement`] with a rank that
    /// commits; [`Error::RankLeft`]; [`Error::Timeout`], which names the ranks that have not
    /// discarded the attempt.
    pub async fn discard(&self) -> Result<()> {
        let cluster = &self.job.0.cluster;
        let deadline = Deadline::after(cluster.options.timeout);
        let request = pb::DiscardRequest { turn: Some(self.turn()) };
        self.check_epoch(deadline).await?;
        let discarded = cluster.retry("all ranks to discard the attempt", |mut client| {
            let request = request.clone();
            async move { client.discard(request).await }
        });
        let next = self.while_open(discarded, deadline).await?.attempt;
        let cause = "the ranks have discarded its gradients".to_owned();
        self.state.end(self.aborted(self.state.epoch, cause), next);
        Ok(())
    }

    /// Contributes nothing more to this step and to later ones, and waits until every rank rests,
    /// for a rank that has no more batches. Gradients that were pushed in this attempt count in its
    /// step. Meanwhile the steps of the other ranks need no call of this rank. `excluded`: mean
    /// gradients are over the ranks that do not rest; otherwise this rank counts as one whose
    /// gradients are zeros. It must be the same on all ranks.
    ///
    /// # Errors
    /// [`Error::StepAborted`] or [`Error::RankLeft`]: a rank was lost or has left, and all rests
    /// have ended. [`Error::Timeout`], which names the ranks that still train, if they make no step
    /// for the duration of the timeout.
    pub async fn rest(&self, excluded: bool) -> Result<Rested> {
        let Member { cluster, spec, .. } = &*self.job.0;
        let request = pb::RestRequest { turn: Some(self.turn()), excluded };
        if spec.group_size > 1 {
            let sentence = "a rank of a job with groups cannot rest: its group needs its gradients";
            return Err(Error::refused(sentence));
        }
        let response = loop {
            let before = cluster.describe_job(&spec.name).await?.version;
            let deadline = Deadline::after(cluster.options.timeout);
            let rested = cluster.retry("all ranks to rest", |mut client| {
                let request = request.clone();
                async move { client.rest(request).await }
            });
            match rested.await {
                Ok(response) => break response,
                Err(error @ Error::Timeout { .. }) => {
                    if cluster.describe_job(&spec.name).await?.version == before {
                        return Err(error);
                    }
                }
                Err(error) => return Err(self.rest_ended(error, deadline).await),
            }
        };
        let pb::RestResponse { step, attempt: number, last } = response;
        self.state.end(self.aborted(self.state.epoch, "every rank has rested".to_owned()), number);
        let State { lease, epoch, .. } = *self.state;
        let end = watch::Sender::new(None);
        let mut attempts = self.job.0.attempts.lock();
        attempts.clear();
        attempts.insert(step, Arc::new(State { lease, epoch, step, number, end }));
        Ok(Rested { step, last })
    }

    /// The error of a rest. Its step is decided in most cases, which is not the reason for its end.
    async fn rest_ended(&self, error: Error, deadline: Deadline) -> Error {
        match (error.clone(), self.noted(error, deadline).await) {
            (aborted @ Error::StepAborted { .. }, _) => aborted,
            (Error::StaleEpoch { .. }, Error::StepMismatch { .. }) => {
                self.aborted(self.job.epoch(), self.cause_of_new_epoch().await)
            }
            (_, noted) => noted,
        }
    }

    /// A span for a call to the coordinator.
    fn span(&self, name: &'static str) -> Span {
        self.trace().span(name, SpanKind::Client).with("zeroshard.rank", i64::from(self.job.0.rank))
    }
}
