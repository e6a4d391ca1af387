//! What a step's gradients come to, out of what the servers report; for the decision, and for ranks that ask
//! before it.

use std::collections::BTreeMap;

use zeroshard_proto::{Error, JobSpec, Result, pb};

use super::{
    cluster::Cluster,
    commit::Turn,
    state::{Action, Caller, Job, Now, Open, Phase, Reduce, Reply, ServerId, Waiter},
};
use crate::listing::some_of;

/// The reduced gradient of all slices.
#[derive(Debug)]
pub(super) struct Gradient {
    /// Of the mean; without the tensors that are not clipped.
    sum_of_squares: f64,
    /// First in manifest order.
    pub(super) overflow: Option<pb::Overflow>,
    /// One for each tensor, in manifest order.
    pub(super) absent: Vec<pb::Absent>,
}

impl Gradient {
    /// In f64: slices are added up to tensors, and tensors to the total, in manifest order, so that the result does
    /// not depend on who reported what.
    pub(super) fn new(spec: &JobSpec, reports: &BTreeMap<ServerId, pb::StepReady>) -> Self {
        let manifest = &spec.manifest;
        let mut sums = vec![0.0f64; manifest.slices().len()];
        for report in reports.values() {
            for (&slice, &sum) in report.slices.iter().zip(&report.sums_of_squares) {
                sums[slice as usize] = sum;
            }
        }
        let clipped =
            |&index: &usize| manifest.tensors()[index].trains() && !manifest.tensors()[index].no_clip;
        let tensors = (0..manifest.tensors().len()).filter(clipped);
        let totals = tensors.map(|tensor| {
            let sum = sums[manifest.slices_of(tensor)].iter().fold(0.0, |a, b| a + b);
            let divisor = spec.divisor(tensor) as f64;
            sum / (divisor * divisor)
        });
        let infinite = sums.iter().position(|sum| !sum.is_finite());
        let infinite = infinite.map(|slice| pb::Overflow { slice: slice as u32, rank: None });
        // What the servers say comes first: it may name the rank.
        let overflows = reports.values().filter_map(|report| report.overflow).chain(infinite);
        Self {
            sum_of_squares: totals.fold(0.0, |a, b| a + b),
            overflow: overflows.min_by_key(|overflow| overflow.slice),
            absent: absent(spec, reports),
        }
    }

    /// Of the mean, unscaled gradient.
    pub(super) fn norm(&self, loss_scale: f64) -> f64 {
        let norm = self.sum_of_squares.sqrt() / loss_scale;
        // A rank's gradients may overflow and cancel out in no finite norm that means anything.
        if self.overflow.is_some() && norm.is_finite() { f64::NAN } else { norm }
    }
}

/// Of each tensor that some rank had not all of: the lowest such rank, and whether no rank had any of it.
fn absent(spec: &JobSpec, reports: &BTreeMap<ServerId, pb::StepReady>) -> Vec<pb::Absent> {
    // By tensor: the lowest rank, and how many slices nobody had.
    let mut tensors = BTreeMap::<usize, (u32, usize)>::new();
    for absent in reports.values().flat_map(|report| &report.absent) {
        let tensor = spec.manifest.slices()[absent.slice as usize].tensor;
        let (rank, nowhere) = tensors.entry(tensor).or_insert((absent.rank, 0));
        *rank = absent.rank.min(*rank);
        *nowhere += usize::from(absent.everywhere);
    }
    let merged = tensors.into_iter().map(|(tensor, (rank, nowhere))| {
        let slices = spec.manifest.slices_of(tensor);
        pb::Absent { slice: slices.start as u32, rank, everywhere: nowhere == slices.len() }
    });
    merged.collect()
}

/// Somebody who waits for the gradient's norm.
#[derive(Debug)]
pub(super) struct Reducer {
    pub(super) waiter: Waiter,
    loss_scale: f64,
}

impl Cluster {
    pub(super) fn reduce(&mut self, caller: Caller, reduce: Reduce, now: Now, out: &mut Vec<Action>) {
        match self.try_reduce(caller, &reduce, now) {
            Ok(None) => self.answer_reducers(&reduce.job, out),
            Ok(Some(report)) => out.push(Action::Answer(caller, Ok(Reply::Reduced(report)))),
            Err(error) => out.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Takes note of who asks; or the answer, if the step is over.
    fn try_reduce(&mut self, caller: Caller, reduce: &Reduce, now: Now) -> Result<Option<pb::ReduceReport>> {
        let &Reduce { ref job, lease, epoch, rank, step, loss_scale, wait } = reduce;
        let (_, open) = self.member(&Turn { job, lease, epoch, rank })?;
        if let Some(last) = open.report_of(step) {
            let pb::StepReport { gradient_norm, overflow, .. } = *last;
            return Ok(Some(pb::ReduceReport { gradient_norm, overflow }));
        }
        open.check_step(job, step)?;
        open.round.reducers.push(Reducer { waiter: Waiter::new(caller, now, wait), loss_scale });
        Ok(None)
    }

    /// Tells who waits for it the norm of the open step of `name`, if nobody's gradient is missing.
    pub(super) fn answer_reducers(&mut self, name: &str, out: &mut Vec<Action>) {
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else { return };
        if open.round.reducers.is_empty() || !open.is_reduced() {
            return;
        }
        let gradient = Gradient::new(spec, &open.round.reports);
        for Reducer { waiter, loss_scale } in std::mem::take(&mut open.round.reducers) {
            let gradient_norm = gradient.norm(loss_scale);
            let report = pb::ReduceReport { gradient_norm, overflow: gradient.overflow };
            out.push(Action::Answer(waiter.caller, Ok(Reply::Reduced(report))));
        }
    }

    pub(super) fn expire_reducers(&mut self, now: Now, out: &mut Vec<Action>) {
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(&name) else { continue };
            let late = |reducer: &mut Reducer| reducer.waiter.deadline <= now;
            let expired: Vec<Reducer> = open.round.reducers.extract_if(.., late).collect();
            if expired.is_empty() {
                continue;
            }
            let waiting_for = self.gradients_wait_for(&name);
            let timeout = |Reducer { waiter, .. }| {
                Action::Answer(waiter.caller, Err(waiter.timeout(now, waiting_for.clone())))
            };
            out.extend(expired.into_iter().map(timeout));
        }
    }

    fn gradients_wait_for(&self, name: &str) -> String {
        let Some(Job { epoch, phase: Phase::Open(open), .. }) = self.jobs.get(name) else {
            return String::new();
        };
        let parts = some_of(self.late_servers(name, open));
        format!("the gradients of step {} of job {name:?} (epoch {epoch}): {parts}", open.step())
    }

    /// Servers that miss parameters or gradients, with what they wait for themselves.
    pub(super) fn late_servers(&self, name: &str, open: &Open) -> Vec<String> {
        let uninitialised = open.uninitialised.iter();
        let uninitialised =
            uninitialised.map(|&server| format!("{} to get its initial parameters", self.name(server)));
        let late = open.trainable.keys().filter(|server| !open.round.reports.contains_key(server));
        let late = late.map(|&server| format!("{}{}", self.name(server), self.lacks(server, name)));
        uninitialised.chain(late).collect()
    }

    /// What the server said that it waits for.
    fn lacks(&self, server: ServerId, name: &str) -> String {
        let stats = self.servers.get(&server).and_then(|peer| peer.stats.as_ref());
        let job = stats.and_then(|stats| stats.jobs.iter().find(|job| job.job == name));
        match job {
            Some(job) if !job.waiting_for.is_empty() => format!(", which waits for {}", job.waiting_for),
            _ => ", which has not said that it has all gradients".to_owned(),
        }
    }
}

impl Open {
    /// Whether every server has every rank's gradients of the open step.
    pub(super) fn is_reduced(&self) -> bool {
        self.version.is_some() && self.round.reports.len() == self.trainable.len()
    }

    /// The report of `step`, if it is the one before the open one.
    pub(super) fn report_of(&self, step: u64) -> Option<&pb::StepReport> {
        self.last.as_deref().filter(|last| last.version == step.wrapping_add(1))
    }

    /// # Errors
    /// [`Error::StepMismatch`] unless it is the open one.
    pub(super) fn check_step(&self, job: &str, step: u64) -> Result<()> {
        match self.step() {
            current if current == step => Ok(()),
            current => Err(Error::StepMismatch { job: job.to_owned(), step, current }),
        }
    }
}
