//! The state of a shard server for the status page.

use std::{collections::BTreeMap, time::Duration};

use prometheus::Histogram;
use zeroshard_kernels::{Backend, Usage};
use zeroshard_loops::tally::Tally;
use zeroshard_proto::pb;
use zeroshard_shard::{job::StepContributions, slice::Role};

use super::{job::Job, store::Store};

/// The maximum number of jobs in the overview.
const MAX_JOBS: usize = 100;

/// The maximum number of ranks with their gradients.
const MAX_RANKS: usize = 12;

/// The slices and the memory of a server.
#[derive(Debug)]
pub(crate) struct Overview {
    /// The statistics of all jobs, as reported to the coordinator.
    pub(crate) stats: pb::Stats,
    /// The number of bytes of pinned versions, and of second copies of slices for saves.
    pub(crate) pinned: u64,
    pub(crate) snapshots: u64,
    /// The limits of the memory; [`u64::MAX`] means no limit.
    pub(crate) limits: Limits,
    /// The tiers with a budget: name, used bytes and limit.
    pub(crate) tiers: Vec<(&'static str, u64, u64)>,
    /// The names of the devices, with their usage if they are GPUs.
    pub(crate) devices: Vec<(String, Option<Usage>)>,
    /// At most [`MAX_JOBS`] jobs, those with the most slices first.
    pub(crate) jobs: Vec<JobOverview>,
    /// The total number of jobs.
    pub(crate) all_jobs: usize,
}

/// Limits in bytes; [`u64::MAX`] means no limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) memory: u64,
    pub(crate) parked: u64,
    pub(crate) pinned: u64,
    pub(crate) snapshots: u64,
}

/// A job with slices on the server.
#[derive(Debug)]
pub(crate) struct JobOverview {
    pub(crate) name: String,
    pub(crate) epoch: u64,
    pub(crate) version: Option<u64>,
    pub(crate) waiting_for: Option<String>,
    /// The sizes in bytes of all slices of the job, on whichever server they are.
    pub(crate) sizes: Vec<u64>,
    /// The slices that the server holds, in ascending order, and whether the server is their
    /// primary.
    pub(crate) held: Vec<(u32, bool)>,
    /// The number of bytes of its arrays.
    pub(crate) bytes: u64,
    /// The mean times of a step since the job was opened.
    pub(crate) phases: Vec<(&'static str, Duration)>,
    /// The gradients of the last step; `None` if no rank had one here.
    pub(crate) last_step: Option<LastStep>,
}

/// The gradients of a step in the slices for which the server was the primary.
#[derive(Debug)]
pub(crate) struct LastStep {
    pub(crate) step: u64,
    /// At most [`MAX_RANKS`] ranks, those with the largest gradients first.
    pub(crate) ranks: Vec<RankContribution>,
    pub(crate) all_ranks: usize,
}

/// The gradients of one rank.
#[derive(Debug)]
pub(crate) struct RankContribution {
    pub(crate) rank: u32,
    /// The norm of all of its gradients.
    pub(crate) norm: f64,
    /// The tensor with the largest gradient, and its norm.
    pub(crate) largest: (String, f64),
    /// The arrival of its last gradient, after the first one of the step.
    pub(crate) arrived: Option<Duration>,
}

impl<B: Backend> Store<B> {
    pub(super) fn overview(&self) -> Overview {
        let stats = self.stats();
        let mut jobs = self.jobs();
        let all_jobs = jobs.len();
        jobs.sort_by_cached_key(|job| (std::cmp::Reverse(job.slices().count()), job.id));
        jobs.truncate(MAX_JOBS);
        let limits = Limits {
            memory: self.limits.budgets.memory,
            parked: self.budget.limit(),
            pinned: self.pinned.limit(),
            snapshots: self.snapshots.limit(),
        };
        let device = |backend: &B| (backend.device().to_string(), backend.usage());
        Overview {
            stats,
            pinned: self.pinned.used(),
            snapshots: self.snapshots.used(),
            limits,
            tiers: self.tiers().collect(),
            devices: self.devices.iter().map(|of| device(&of.backend)).collect(),
            jobs: jobs.iter().map(|job| job.overview()).collect(),
            all_jobs,
        }
    }
}

impl<B: Backend> Job<B> {
    fn overview(&self) -> JobOverview {
        let memory = self.memory();
        let held = self.slices().map(|(slice, held)| (slice, held.role() == Role::Primary));
        let mut phases = Vec::new();
        self.count(|series| {
            let of = [("reduce", &series.reduce), ("decide", &series.decide)];
            let of = of.into_iter().chain([("apply", &series.apply)]);
            phases = of.filter_map(|(name, times)| Some((name, mean(times)?))).collect();
        });
        JobOverview {
            name: self.spec.name.clone(),
            epoch: self.epoch(),
            version: self.version(),
            waiting_for: self.waiting_for(),
            sizes: self.spec.required_by_slice().iter().map(|of| of.bytes).collect(),
            held: held.collect(),
            bytes: memory.master + memory.state + memory.accumulator + memory.published,
            phases,
            last_step: self.last_step(),
        }
    }

    /// The gradients of the last step.
    fn last_step(&self) -> Option<LastStep> {
        let step = self.version()?.checked_sub(1)?;
        let StepContributions { figures, arrived, .. } = self.contributions(step).ok()?;
        // The sum of squares of each rank, and its largest tensor.
        let mut ranks = BTreeMap::<u32, (f64, (u32, f64))>::new();
        for ((tensor, rank), Tally { squares, .. }) in figures {
            let (sum, largest) = ranks.entry(rank).or_insert((0.0, (tensor, squares)));
            *sum += squares;
            if squares.total_cmp(&largest.1).is_gt() {
                *largest = (tensor, squares);
            }
        }
        let name = |tensor: u32| self.spec.manifest.tensors()[tensor as usize].name.clone();
        let of_rank = |(rank, (squares, (tensor, of_tensor))): (u32, (f64, (u32, f64)))| {
            let largest = (name(tensor), of_tensor.sqrt());
            let arrived = arrived.get(&rank).copied();
            RankContribution { rank, norm: squares.sqrt(), largest, arrived }
        };
        let mut ranks: Vec<_> = ranks.into_iter().map(of_rank).collect();
        let all_ranks = ranks.len();
        ranks.sort_by(|one, other| other.norm.total_cmp(&one.norm));
        ranks.truncate(MAX_RANKS);
        (all_ranks > 0).then_some(LastStep { step, ranks, all_ranks })
    }
}

/// The mean of a histogram of seconds.
fn mean(times: &Histogram) -> Option<Duration> {
    let count = times.get_sample_count();
    let mean = times.get_sample_sum() / count as f64;
    (count > 0).then(|| Duration::try_from_secs_f64(mean).unwrap_or_default())
}
