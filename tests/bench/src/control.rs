//! Measures the coordinator's state machine without a network: the time of each event with few and
//! with many jobs, the time of a decision, and the time of a placement.

mod driver;
mod jobs;
mod placing;

use std::{collections::BTreeMap, num::NonZero, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use zeroshard_coordinator::vocabulary::{
    commands::ServerEvent, events::Event, ids::ServerId, reports::Stats,
};

use self::{
    driver::{Costs, Driver, Kind},
    jobs::{Job, large, small},
};
use crate::{
    Error,
    sample::{median, quantile},
    table::Table,
};

/// The name of the large job.
const LARGE: &str = "large";
/// The number of small jobs that make a step in each round.
const SMALL_STEPS: usize = 8;
/// The virtual time of a round. Servers send a report once a second.
const ROUND: Duration = Duration::from_secs(1);
/// The longest time from the last rank's commit to the decision, in milliseconds.
const GOAL: f64 = 20.0;

/// Measure the coordinator's state machine with few and with many jobs, without a network
///
/// One job has many ranks, and holds slices on all servers. The other jobs have one rank each.
/// Servers are simulated and answer at once, and time is virtual. In each round, for each number of
/// jobs in turn, the large job makes two steps, some of the small jobs make one, a rank of the
/// large job and one of a small job are replaced, all servers report their memory, and a deadline
/// is checked.
///
/// The first table shows the elapsed time of each kind of event, as median and p99 in microseconds.
/// Other programs on the machine make p99 longer.
///
/// - handle: the state machine alone.
///
/// - event: in addition the figures for the metrics, and the next deadline if the timer is set
///   anew.
///
/// - ratio: the median of event, divided by that with the fewest jobs.
///
/// - visits: the median number of jobs that the state machine visits for an event.
///
/// The second table shows the CPU time from the last rank's commit of the large job to the
/// decision, if all servers were ready before and if none was, and that of all events of a step.
/// The third table shows the time to place the slices of the large job.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Numbers of jobs
    #[arg(long, value_delimiter = ',', default_value = "1,2,1000",
        value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Vec<u32>,
    /// Number of ranks of the large job
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Number of shard servers
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    servers: u32,
    /// Number of slices of the large job
    #[arg(long, default_value = "300000")]
    slices: NonZero<usize>,
    /// Number of tensors of the large job
    #[arg(long, default_value = "1000")]
    tensors: NonZero<usize>,
    /// Number of rounds
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of placements; the median is shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let mut counts = options.jobs.clone();
    counts.sort_unstable();
    counts.dedup();
    let runs = counts.into_iter().map(|jobs| Run::start(options, jobs as usize));
    let mut runs = runs.collect::<Result<Vec<_>, _>>()?;
    for round in 0..options.rounds as usize {
        runs.iter_mut().try_for_each(|run| run.round(round))?;
    }
    show_events(&runs, json);
    show_commits(&runs, json);
    placing::run(options, json)
}

/// A cluster with a number of jobs.
struct Run {
    driver: Driver,
    large: Job,
    small: Vec<Job>,
    /// CPU seconds from the last rank's commit to the decision, if all servers were ready before.
    ready_before: Vec<f64>,
    /// The same if no server was.
    ready_after: Vec<f64>,
    /// The CPU seconds of all events of a step.
    step: Vec<f64>,
}

impl Run {
    fn start(options: &Options, jobs: usize) -> Result<Self, Error> {
        let mut driver = Driver::new(options.servers, jobs)?;
        let large = Job::start(&mut driver, 1, large(options)?)?;
        let others = (1..jobs).map(|job| Job::start(&mut driver, 1 + job as u64, small(job)?));
        let small = others.collect::<Result<_, _>>()?;
        driver.start_timing();
        let (ready_before, ready_after, step) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { driver, large, small, ready_before, ready_after, step })
    }

    /// The number of jobs.
    fn jobs(&self) -> usize {
        1 + self.small.len()
    }

    fn round(&mut self, round: usize) -> Result<(), Error> {
        let Self { driver, large, small, .. } = self;
        driver.pass(ROUND);
        for is_before in [true, false] {
            let began = driver.busy();
            let last_commit = large.step(driver, is_before)?;
            self.step.push(driver.busy() - began);
            let decided = driver.take_decided_at()? - last_commit;
            if is_before { &mut self.ready_before } else { &mut self.ready_after }.push(decided);
        }
        large.replace(driver, round % large.world())?;
        let number = small.len();
        for turn in 0..SMALL_STEPS.min(number) {
            let job = &mut small[(round * SMALL_STEPS + turn) % number];
            job.step(driver, turn % 2 == 0)?;
            if turn == 0 {
                job.replace(driver, 0)?;
            }
        }
        self.report()?;
        self.driver.send(Event::Tick)
    }

    /// Every server reports its jobs.
    fn report(&mut self) -> Result<(), Error> {
        let mut reports = BTreeMap::<ServerId, Stats>::new();
        let stats = self.small.iter().chain([&self.large]).flat_map(Job::stats);
        stats.for_each(|(server, stats)| reports.entry(server).or_default().jobs.push(stats));
        let mut reports = reports.into_iter();
        reports.try_for_each(|(server, stats)| self.driver.say(server, ServerEvent::Stats(stats)))
    }
}

/// Prints the costs of each kind of event.
fn show_events(runs: &[Run], json: bool) {
    let fields = [
        "event",
        "job",
        "jobs",
        "number",
        "handle_us",
        "handle_p99_us",
        "event_us",
        "event_p99_us",
        "ratio",
        "visits",
    ];
    let mut table = Table::new(json, &fields);
    let mut kinds: Vec<Kind> =
        runs.iter().flat_map(|run| run.driver.costs.keys().copied()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let mut least = None;
        for run in runs {
            if let Some(costs) = run.driver.costs.get(&kind) {
                let least = *least.get_or_insert_with(|| median(costs.event.clone()));
                table.row(event_row(kind, run.jobs(), costs, least));
            }
        }
    }
    table.finish();
}

/// The row of a kind of event with this number of jobs. `least`: the median with the fewest jobs.
fn event_row(kind: Kind, jobs: usize, costs: &Costs, least: f64) -> Value {
    let (event, job) = kind.labels();
    let p99 = |samples: &Vec<f64>| quantile(samples.clone(), 0.99);
    let Costs { handle, event: whole, visits } = costs;
    let event_us = median(whole.clone());
    json!({
        "bench": "control", "event": event, "job": job, "jobs": jobs, "number": handle.len(),
        "handle_us": median(handle.clone()), "handle_p99_us": p99(handle),
        "event_us": event_us, "event_p99_us": p99(whole), "ratio": event_us / least,
        "visits": median(visits.clone()),
    })
}

/// Prints the times of the large job's steps.
fn show_commits(runs: &[Run], json: bool) {
    let fields = ["step", "jobs", "number", "p50_ms", "p99_ms", "goal_ms", "ratio"];
    let mut table = Table::new(json, &fields);
    let mut show = |step: &str, goal_ms: Option<f64>, samples_of: fn(&Run) -> &Vec<f64>| {
        let least = runs.first().map_or(f64::NAN, |run| median(samples_of(run).clone()));
        for run in runs {
            let samples = samples_of(run);
            let p50 = median(samples.clone());
            table.row(json!({
                "bench": "control-step", "step": step, "jobs": run.jobs(),
                "number": samples.len(), "p50_ms": p50 * 1e3,
                "p99_ms": quantile(samples.clone(), 0.99) * 1e3, "goal_ms": goal_ms,
                "ratio": p50 / least,
            }));
        }
    };
    show("decided-ready-before", Some(GOAL), |run| &run.ready_before);
    show("decided-ready-after", Some(GOAL), |run| &run.ready_after);
    show("all-events", None, |run| &run.step);
    table.finish();
}
