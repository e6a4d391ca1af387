//! A rank's bulk transfers: pulls of parameters, uploads of initial parameters and optimizer state,
//! and the pushes of an attempt.

use std::sync::Arc;

use futures_util::future::try_join_all;
use zeroshard_model::{AppliedSteps, DType, Error, Result, Server, TensorId};
use zeroshard_net::{Deadline, trace::Trace};
use zeroshard_proto::{
    Wire,
    pb::{self, push_begin::Contents as Message},
};

use super::{Attempt, Job, Member, membership::Membership};
use crate::{
    Exchange, Slots, StateSelector, Target, TensorData, pull,
    push::{self, Contents, Encoding, Sending},
    retry::{Next, Tries, drops_job},
    window::Window,
    windows::{Holder, Of},
};

impl Job {
    /// Uploads the initial parameters. The calls must together cover, exactly once, all tensors
    /// that own their storage. Each rank passes its box according to the tensor's layout. A rank
    /// that does not have to upload (without a layout: every rank except rank 0) may pass its box,
    /// which is then ignored. If a rank is lost before [`Self::version`] returns 0, the servers
    /// drop the uploads.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`]: upload all of them again. [`Error::Invalid`] for sizes that do not
    /// match, [`Error::Timeout`].
    pub async fn initialise(&self, parameters: Vec<TensorData>) -> Result<()> {
        self.initialise_at(AppliedSteps::default(), parameters).await
    }

    /// Uploads the initial parameters of a resumed training run, like [`Self::initialise`];
    /// `applied` are the steps already applied to these tensors.
    ///
    /// # Errors
    /// Those of [`Self::initialise`].
    pub async fn initialise_at(
        &self,
        applied: AppliedSteps,
        parameters: Vec<TensorData>,
    ) -> Result<()> {
        self.upload(StateSelector::Parameters, applied, Contents::Uploaded(parameters)).await
    }

    /// Uploads the optimizer state tensor `name`, one of [`zeroshard_model::Optimizer::state`], of
    /// trained tensors. The same ranks upload the state before the parameters of these tensors.
    /// State that is not uploaded has the initial value of a new run. `applied` are the steps
    /// already applied to these tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a state tensor that the optimizer does not have, or after the
    /// tensor's parameters; otherwise those of [`Self::initialise`].
    pub async fn initialise_state(
        &self,
        name: &str,
        applied: AppliedSteps,
        state: Vec<TensorData>,
    ) -> Result<()> {
        self.upload(StateSelector::OptimizerState(name), applied, Contents::Uploaded(state)).await
    }

    /// Keeps the content that was copied from the predecessor (see [`crate::CreateJob::from`]):
    /// this rank uploads nothing of these tensors. Version 0 is published when each uploading rank
    /// has either uploaded or kept its part of every tensor. `applied` has no steps or, if the
    /// optimizer state is fresh, those already applied to these tensors.
    ///
    /// # Errors
    /// As [`Self::initialise`]; [`Error::Invalid`] for a tensor that was not copied.
    pub async fn keep(&self, applied: AppliedSteps, tensors: &[TensorId]) -> Result<()> {
        self.upload(StateSelector::Parameters, applied, Contents::Kept(tensors)).await
    }

    async fn upload(
        &self,
        part: StateSelector<'_>,
        applied: AppliedSteps,
        contents: Contents<'_>,
    ) -> Result<()> {
        let epoch = self.current()?.epoch;
        let scalar_state = self.scalar_state(&contents, &applied)?;
        let (part, applied) = (Some(part.into()), applied.count);
        let upload = pb::Upload { part, applied, scalar_state, kept: Vec::new() };
        let begin = self.begin(epoch, Message::Upload(upload));
        // Always f32: master weights and state are.
        self.push(begin, DType::F32.into(), contents, None).await
    }

    /// The scalar state after `applied` of the tensors that are uploaded together.
    ///
    /// # Errors
    /// [`Error::Refused`] for optimizers with different scalar state.
    fn scalar_state(&self, contents: &Contents<'_>, applied: &AppliedSteps) -> Result<Vec<f32>> {
        let tensors: Vec<TensorId> = match contents {
            Contents::Uploaded(values) => values.iter().map(|of| of.tensor).collect(),
            Contents::Kept(tensors) => tensors.to_vec(),
            Contents::Contributed(_)
            | Contents::Replaced(_)
            | Contents::Sums(..)
            | Contents::Absent(_) => Vec::new(),
        };
        // The plan of the push refuses tensors that the job does not have.
        let known = 0..self.spec().manifest.tensors().len();
        let tensors = tensors.iter().map(|tensor| tensor.index()).filter(|at| known.contains(at));
        let mut optimizers = tensors.filter_map(|tensor| self.spec().optimizer_of(tensor));
        let Some(first) = optimizers.next() else { return Ok(Vec::new()) };
        let other = optimizers.find(|other| other.scalar_state() != first.scalar_state());
        match other.filter(|_| applied.count > 0) {
            None => Ok(applied.scalar_state(first).to_vec()),
            Some(other) => Err(Error::refused(format!(
                "tensors with {first} and with {other} cannot be uploaded together after {} steps, \
                 because their optimizers have different scalar state; upload them one by one",
                applied.count
            ))),
        }
    }

    /// The message that opens a push of this rank.
    pub(super) fn begin(&self, epoch: u64, contents: Message) -> pb::PushBegin {
        let Member { spec, id, rank, .. } = &*self.0;
        let is_sum = spec.group_size > 1 && matches!(contents, Message::Gradients(_));
        pb::PushBegin {
            job: spec.name.clone(),
            job_id: *id,
            rank: *rank,
            lease: self.lease(),
            epoch,
            covers: if is_sum { spec.group_of(*rank).collect() } else { Vec::new() },
            contents: Some(contents),
            window: 0,
        }
    }

    /// Sends `contents`, which belong to `attempt`, to the servers that hold parts of them, as long
    /// as the attempt is open.
    pub(super) async fn push(
        &self,
        begin: pb::PushBegin,
        wire: Wire,
        contents: Contents<'_>,
        attempt: Option<&Attempt>,
    ) -> Result<()> {
        let Member { cluster, spec, locals, .. } = &*self.0;
        let deadline = Deadline::after(cluster.options.timeout);
        if let Some(attempt) = attempt {
            attempt.check_epoch(deadline).await?;
        }
        let pushes = push::plan(&spec.manifest, &self.current()?.placement, locals, contents)?;
        let how = Sending {
            shards: &cluster.shards,
            options: &cluster.options,
            begin: &begin,
            windows: &self.0.windows,
            encoding: Encoding {
                wire,
                seed: spec.rounding_seed,
                step: attempt.map_or(0, Attempt::step),
            },
            deadline,
            trace: attempt.map(Attempt::trace).unwrap_or_default(),
        };
        let sends = pushes.into_iter().map(|push| {
            let server = push.server.clone();
            self.reaching(server, push.send(&how))
        });
        let sent = async { self.unless_ended(try_join_all(sends)).await.map(drop) };
        let had_version = self.version().is_some();
        match attempt {
            Some(attempt) => attempt.while_open(sent, deadline).await,
            None => match self.while_in(begin.epoch, sent).await {
                // Version 0 contains the upload, whose answer has not arrived.
                Err(Error::StaleEpoch { .. }) if !had_version && self.version().is_some() => Ok(()),
                uploaded => uploaded,
            },
        }
    }

    /// Fills the targets with the parameters at `version`, and waits for that version. Buffers are
    /// transferred as f32, and tensors that are not trained are never int8, regardless of
    /// [`Options::parameter_wire`].
    ///
    /// [`Options::parameter_wire`]: crate::Options::parameter_wire
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`] if the version does not arrive,
    /// [`Error::Invalid`] for sizes that do not match.
    pub async fn pull(&self, version: u64, targets: Vec<Target<'_>>) -> Result<()> {
        let targets = pull::by_wire(&self.0.spec.manifest, self.parameter_wire(), targets);
        self.pull_as(version, StateSelector::Parameters, targets).await
    }

    /// The division of these tensors among the ranks of the group: see [`Exchange`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tensor that does not exist or is tied to another.
    pub fn exchange(&self, tensors: &[TensorId]) -> Result<Exchange> {
        let Member { spec, rank, locals, .. } = &*self.0;
        Exchange::new(spec, *rank, locals, tensors)
    }

    /// Fills the slots with the parameters of this rank's pieces at `version`, one after the other,
    /// and waits for that version. The tensors must all be buffers, or none of them.
    ///
    /// # Errors
    /// Those of [`Self::pull`].
    pub async fn pull_pieces(
        &self,
        version: u64,
        exchange: &Exchange,
        slots: Slots<'_>,
    ) -> Result<()> {
        let Member { spec, locals, .. } = &*self.0;
        let wire = self.parameter_wire();
        let wire_of = |tensor| pull::wire_of(&spec.manifest, wire, tensor);
        let placement = self.current()?.placement;
        let pulls = pull::plan_pieces(&placement, locals, wire_of, exchange, slots)?;
        self.pull_all(version, StateSelector::Parameters, pulls).await
    }

    /// Fills the targets with a part of the state at `version`, in f32, and waits for that version.
    ///
    /// # Errors
    /// Those of [`Self::pull`]; [`Error::Invalid`] for an unknown part.
    pub async fn pull_part(
        &self,
        version: u64,
        part: StateSelector<'_>,
        targets: Vec<Target<'_>>,
    ) -> Result<()> {
        self.pull_as(version, part, [(DType::F32.into(), targets)]).await
    }

    async fn pull_as<'a>(
        &self,
        version: u64,
        part: StateSelector<'_>,
        targets: impl IntoIterator<Item = (Wire, Vec<Target<'a>>)>,
    ) -> Result<()> {
        let Member { spec, locals, .. } = &*self.0;
        let placement = self.current()?.placement;
        let mut pulls = Vec::new();
        for (wire, targets) in targets {
            pulls.extend(pull::plan(&spec.manifest, &placement, locals, wire, targets)?);
        }
        self.pull_all(version, part, pulls).await
    }

    async fn pull_all(
        &self,
        version: u64,
        part: StateSelector<'_>,
        pulls: Vec<pull::ServerPull<'_>>,
    ) -> Result<()> {
        self.check_restored(version)?;
        let deadline = Deadline::after(self.0.cluster.options.timeout);
        let pulls = pulls.into_iter().map(|pull| self.pull_from(pull, version, part, deadline));
        self.unless_ended(try_join_all(pulls)).await.map(drop)
    }

    async fn pull_from(
        &self,
        pull: pull::ServerPull<'_>,
        version: u64,
        part: StateSelector<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let server = pull.server.clone();
        self.reaching(server, self.pull_from_one(pull, version, part, deadline)).await
    }

    /// The shared memory with a server, if it is on this host.
    async fn window(&self, server: &Server) -> Result<Option<Arc<Window>>> {
        let Member { cluster, spec, id, rank, windows, .. } = &*self.0;
        let holder = Holder::Rank { rank: *rank, lease: self.lease() };
        let of = Of { job: &spec.name, job_id: *id, holder };
        windows.get(server, &cluster.shards.get(server)?, of).await
    }

    async fn pull_from_one(
        &self,
        mut pull: pull::ServerPull<'_>,
        version: u64,
        part: StateSelector<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let Member { cluster, spec, id, .. } = &*self.0;
        let waiting_for = format!("version {version} from shard server {}", pull.server.address);
        let mut tries = Tries::until(deadline);
        loop {
            let Membership { epoch, placement, .. } = self.current()?;
            if !pull.is_at_primary(&placement) {
                let pulls = pull.divide(&placement).into_iter();
                let pulls = pulls.map(|pull| self.pull_from(pull, version, part, deadline));
                return Box::pin(try_join_all(pulls)).await.map(drop);
            }
            let window = self.window(&pull.server);
            let window = tries.limit(|| waiting_for.clone(), window).await??;
            let of = pull::PullOf {
                job: &spec.name,
                job_id: *id,
                epoch,
                version,
                part,
                pin: 0,
                chunk_bytes: cluster.options.chunk_bytes,
                timeout: tries.timeout(),
                trace: Trace::of_step(*id, epoch, version),
                rank: Some(self.0.rank),
                window,
            };
            // A server that was lost does not answer.
            let moved = |now: &Membership| !Arc::ptr_eq(&now.placement, &placement);
            let pulled = self.unless(moved, pull.pull(&cluster.shards, &of));
            let error = match tries.limit(|| waiting_for.clone(), pulled).await? {
                Err(_moved) => continue,
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error,
            };
            if drops_job(&error) {
                let dropped = tokio::time::sleep(self.change_timeout());
                match self.unless(moved, dropped).await {
                    Err(_moved) => continue,
                    Ok(()) => return Err(error),
                }
            }
            if let Next::Refresh(_) = tries.next(error).await? {
                self.wait_for_change(epoch, deadline).await?;
            }
        }
    }
}
