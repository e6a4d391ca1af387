//! A rank's bulk transfers: parameters in, gradients, buffers and initial state out.

use futures_util::future::try_join_all;
use zeroshard_proto::{DType, Error, Result, error::Remedy, pb};

use super::{Job, membership::Membership};
use crate::{Gradient, Target, cluster::Deadline, pull, push};

/// What of a job's slices: the parameters as they are published.
const PARAMETERS: &str = "";

impl Job {
    /// Uploads the initial parameters; in any number of calls, all tensors that own their storage, once. Each rank gives
    /// what it has of them by their layouts; who need not send it (of tensors without a layout: all but rank 0) may,
    /// and it is left out. A rank that is lost before [`Self::version`] tells of version 0 makes the servers drop them.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`]: upload all of them again. [`Error::Invalid`] for sizes that do not fit,
    /// [`Error::Timeout`].
    pub async fn initialise(&self, parameters: Vec<Gradient>) -> Result<()> {
        self.initialise_at(0, parameters).await
    }

    /// As [`Self::initialise`], of a training run that goes on: `applied` steps count as applied to these tensors.
    ///
    /// # Errors
    /// As [`Self::initialise`].
    pub async fn initialise_at(&self, applied: u64, parameters: Vec<Gradient>) -> Result<()> {
        self.upload(PARAMETERS, applied, parameters).await
    }

    /// Uploads the optimizer's state tensor `part`, one of [`zeroshard_proto::Optimizer::state`], of some tensors
    /// that train: before their parameters, by the same ranks. What is not uploaded starts as it does in a new run.
    /// `applied` steps count as applied to these tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a part that the optimizer does not have, or after the tensor's parameters; others
    /// as [`Self::initialise`].
    pub async fn initialise_state(&self, part: &str, applied: u64, state: Vec<Gradient>) -> Result<()> {
        if part == PARAMETERS {
            return Err(Error::invalid("part of the optimizer's state", "empty", "a state tensor's name"));
        }
        self.upload(part, applied, state).await
    }

    async fn upload(&self, part: &str, applied: u64, data: Vec<Gradient>) -> Result<()> {
        let begin = pb::PushBegin { part: part.to_owned(), applied, ..self.begin(None)? };
        // Always f32: master weights and state are.
        self.push_as(begin, DType::F32, self.plan_push(data, true)?).await
    }

    /// Pushes gradients of `step`; in any number of calls, all tensors that train. What others contribute by the
    /// tensor's layout, and not this rank, is left out.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::Invalid`], [`Error::Timeout`], …
    pub async fn push(&self, step: u64, gradients: Vec<Gradient>) -> Result<()> {
        self.check_buffers(&gradients, false)?;
        let begin = self.begin(Some(step))?;
        self.push_as(begin, self.cluster.options.wire, self.plan_push(gradients, false)?).await
    }

    /// Says that this rank has no gradient of these tensors in `step`, or nothing beyond what it has pushed. What is
    /// missing counts as zeros. A tensor that no rank pushes anything of is not stepped: neither weight decay nor
    /// state nor step count move. A tensor that was pushed whole stays so.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub async fn push_absent(&self, step: u64, tensors: &[usize]) -> Result<()> {
        let begin = self.begin(Some(step))?;
        let placement = self.current()?.placement;
        let plans = push::plan_absent(&self.spec.manifest, &placement, &self.shares, tensors)?;
        self.push_as(begin, self.cluster.options.wire, plans).await
    }

    /// Pushes new content of buffers (batch-norm statistics), by the ranks that upload them, before they commit `step`. It is what
    /// readers of the step's version get, bit for bit, also when the step is skipped; a buffer that is not pushed
    /// keeps its content.
    ///
    /// # Errors
    /// As [`Self::push`]; [`Error::Invalid`] for what is no buffer.
    pub async fn push_buffers(&self, step: u64, buffers: Vec<Gradient>) -> Result<()> {
        self.check_buffers(&buffers, true)?;
        let begin = self.begin(Some(step))?;
        self.push_as(begin, DType::F32, self.plan_push(buffers, true)?).await
    }

    /// Fills the targets with the parameters at `version`; waits for it. Buffers come as f32 whatever the wire's
    /// dtype is.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`] if it does not come, [`Error::Invalid`] for sizes that do not
    /// fit.
    pub async fn pull(&self, version: u64, targets: Vec<Target<'_>>) -> Result<()> {
        let manifest = &self.spec.manifest;
        let is_buffer = |target: &Target<'_>| {
            target.tensor < manifest.tensors().len()
                && manifest.tensors()[manifest.owner(target.tensor)].buffer
        };
        let (buffers, others) = targets.into_iter().partition(is_buffer);
        self.pull_as(version, PARAMETERS, [(DType::F32, buffers), (self.cluster.options.wire, others)]).await
    }

    /// Fills the targets with a part of the state at `version`, which comes as f32; waits for it. `part` is empty:
    /// the parameters as they are published; `master`: the master weights; or one of
    /// [`zeroshard_proto::Optimizer::state`], of tensors that train.
    ///
    /// # Errors
    /// As [`Self::pull`]; [`Error::Invalid`] for a part that is not there.
    pub async fn pull_part(&self, version: u64, part: &str, targets: Vec<Target<'_>>) -> Result<()> {
        self.pull_as(version, part, [(DType::F32, targets)]).await
    }

    async fn pull_as<'a>(
        &self,
        version: u64,
        part: &str,
        targets: impl IntoIterator<Item = (DType, Vec<Target<'a>>)>,
    ) -> Result<()> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let placement = self.current()?.placement;
        let mut plans = Vec::new();
        for (dtype, targets) in targets {
            plans.extend(pull::plan(&self.spec.manifest, &placement, &self.shares, dtype, targets)?);
        }
        let pulls = plans.into_iter().map(|plan| self.pull_from_one(plan, version, part, deadline));
        match self.unless_ended(try_join_all(pulls)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.explained(error).await),
        }
    }

    async fn pull_from_one(
        &self,
        mut plan: pull::Plan<'_>,
        version: u64,
        part: &str,
        deadline: Deadline,
    ) -> Result<()> {
        loop {
            let epoch = self.current()?.epoch;
            let of = pull::PullOf {
                job: &self.spec.name,
                epoch,
                version,
                part,
                chunk_bytes: self.cluster.options.chunk_bytes,
                wait_ms: (deadline.left().as_millis() as u32).saturating_sub(200).max(1),
            };
            let waiting_for = format!("version {version} from shard server {}", plan.server.address);
            let pull = plan.pull(&self.cluster.shards, &of);
            let error = match deadline.limit(|| waiting_for, pull).await? {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match error.remedy() {
                Remedy::Retry => deadline.pause(error).await?,
                Remedy::Refresh => self.wait_for_news(epoch, deadline).await?,
                Remedy::RedoStep | Remedy::GiveUp => return Err(error),
            }
        }
    }

    fn begin(&self, step: Option<u64>) -> Result<pb::PushBegin> {
        let Membership { epoch, .. } = self.current()?;
        if let Some(step) = step {
            self.enter_round(step, epoch)?;
        }
        Ok(pb::PushBegin { job: self.spec.name.clone(), epoch, rank: self.rank, step, ..Default::default() })
    }

    fn plan_push(&self, data: Vec<Gradient>, upload: bool) -> Result<Vec<push::Plan>> {
        push::plan(&self.spec.manifest, &self.current()?.placement, &self.shares, data, upload)
    }

    async fn push_as(&self, begin: pb::PushBegin, dtype: DType, plans: Vec<push::Plan>) -> Result<()> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let step = begin.step;
        let push = Push { job: self, begin, dtype, deadline };
        let pushes = plans.into_iter().map(|plan| push.to_one(plan));
        let pushed = self.unless_ended(try_join_all(pushes)).await;
        match (pushed, step) {
            (Ok(_), _) => Ok(()),
            (Err(error @ Error::StaleEpoch { .. }), Some(step)) => {
                Err(self.aborted(step, error, deadline).await)
            }
            (Err(error), _) => Err(self.explained(error).await),
        }
    }

    /// The servers would take a buffer as one whatever it was meant to be.
    fn check_buffers(&self, data: &[Gradient], buffers: bool) -> Result<()> {
        let tensors = self.spec.manifest.tensors();
        let wrong = |data: &&Gradient| tensors.get(data.tensor).is_some_and(|spec| spec.buffer != buffers);
        let Some(wrong) = data.iter().find(wrong) else { return Ok(()) };
        let what = format!("tensor {:?}", tensors[wrong.tensor].name);
        Err(match buffers {
            true => Error::invalid(what, "pushed as a buffer", "a buffer"),
            false => Error::invalid(what, "pushed as a gradient", "pushed with the step's buffers"),
        })
    }
}

/// One push, to all servers that hold a part of it.
struct Push<'a> {
    job: &'a Job,
    begin: pb::PushBegin,
    dtype: DType,
    deadline: Deadline,
}

impl Push<'_> {
    async fn to_one(&self, mut plan: push::Plan) -> Result<()> {
        let Self { job, begin, dtype, deadline } = self;
        let waiting_for = format!(
            "shard server {} to take rank {}'s push of step {:?} in epoch {}",
            plan.server.address, begin.rank, begin.step, begin.epoch
        );
        loop {
            let chunk = job.cluster.options.chunk_bytes;
            let push = plan.push(&job.cluster.shards, begin.clone(), *dtype, chunk);
            match deadline.limit(|| waiting_for.clone(), push).await? {
                Ok(_) => return Ok(()),
                Err(error) if error.remedy() == Remedy::Retry => deadline.pause(error).await?,
                Err(error) => return Err(error),
            }
        }
    }
}
