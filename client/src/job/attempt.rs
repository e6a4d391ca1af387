//! One try at a step: gradients, new values and the rank's vote, with an identity that allows the
//! servers to refuse messages of earlier tries.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use futures_util::future::{Either, select};
use tokio::sync::watch;
use zeroshard_model::{DType, Error, Result, TensorId};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::pb::{self, push_begin::Contents as Wire};

use super::{
    Job, Member,
    membership::{Membership, NEWS_TIMEOUT},
};
use crate::{
    Commit, Exchange, Reduced, Rested, StatePart, StepReport, Sums, Target, TensorData,
    push::Contents,
};

/// One try at a step, from [`Job::attempt`]. Cheap to clone.
///
/// Gradients that are pushed in one attempt never count in another. An attempt ends when its epoch
/// ends (a rank was lost or has left), when all ranks discard it, or when the step is decided. From
/// the first call that notices the end, every push and every discard of all handles returns
/// [`Error::StepAborted`], including calls that started before. If the step was decided, they
/// return [`Error::StepMismatch`].
#[derive(Debug, Clone)]
pub struct Attempt {
    job: Job,
    state: Arc<State>,
}

/// The attempts of a job that may be open.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    /// By step. The last decided step is kept, and no earlier one.
    by_step: Mutex<BTreeMap<u64, Arc<State>>>,
    /// The latest epoch that an error has named.
    named_epoch: AtomicU64,
}

#[derive(Debug)]
struct State {
    lease: u64,
    epoch: u64,
    step: u64,
    number: u32,
    end: watch::Sender<Option<End>>,
}

/// The end of an attempt.
#[derive(Debug, Clone)]
struct End {
    /// The error that its pushes receive.
    error: Error,
    /// The number of the next attempt in this epoch.
    next: u32,
}

impl Attempts {
    /// An error of a call has named this epoch.
    fn know(&self, epoch: u64) {
        self.named_epoch.fetch_max(epoch, Ordering::AcqRel);
    }

    /// Returns the latest epoch that this rank knows, the latest step with an attempt in it, and
    /// the number of the latest attempt there that may be open. `epoch` is that of the last
    /// membership. An error may have named a later epoch: this rank waits for it, and a new
    /// coordinator may not know it.
    pub(super) fn latest(&self, epoch: u64) -> (u64, u64, u32) {
        let epoch = epoch.max(self.named_epoch.load(Ordering::Acquire));
        let attempts = self.lock();
        let of_epoch = attempts.values().filter(|state| state.epoch == epoch);
        let latest = of_epoch.map(|state| {
            let end = state.end.borrow();
            (state.step, end.as_ref().map_or(state.number, |end| end.next))
        });
        let (step, number) = latest.max().unwrap_or_default();
        (epoch, step, number)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<State>>> {
        self.by_step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    /// The open attempt at `step`. The same attempt is returned until it has ended; then the next
    /// attempt, in the current epoch.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::JobFailed`], [`Error::JobReplaced`]: no further attempt can
    /// be opened. [`Error::RolledBack`]: the job has returned to an earlier version.
    pub fn attempt(&self, step: u64) -> Result<Attempt> {
        self.check_restored(step)?;
        if let Some(restored) = self.0.membership.borrow().restored {
            self.0.restoration.fetch_max(restored.epoch, Ordering::AcqRel);
        }
        let mut attempts = self.0.attempts.lock();
        let before = attempts.get(&step).map(|state| (state.clone(), state.end.borrow().clone()));
        if let Some((state, None)) = before {
            return Ok(Attempt { job: self.clone(), state });
        }
        let Membership { lease, epoch, .. } = self.current()?;
        let number = match before {
            Some((state, Some(end))) if state.epoch == epoch => end.next,
            _ => 0,
        };
        let state = Arc::new(State { lease, epoch, step, number, end: watch::Sender::new(None) });
        attempts.insert(step, state.clone());
        Ok(Attempt { job: self.clone(), state })
    }

    /// Checks that the job has not returned to a version before `version` between two calls.
    ///
    /// # Errors
    /// [`Error::RolledBack`], once for each restoration.
    pub(super) fn check_restored(&self, version: u64) -> Result<()> {
        let restored = self.0.membership.borrow().restored;
        let known = self.0.restoration.load(Ordering::Acquire);
        match restored.filter(|of| of.epoch > known && of.version < version) {
            None => Ok(()),
            Some(restored) => {
                self.end_rolled_back();
                Err(self.rolled_back(restored.version))
            }
        }
    }

    /// Ends the attempts of the epochs before the last restoration of the job from a checkpoint.
    /// Calls that return [`Error::RolledBack`] have done this; it is for callers who know of the
    /// restoration from [`Self::restored`].
    pub fn end_rolled_back(&self) {
        let Some(restored) = self.0.membership.borrow().restored else { return };
        self.0.restoration.fetch_max(restored.epoch, Ordering::AcqRel);
        let error = self.rolled_back(restored.version);
        self.0.attempts.lock().retain(|_, state| {
            let is_open = state.epoch >= restored.epoch;
            if !is_open {
                let attempt = Attempt { job: self.clone(), state: state.clone() };
                attempt.end(error.clone(), 0);
            }
            is_open
        });
    }
}

impl Attempt {
    /// The step, which equals the version from which it starts.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// The epoch of the attempt.
    pub fn epoch(&self) -> u64 {
        self.state.epoch
    }

    /// The number of the attempt: 0 for the first in its epoch, and one more after each discarded
    /// attempt.
    pub fn number(&self) -> u32 {
        self.state.number
    }

    /// Pushes gradients. The calls of one attempt must together cover all trained tensors.
    /// Gradients that other ranks contribute according to the tensor's layout, and not this rank,
    /// are omitted.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::Invalid`], [`Error::Timeout`], …
    pub async fn push(&self, gradients: Vec<TensorData>) -> Result<()> {
        self.check_gradients(&gradients)?;
        if self.job.spec().group_size > 1 {
            let expected = "sums over the group (Attempt::push_sums)";
            return Err(Error::invalid("push in a job with groups", "gradients", expected));
        }
        let wire = self.job.0.cluster.options.wire;
        let begin = self.begin(self.gradients());
        self.job.push(begin, wire, Contents::Contributed(gradients), Some(self)).await
    }

    /// Pushes the sums of the gradients of the group, in a job with groups
    /// ([`JobSpec::group_size`]): those of the pieces of this rank. `present` states for each rank
    /// of the group whether it has a gradient of each tensor of the exchange. Tensors of which no
    /// rank of the group has one are declared absent; [`StepReport::absent`] lists no others.
    ///
    /// [`JobSpec::group_size`]: zeroshard_model::JobSpec::group_size
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub async fn push_sums(
        &self,
        exchange: &Exchange,
        sums: Sums,
        present: &[&[bool]],
    ) -> Result<()> {
        let mut is_present = vec![false; exchange.tensors().len()];
        for piece in exchange.own_pushes() {
            let mut ranks = exchange.group().zip(present);
            is_present[piece.tensor] = ranks.any(|(rank, flags)| {
                piece.ranks.contains(&rank) && flags.get(piece.tensor).copied().unwrap_or(false)
            });
        }
        let begin = self.begin(self.gradients());
        let contents = Contents::Sums(exchange, sums, &is_present);
        self.job.push(begin, DType::F32, contents, Some(self)).await?;
        let tensors = exchange.tensors().iter().zip(&is_present);
        let absent: Vec<_> = tensors.filter(|(_, present)| !**present).map(|(t, _)| *t).collect();
        self.push_absent(&absent).await
    }

    /// Declares that this rank has no gradient of these tensors in the step, or none beyond the
    /// elements that it has pushed. Missing elements count as zeros. If no rank pushes any element
    /// of a tensor, the tensor is not stepped: there is no weight decay, and neither the state nor
    /// the step count changes. The declaration has no effect on a tensor that was pushed
    /// completely.
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub async fn push_absent(&self, tensors: &[TensorId]) -> Result<()> {
        let wire = self.job.0.cluster.options.wire;
        let begin = self.begin(self.gradients());
        self.job.push(begin, wire, Contents::Absent(tensors), Some(self)).await
    }

    /// Pushes new values of tensors: of buffers (such as batch-norm statistics), or of parameters
    /// that the program has written to. The ranks that upload the tensors call this before they
    /// commit. A trained parameter has these values before the step is applied. Readers of the
    /// step's version receive those of other tensors bit for bit. The values count even if the step
    /// is skipped. A tensor that is not pushed keeps its values.
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub async fn push_values(&self, values: Vec<TensorData>) -> Result<()> {
        let State { step, number: attempt, .. } = *self.state;
        let begin = self.begin(Wire::Replacement(pb::Replacement { step, attempt }));
        self.job.push(begin, DType::F32, Contents::Uploaded(values), Some(self)).await
    }

    /// The first message of a push of this attempt.
    fn begin(&self, contents: Wire) -> pb::PushBegin {
        self.job.begin(self.state.epoch, contents)
    }

    fn gradients(&self) -> Wire {
        let State { step, number: attempt, .. } = *self.state;
        Wire::Gradients(pb::Gradients { step, attempt, ..Default::default() })
    }

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
                // The placement may have changed for the next step. If the news does not arrive,
                // the next push is refused, and the next attempt waits for it.
                let news = deadline.at_most(NEWS_TIMEOUT);
                let _ = self.job.wait_for_news(report.next_epoch.saturating_sub(1), news).await;
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
        let pull = self.job.pull_part(self.state.step, StatePart::GradientSum, targets);
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
        self.job.wait_for_news(epoch.saturating_sub(1), deadline).await?;
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
        self.end(self.aborted(self.state.epoch, cause), next);
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
            let expected = "taking part in every step, because its group needs its gradients";
            return Err(Error::invalid("rank of a job with groups", "resting", expected));
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
        self.end(self.aborted(self.state.epoch, "every rank has rested".to_owned()), number);
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

    /// The trace of the step in the epoch of the attempt.
    pub(super) fn trace(&self) -> Trace {
        Trace::of_step(self.job.0.id, self.state.epoch, self.state.step)
    }

    /// A span for a call to the coordinator.
    fn span(&self, name: &'static str) -> Span {
        self.trace().span(name, SpanKind::Client).with("zeroshard.rank", i64::from(self.job.0.rank))
    }

    fn turn(&self) -> pb::Turn {
        let Member { spec, id, rank, .. } = &*self.job.0;
        let State { epoch, step, number: attempt, .. } = *self.state;
        let job = spec.name.clone();
        pb::Turn { job, job_id: *id, lease: self.state.lease, epoch, rank: *rank, step, attempt }
    }

    /// Checks that the attempt is open; a later epoch ends it.
    ///
    /// # Errors
    /// The reason for the end of the attempt.
    pub(super) async fn check_epoch(&self, deadline: Deadline) -> Result<()> {
        let ended = self.state.end.borrow().as_ref().map(|end| end.error.clone());
        if let Some(error) = ended.or_else(|| self.rolled_back()) {
            return Err(error);
        }
        let (epoch, current) = (self.state.epoch, self.job.current()?.epoch);
        match current > epoch {
            false => Ok(()),
            true => {
                let job = self.job.0.spec.name.clone();
                Err(self.noted(Error::StaleEpoch { job, epoch, current }, deadline).await)
            }
        }
    }

    /// Runs `work`, unless the attempt ends first.
    pub(super) async fn while_open<T>(
        &self,
        work: impl Future<Output = Result<T>>,
        deadline: Deadline,
    ) -> Result<T> {
        let mut end = self.state.end.subscribe();
        let result = tokio::select! {
            biased;
            Ok(end) = end.wait_for(Option::is_some) => {
                return Err(end.as_ref().expect("it was waited for").error.clone());
            }
            result = self.job.while_in(self.state.epoch, work) => result,
        };
        match result {
            Ok(value) => Ok(value),
            Err(error) => Err(self.noted(error, deadline).await),
        }
    }

    /// Returns the error of a call for `error`, and ends the attempt if `error` means that it has
    /// ended.
    async fn noted(&self, error: Error, deadline: Deadline) -> Error {
        let State { epoch, number, .. } = *self.state;
        let error = self.trace().name_in(error);
        if let Some(error) = self.rolled_back() {
            return error;
        }
        let (new_epoch, cause) = match &error {
            // The coordinator has answered before its message about the new epoch has arrived.
            Error::RolledBack { .. } => (epoch.saturating_add(1), None),
            Error::StaleAttempt { current, .. } if *current > number => {
                let error = self.aborted(epoch, format!("attempt {number} was discarded"));
                return self.end(error, *current);
            }
            Error::StaleEpoch { current, .. } if *current > epoch => (*current, None),
            Error::StepAborted { epoch: current, cause, .. } => (*current, Some(cause.clone())),
            // The coordinator had no connection to this worker for too long.
            Error::LeaseLost { .. } => {
                let lease = self.state.lease;
                if let Err(ended) = self.job.wait_for_lease_after(lease, deadline).await {
                    return ended;
                }
                let cause = format!("the lease of rank {} had ended", self.job.0.rank);
                (epoch.saturating_add(1), Some(cause))
            }
            // The rank left during this attempt or before it. The epoch is then the same, and the
            // attempt continues when another worker has taken the rank.
            Error::RankLeft { rank, .. } => {
                if self.job.epoch() > epoch {
                    self.end(self.aborted(self.job.epoch(), format!("rank {rank} has left")), 0);
                }
                return error;
            }
            _ => return error,
        };
        if matches!(error, Error::StaleEpoch { .. } | Error::StepAborted { .. }) {
            self.job.0.attempts.know(new_epoch);
        }
        // The next attempt belongs to the new epoch, which must be known here before this attempt
        // ends.
        if let Err(error) = self.job.wait_for_news(new_epoch.saturating_sub(1), deadline).await {
            return error;
        }
        if let Some(error) = self.rolled_back() {
            return error;
        }
        let cause = match cause {
            Some(cause) => cause,
            None => self.cause_of_new_epoch().await,
        };
        let Self { job, state } = self;
        match job.version() {
            Some(version) if version > state.step => self.decided(),
            _ => self.end(self.aborted(job.epoch(), cause), 0),
        }
    }

    /// Ends the attempt, and all others of its epoch or earlier ones, if the job has returned to a
    /// checkpoint since. Returns the error for its calls.
    fn rolled_back(&self) -> Option<Error> {
        let restored = self.job.0.membership.borrow().restored?;
        if self.state.epoch >= restored.epoch {
            return None;
        }
        self.job.end_rolled_back();
        Some(self.end(self.job.rolled_back(restored.version), 0))
    }

    /// Names the first rank without a worker.
    async fn cause_of_new_epoch(&self) -> String {
        let Member { cluster, spec, .. } = &*self.job.0;
        let jobs = cluster.status().await.map(|status| status.jobs).unwrap_or_default();
        let missing = jobs
            .iter()
            .find(|job| job.name == spec.name)
            .and_then(|job| (0..spec.world).find(|rank| !job.joined.contains(rank)));
        match missing {
            Some(rank) => format!("{} was lost or has left", spec.describe_rank(rank)),
            None => {
                let since = self.state.epoch;
                format!("a rank or a shard server was lost or has left since epoch {since}")
            }
        }
    }

    fn aborted(&self, epoch: u64, cause: String) -> Error {
        let (job, step) = (self.job.0.spec.name.clone(), self.state.step);
        self.trace().name_in(Error::StepAborted { job, step, epoch, cause })
    }

    /// Ends the attempt because the step was decided, and returns the error for further pushes.
    fn decided(&self) -> Error {
        let (job, step) = (self.job.0.spec.name.clone(), self.state.step);
        self.job.0.attempts.lock().retain(|&other, _| other >= step);
        let current = step.saturating_add(1);
        self.end(Error::StepMismatch { job, step, current }, self.state.number)
    }

    /// Ends the attempt, unless it has ended before, and returns the error of its end.
    fn end(&self, error: Error, next: u32) -> Error {
        let mut ended = error.clone();
        self.state.end.send_if_modified(|end| match end {
            Some(end) => {
                ended = end.error.clone();
                false
            }
            None => {
                *end = Some(End { error, next });
                true
            }
        });
        ended
    }

    /// Checks that the tensors take gradients.
    fn check_gradients(&self, data: &[TensorData]) -> Result<()> {
        let tensors = self.job.0.spec.manifest.tensors();
        let buffer = |data: &TensorData| tensors.get(data.tensor.index()).filter(|of| of.buffer);
        let Some(buffer) = data.iter().find_map(buffer) else { return Ok(()) };
        Err(Error::invalid(
            format!("gradient of tensor {:?}", buffer.name),
            "pushed",
            "omitted, because the tensor is a buffer",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_coordinator_is_told_of_the_latest_epoch_that_an_error_has_named() {
        let attempts = Attempts::default();
        assert_eq!(attempts.latest(3), (3, 0, 0));
        attempts.know(5);
        attempts.know(4);
        assert_eq!(attempts.latest(3), (5, 0, 0), "the membership of epoch 5 has not arrived");
        assert_eq!(attempts.latest(6), (6, 0, 0));
    }
}
