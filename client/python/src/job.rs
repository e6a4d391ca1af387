//! One rank's lease on a job, and its transfers.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::JoinSet,
};
use zeroshard_client::{self as client, Attempt, Commit, Result, StatePart, TensorData, TensorId};
use zeroshard_model::{AppliedSteps, Error, JobVersion, successor_name};

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
type Applied = (u64, Vec<f32>);

/// The norm of a step's gradient, that of each tensor's, and the ranks that rest.
type ReducedNorms = (f64, Vec<f64>, Vec<u32>);

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
    pushes: JoinSet<Result<()>>,
}

impl Job {
    fn steps(&self, (count, scalar_state): Applied) -> PyResult<AppliedSteps> {
        AppliedSteps::of(&self.job.spec().groups[0], count, &scalar_state).map_err(raise)
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

    /// Starts `work`. The next flush returns its error.
    fn start(
        &self,
        outgoing: &mut Outgoing,
        work: impl Future<Output = Result<()>> + Send + 'static,
    ) -> PyResult<()> {
        outgoing.pushes.spawn_on(work, runtime().map_err(raise)?.handle());
        Ok(())
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

    fn start_push(
        &self,
        outgoing: &mut Outgoing,
        attempt: Attempt,
        bucket: Vec<TensorData>,
        copies: Vec<Call>,
    ) -> PyResult<()> {
        let (sending, timeout) = (self.sending.clone(), self.job.timeout());
        self.start(outgoing, async move {
            let _permit = acquire(&sending).await?;
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
        wait(py, async move { acquire(&sending).await.map(drop) })
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
    fn closed(&self, step: u64) -> PyResult<(Attempt, JoinSet<Result<()>>)> {
        let outgoing = &mut *lock(&self.outgoing);
        self.close_bucket(outgoing)?;
        Ok((self.attempt(outgoing, step)?, std::mem::take(&mut outgoing.pushes)))
    }
}

/// The part of the state that Python names: empty for the published parameters, `master`, or a
/// state tensor of the optimizer.
fn state_part(name: &str) -> StatePart<'_> {
    match name {
        "" => StatePart::Parameters,
        "master" => StatePart::MasterWeights,
        name => StatePart::OptimizerState(name),
    }
}

fn tensor_ids(tensors: Vec<usize>) -> Vec<TensorId> {
    tensors.into_iter().map(TensorId::new).collect()
}

async fn acquire(sending: &Semaphore) -> Result<SemaphorePermit<'_>> {
    sending.acquire().await.map_err(|closed| Error::Internal { cause: closed.to_string() })
}

async fn arrived(mut pushes: JoinSet<Result<()>>) -> Result<()> {
    while let Some(ended) = pushes.join_next().await {
        ended.map_err(|e| Error::Internal { cause: format!("a push ended: {e}") })??;
    }
    Ok(())
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

    fn uploads(&self, tensor: usize) -> PyResult<bool> {
        self.job.uploads(TensorId::new(tensor)).map_err(raise)
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
        let applied = self.steps(applied)?;
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
        let applied = self.steps(applied)?;
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
        Ok(Exchange::new(exchange, self.job.wire()))
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
        let (attempt, sending) = (attempt.0.clone(), self.sending.clone());
        self.start(&mut outgoing, async move {
            let _permit = acquire(&sending).await?;
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
        self.start(outgoing, async move { attempt.push_absent(&tensors).await })
    }

    fn replace(&self, py: Python<'_>, step: u64, arrays: Arrays<'_>) -> PyResult<()> {
        let values = tensor_data(py, &arrays)?;
        let outgoing = &mut *lock(&self.outgoing);
        let attempt = self.attempt(outgoing, step)?;
        self.start(outgoing, async move { attempt.push_values(values).await })
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let pushes = {
            let outgoing = &mut *lock(&self.outgoing);
            self.close_bucket(outgoing)?;
            std::mem::take(&mut outgoing.pushes)
        };
        wait(py, arrived(pushes))
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
            arrived(pushes).await?;
            attempt.rest(excluded).await
        })?;
        Ok(Rest::new(task))
    }

    #[pyo3(signature = (step, loss_scale=1.0))]
    fn reduce(&self, py: Python<'_>, step: u64, loss_scale: f64) -> PyResult<ReducedNorms> {
        let (attempt, pushes) = self.closed(step)?;
        wait(py, async move {
            arrived(pushes).await?;
            let reduced = attempt.reduce(loss_scale).await?;
            Ok((reduced.gradient_norm, reduced.tensor_norms, reduced.resting))
        })
    }

    fn gradient_sum(
        &self,
        py: Python<'_>,
        step: u64,
        tensor: usize,
        array: PyRef<'_, Array>,
    ) -> PyResult<()> {
        let attempt = self.attempt(&mut lock(&self.outgoing), step)?;
        let mut targets = Targets::new(py, &vec![(tensor, array)]);
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
        targets=None, user_data=None, user_data_follows=false
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
    ) -> PyResult<Report> {
        let groups = optimizers(groups)?;
        let commit = Commit::default().groups(groups).loss_scale(loss_scale).max_norm(max_norm);
        let commit = commit
            .gradient_factors(gradient_factors.unwrap_or_default())
            .written(written.unwrap_or_default())
            .user_data(user_data.unwrap_or_default())
            .user_data_follows(user_data_follows);
        let mut targets = Targets::new(py, &targets.unwrap_or_default());
        let (attempt, pushes) = self.closed(step)?;
        let report = wait(py, async move {
            arrived(pushes).await?;
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
                Some(name) => job.pull_part(version, state_part(&name), targets.targets()?).await?,
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
        let optimizer = &self.job.spec().groups[0];
        let parts = |of: &AppliedSteps| (of.count, of.scalar_state(optimizer).to_vec());
        Ok(steps.iter().map(parts).collect())
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
