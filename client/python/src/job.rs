//! One rank's lease on a job, and its transfers.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use tokio::{
    sync::{AcquireError, OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinSet},
};
use zeroshard_client::{
    self as client, Attempt, Commit, Result, StateSelector, TensorData, TensorId,
};
use zeroshard_model::{AppliedSteps, Error, JobSpec, JobVersion, successor_name};

use crate::{
    array::{Array, Arrays, Lent, Targets, calls_after_pull, pending_data, tensor_data},
    call::Call,
    error::raise,
    exchange::Exchange,
    optimizer::{Group, optimizers},
    plan::lock,
    progress::in_parts,
    report::Report,
    runtime::{runtime, spawn, wait},
    transfer::{Rest, Transfer},
};

/// One rank's lease on a job.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Job {
    job: client::Job,
    /// Maximum number of elements in a bucket of gradients.
    bucket_numel: usize,
    outgoing: Mutex<Outgoing>,
    /// Limits the number of buckets that are sent at a time.
    sending: Arc<Semaphore>,
}

/// The steps applied to a tensor: their number, and the scalar state of the optimizer after them.
pub(crate) type Applied = (u64, Vec<f32>);

/// The norm of each tensor's mean gradient, the ranks that rest, and the tensors of which no rank
/// has a gradient.
type ReducedNorms = (Vec<f64>, Vec<u32>, Vec<usize>);

/// Two buckets in transfer while the next one is filled, and one to cover gaps between them.
const MAX_SENDING: usize = 3;

/// Gradients that are collected or being sent.
#[derive(Default)]
struct Outgoing {
    /// The attempt to which all of these gradients belong. It is kept after it has ended, so that
    /// the remaining gradients of a backward pass do not become part of the next attempt. `None` if
    /// nothing was sent since the last step.
    attempt: Option<Attempt>,
    /// The bucket that is being filled.
    bucket: Vec<TensorData>,
    /// Copies from a device to gradients of the bucket.
    copies: Vec<Call>,
    numel: usize,
    pushes: Pushes,
}

/// Pushes of an attempt.
#[derive(Default)]
struct Pushes {
    /// Those that were running when the last one was started.
    running: JoinSet<Result<()>>,
    /// The first error of all others.
    failed: Option<Error>,
}

impl Pushes {
    /// Starts a push, whose error [`Self::arrived`] returns. Frees the memory of pushes that have
    /// ended: blocks of some KiB, which would lie between large ones in the heap until the step
    /// ends.
    fn start(&mut self, push: impl Future<Output = Result<()>> + Send + 'static) -> PyResult<()> {
        while let Some(ended) = self.running.try_join_next() {
            if let Err(error) = result_of(ended) {
                self.failed.get_or_insert(error);
            }
        }
        self.running.spawn_on(push, runtime().map_err(raise)?.handle());
        Ok(())
    }

    /// Waits until all have ended.
    async fn arrived(mut self) -> Result<()> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        while let Some(ended) = self.running.join_next().await {
            result_of(ended)?;
        }
        Ok(())
    }
}

fn result_of(ended: std::result::Result<Result<()>, JoinError>) -> Result<()> {
    ended.map_err(|e| Error::Internal { cause: format!("a push ended: {e}") })?
}

impl Job {
    /// The steps applied to these tensors, which have the same scalar state.
    fn steps(
        &self,
        tensors: impl IntoIterator<Item = usize>,
        (count, scalar_state): Applied,
    ) -> PyResult<AppliedSteps> {
        let spec = self.job.spec();
        let known = 0..spec.manifest.tensors().len();
        let mut known = tensors.into_iter().filter(|tensor| known.contains(tensor));
        match known.find(|&tensor| spec.optimizer_of(tensor).is_some()) {
            Some(tensor) => spec.applied_to(tensor, count, &scalar_state).map_err(raise),
            None => Ok(AppliedSteps::default()),
        }
    }

    pub(crate) fn new(job: client::Job, bucket_numel: usize) -> Self {
        Self {
            job,
            bucket_numel,
            outgoing: Mutex::default(),
            sending: Arc::new(Semaphore::new(MAX_SENDING)),
        }
    }

    /// The job at a version.
    pub(crate) fn at(&self, version: u64) -> JobVersion {
        self.job.at(version)
    }

    /// The attempt at `step`: the same one until [`Outgoing`] is reset or another step begins.
    fn attempt(&self, outgoing: &mut Outgoing, step: u64) -> PyResult<Attempt> {
        if let Some(attempt) = outgoing.attempt.as_ref().filter(|attempt| attempt.step() == step) {
            return Ok(attempt.clone());
        }
        self.close_bucket(outgoing)?;
        let attempt = self.job.attempt(step).map_err(raise)?;
        outgoing.attempt = Some(attempt.clone());
        Ok(attempt)
    }

    /// A place for a bucket among those that are being sent. It is taken at once if one is free, so
    /// that [`Self::wait_until_sendable`] counts a bucket whose task has not run yet.
    fn place(&self) -> impl Future<Output = Result<OwnedSemaphorePermit>> + Send + use<> {
        let (sending, taken) = (self.sending.clone(), self.sending.clone().try_acquire_owned());
        async move {
            match taken {
                Ok(permit) => Ok(permit),
                Err(_) => sending.acquire_owned().await.map_err(closed),
            }
        }
    }

    fn start_push(
        &self,
        outgoing: &mut Outgoing,
        attempt: Attempt,
        bucket: Vec<TensorData>,
        copies: Vec<Call>,
    ) -> PyResult<()> {
        let (place, timeout) = (self.place(), self.job.timeout());
        outgoing.pushes.start(async move {
            let _permit = place.await?;
            Call::all(copies, timeout).await?;
            attempt.push(bucket).await
        })
    }

    /// Waits while too many buckets are being sent: gradients must not accumulate in memory if they
    /// are computed faster than they are sent.
    fn wait_until_sendable(&self, py: Python<'_>) -> PyResult<()> {
        let sending = self.sending.clone();
        if sending.available_permits() > 0 {
            return Ok(());
        }
        wait(py, async move { sending.acquire().await.map(drop).map_err(closed) })
    }

    fn close_bucket(&self, outgoing: &mut Outgoing) -> PyResult<()> {
        outgoing.numel = 0;
        let copies = std::mem::take(&mut outgoing.copies);
        match (std::mem::take(&mut outgoing.bucket), outgoing.attempt.clone()) {
            (bucket, Some(attempt)) if !bucket.is_empty() => {
                self.start_push(outgoing, attempt, bucket, copies)
            }
            _ => Ok(()),
        }
    }

    /// Closes the bucket. Returns the attempt at `step` and the pushes that it must wait for.
    fn closed(&self, step: u64) -> PyResult<(Attempt, Pushes)> {
        let outgoing = &mut *lock(&self.outgoing);
        self.close_bucket(outgoing)?;
        Ok((self.attempt(outgoing, step)?, std::mem::take(&mut outgoing.pushes)))
    }
}

/// The part of the state that Python names: empty for the published parameters, `master`, or a
/// state tensor of the optimizer.
pub(crate) fn state_selector(name: &str) -> StateSelector<'_> {
    match name {
        "" => StateSelector::Parameters,
        "master" => StateSelector::MasterWeights,
        name => StateSelector::OptimizerState(name),
    }
}

/// The steps applied to each tensor, as Python has them.
pub(crate) fn by_tensor(spec: &JobSpec, steps: &[AppliedSteps]) -> Vec<Applied> {
    let numbered = steps.iter().enumerate();
    numbered.map(|(tensor, of)| (of.count, spec.scalar_state_of(tensor, of))).collect()
}

fn tensor_ids(tensors: Vec<usize>) -> Vec<TensorId> {
    tensors.into_iter().map(TensorId::new).collect()
}

fn closed(error: AcquireError) -> Error {
    Error::Internal { cause: error.to_string() }
}

#[pymethods]
impl Job {
    #[getter]
    fn name(&self) -> &str {
        &self.job.spec().name
    }

    #[getter]
    fn successor_name(&self) -> String {
        successor_name(&self.job.spec().name)
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.job.epoch()
    }

    #[getter]
    fn version(&self) -> Option<u64> {
        self.job.version()
    }

    #[getter]
    fn restored(&self) -> Option<(u64, u64)> {
        self.job.restored()
    }

    fn batch(&self, step: u64) -> u64 {
        self.job.line().batch(step)
    }

    fn uploads(&self, tensor: usize) -> PyResult<bool> {
        self.job.uploads(TensorId::new(tensor)).map_err(raise)
    }

    fn replaces(&self, tensor: usize) -> PyResult<bool> {
        self.job.replaces(TensorId::new(tensor)).map_err(raise)
    }

    fn rounds(&self, tensor: usize) -> PyResult<bool> {
        self.job.rounds(TensorId::new(tensor)).map_err(raise)
    }

    #[pyo3(signature = (arrays, *, part="", applied=(0, Vec::new()), label=None))]
    fn initialise(
        &self,
        py: Python<'_>,
        arrays: Arrays<'_>,
        part: &str,
        applied: Applied,
        label: Option<String>,
    ) -> PyResult<()> {
        let applied = self.steps(arrays.iter().map(|(tensor, _)| *tensor), applied)?;
        in_parts(arrays, label, |arrays| {
            let (job, part, values) =
                (self.job.clone(), part.to_owned(), tensor_data(py, &arrays)?);
            wait(py, async move {
                match part.as_str() {
                    "" => job.initialise_at(applied, values).await,
                    part => job.initialise_state(part, applied, values).await,
                }
            })
        })
    }

    #[pyo3(signature = (tensors, *, applied=(0, Vec::new())))]
    fn keep(&self, py: Python<'_>, tensors: Vec<usize>, applied: Applied) -> PyResult<()> {
        let applied = self.steps(tensors.iter().copied(), applied)?;
        let job = self.job.clone();
        let tensors = tensor_ids(tensors);
        wait(py, async move { job.keep(applied, &tensors).await })
    }

    fn initialised(&self, py: Python<'_>) -> PyResult<u64> {
        let job = self.job.clone();
        wait(py, async move { job.initialised().await })
    }

    fn gradient(
        &self,
        py: Python<'_>,
        step: u64,
        tensor: usize,
        array: PyRef<'_, Array>,
    ) -> PyResult<()> {
        let (gradient, copy) = pending_data(py, tensor, &array)?;
        let numel = gradient.data.len();
        let mut outgoing = lock(&self.outgoing);
        self.attempt(&mut outgoing, step)?;
        let mut closed = false;
        if outgoing.numel + numel > self.bucket_numel {
            closed = !outgoing.bucket.is_empty();
            self.close_bucket(&mut outgoing)?;
        }
        outgoing.numel += numel;
        outgoing.bucket.push(gradient);
        outgoing.copies.extend(copy);
        // A gradient that is larger than a bucket is sent by itself.
        if outgoing.numel >= self.bucket_numel {
            closed = true;
            self.close_bucket(&mut outgoing)?;
        }
        drop(outgoing);
        if closed { self.wait_until_sendable(py) } else { Ok(()) }
    }

    fn push(&self, py: Python<'_>, step: u64, arrays: Arrays<'_>) -> PyResult<()> {
        let gradients = tensor_data(py, &arrays)?;
        let outgoing = &mut *lock(&self.outgoing);
        let attempt = self.attempt(outgoing, step)?;
        self.start_push(outgoing, attempt, gradients, Vec::new())
    }

    fn exchange(&self, tensors: Vec<usize>) -> PyResult<Exchange> {
        let exchange = self.job.exchange(&tensor_ids(tensors)).map_err(raise)?;
        Ok(Exchange::new(exchange, &self.job))
    }

    fn open_attempt(&self, step: u64) -> PyResult<OpenAttempt> {
        self.attempt(&mut lock(&self.outgoing), step).map(OpenAttempt)
    }

    fn push_sums(
        &self,
        py: Python<'_>,
        attempt: PyRef<'_, OpenAttempt>,
        exchange: Py<Exchange>,
        received: PyRef<'_, Array>,
    ) -> PyResult<()> {
        let received = Lent::new(py, &received)?;
        let (sums, present) = py.detach(|| exchange.get().add(received.as_ref())).map_err(raise)?;
        let mut outgoing = lock(&self.outgoing);
        if outgoing.attempt.as_ref().is_none_or(|open| key(open) != attempt.key()) {
            return Ok(());
        }
        let (attempt, place) = (attempt.0.clone(), self.place());
        outgoing.pushes.start(async move {
            let _permit = place.await?;
            let present: Vec<&[bool]> = present.iter().map(Vec::as_slice).collect();
            attempt.push_sums(&exchange.get().exchange, sums, &present).await
        })?;
        drop(outgoing);
        self.wait_until_sendable(py)
    }

    fn pull_pieces(
        &self,
        py: Python<'_>,
        version: u64,
        exchange: Py<Exchange>,
        part: PyRef<'_, Array>,
    ) -> PyResult<Transfer> {
        let (job, mut part) = (self.job.clone(), Lent::new(py, &part)?);
        let task = spawn(async move {
            let slots = exchange.get().own_slots(&mut part)?;
            job.pull_pieces(version, &exchange.get().exchange, slots).await
        })?;
        Ok(Transfer::new(task))
    }

    fn absent(&self, step: u64, tensors: Vec<usize>) -> PyResult<()> {
        let outgoing = &mut *lock(&self.outgoing);
        let (attempt, tensors) = (self.attempt(outgoing, step)?, tensor_ids(tensors));
        outgoing.pushes.start(async move { attempt.push_absent(&tensors).await })
    }

    fn replace(&self, py: Python<'_>, step: u64, arrays: Arrays<'_>) -> PyResult<()> {
        let values = tensor_data(py, &arrays)?;
        let outgoing = &mut *lock(&self.outgoing);
        let attempt = self.attempt(outgoing, step)?;
        outgoing.pushes.start(async move { attempt.push_values(values).await })
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let pushes = {
            let outgoing = &mut *lock(&self.outgoing);
            self.close_bucket(outgoing)?;
            std::mem::take(&mut outgoing.pushes)
        };
        wait(py, pushes.arrived())
    }

    fn forget(&self) {
        *lock(&self.outgoing) = Outgoing::default();
        // The adapter finds out by itself that the job was restored.
        self.job.end_rolled_back();
    }

    fn discard(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        let attempt = {
            let outgoing = &mut *lock(&self.outgoing);
            // It is not necessary to wait for gradients in transfer.
            outgoing.bucket.clear();
            outgoing.copies.clear();
            let attempt = self.attempt(outgoing, step)?;
            *outgoing = Outgoing::default();
            attempt
        };
        wait(py, async move { attempt.discard().await })
    }

    fn rest(&self, step: u64, excluded: bool) -> PyResult<Rest> {
        let (attempt, pushes) = self.closed(step)?;
        self.forget();
        let task = spawn(async move {
            pushes.arrived().await?;
            attempt.rest(excluded).await
        })?;
        Ok(Rest::new(task))
    }

    #[pyo3(signature = (step, loss_scale=1.0))]
    fn reduce(&self, py: Python<'_>, step: u64, loss_scale: f64) -> PyResult<ReducedNorms> {
        let (attempt, pushes) = self.closed(step)?;
        wait(py, async move {
            pushes.arrived().await?;
            let reduced = attempt.reduce(loss_scale).await?;
            let absent = reduced.absent.iter().filter(|absent| absent.everywhere);
            let absent = absent.map(|absent| absent.tensor.index()).collect();
            Ok((reduced.tensor_norms, reduced.resting, absent))
        })
    }

    fn gradient_sums(&self, py: Python<'_>, step: u64, arrays: Arrays<'_>) -> PyResult<()> {
        let attempt = self.attempt(&mut lock(&self.outgoing), step)?;
        let mut targets = Targets::new(py, &arrays);
        wait(py, async move { attempt.pull_gradient_sum(targets.targets()?).await })
    }

    fn divisor(&self, tensor: usize) -> PyResult<u64> {
        let numel = self.job.spec().manifest.tensors().len();
        if tensor >= numel {
            let expected = format!("less than the job's number of tensors, {numel}");
            return Err(raise(Error::invalid("tensor", tensor, expected)));
        }
        Ok(self.job.spec().divisor(tensor))
    }

    #[pyo3(signature = (
        step, groups, *, loss_scale=1.0, max_norm=None, gradient_factors=None, written=None,
        targets=None, user_data=None, user_data_follows=false, loss=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn commit(
        &self,
        py: Python<'_>,
        step: u64,
        groups: Vec<Group>,
        loss_scale: f64,
        max_norm: Option<f64>,
        gradient_factors: Option<Vec<f64>>,
        written: Option<Vec<u64>>,
        targets: Option<Arrays<'_>>,
        user_data: Option<Vec<u8>>,
        user_data_follows: bool,
        loss: Option<f64>,
    ) -> PyResult<Report> {
        let groups = optimizers(groups)?;
        let commit = Commit::default().groups(groups).loss_scale(loss_scale).max_norm(max_norm);
        let commit = commit
            .gradient_factors(gradient_factors.unwrap_or_default())
            .written(written.unwrap_or_default())
            .user_data(user_data.unwrap_or_default())
            .user_data_follows(user_data_follows)
            .loss(loss);
        let mut targets = Targets::new(py, &targets.unwrap_or_default());
        let (attempt, pushes) = self.closed(step)?;
        let report = wait(py, async move {
            pushes.arrived().await?;
            attempt.commit_and_pull(commit, targets.targets()?).await
        });
        report.map(Report)
    }

    #[pyo3(signature = (version, arrays, *, part=None))]
    fn pull(
        &self,
        py: Python<'_>,
        version: u64,
        arrays: Arrays<'_>,
        part: Option<String>,
    ) -> PyResult<Transfer> {
        let (job, mut targets) = (self.job.clone(), Targets::new(py, &arrays));
        let calls = calls_after_pull(py, &arrays);
        let task = spawn(async move {
            match part {
                None => job.pull(version, targets.targets()?).await?,
                Some(name) => {
                    job.pull_part(version, state_selector(&name), targets.targets()?).await?
                }
            }
            Call::all(calls, job.timeout()).await
        })?;
        Ok(Transfer::new(task))
    }

    #[pyo3(signature = (version, arrays, *, part=None, label=None))]
    fn fetch(
        &self,
        py: Python<'_>,
        version: u64,
        arrays: Arrays<'_>,
        part: Option<String>,
        label: Option<String>,
    ) -> PyResult<()> {
        in_parts(arrays, label, |arrays| self.pull(py, version, arrays, part.clone())?.wait(py))
    }

    fn applied_steps(&self, py: Python<'_>, version: u64) -> PyResult<Vec<Applied>> {
        let job = self.job.clone();
        let steps = wait(py, async move { job.applied_steps(version).await })?;
        Ok(by_tensor(self.job.spec(), &steps))
    }

    fn send_user_data(&self, py: Python<'_>, version: u64, user_data: Vec<u8>) -> PyResult<()> {
        let job = self.job.clone();
        wait(py, async move { job.send_user_data(version, user_data).await })
    }

    fn save(&self, py: Python<'_>, version: u64) -> PyResult<u64> {
        let job = self.job.clone();
        wait(py, async move { job.save(version).await })
    }

    fn leave(&self) -> PyResult<Transfer> {
        self.forget();
        let job = self.job.clone();
        Ok(Transfer::new(spawn(async move { job.leave_done().await })?))
    }
}

/// The attempt at a step to which pushes belong.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct OpenAttempt(Attempt);

fn key(attempt: &Attempt) -> (u64, u64, u32) {
    (attempt.epoch(), attempt.step(), attempt.number())
}

#[pymethods]
impl OpenAttempt {
    #[getter]
    fn key(&self) -> (u64, u64, u32) {
        key(&self.0)
    }

    fn reach_epoch(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        let attempt = self.0.clone();
        wait(py, async move { attempt.reach_epoch(epoch).await })
    }
}
