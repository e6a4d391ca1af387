//! Measures the effect of a hostile job on other jobs. Servers and jobs are separate processes.

mod hostile;
mod worker;

use std::{
    collections::BTreeMap,
    fmt, fs,
    num::NonZero,
    process::Command,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tempfile::TempDir;
use zeroshard_model::{Role, quota::Quota};
use zeroshard_net::{Token, Tokens};
use zeroshard_tests::{Cluster, binary};

use crate::{
    Error,
    sample::{median, quantile},
    table::Table,
    talk::Talker,
};

pub(crate) use worker::{WorkerOptions, run as run_worker};

/// The number of shard servers.
const SERVERS: usize = 2;
/// The time at the beginning of a phase in which steps do not count.
const SETTLE: Duration = Duration::from_millis(500);
/// The time limit for a job to start, or to end its current manner.
const ANSWER_WITHIN: Duration = Duration::from_secs(300);

/// Measure the effect of a hostile job on the steps of seven other jobs
///
/// A coordinator, two shard servers and eight jobs run as separate processes. Each job has one
/// worker, which makes steps (push, decide, apply, pull) without a model and without a pause.
/// Phases in which all jobs behave well alternate with phases in which the first job is hostile:
///
/// - slow-reader: it makes steps, and opens pulls that it does not read.
///
/// - huge-tensors: four ranks push and pull a job of 16 times the size over many streams.
///
/// - job-storm: it creates and deletes jobs and asks for the status, in 96 tasks, as fast as the
///   limit of its token allows.
///
/// - large-job: it creates and deletes a job of 4 GiB.
///
/// The table shows the step times of the other jobs, and the ratios to their step times in the
/// well-behaved phases before and after. `hostile_cores` is the processor time of the hostile job's
/// own process. On the same machine, it takes this time from the other jobs, which no server can
/// prevent.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of jobs
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..))]
    jobs: u32,
    /// Number of tensors of each job
    #[arg(long, default_value_t = 8)]
    tensors: usize,
    /// Number of elements of each tensor
    #[arg(long, default_value_t = 1 << 18)]
    numel: usize,
    /// Number of elements of the job that large-job creates
    #[arg(long, default_value_t = 1 << 28)]
    large: u64,
    /// Calls per second that the token of each job may make to each server; 0: no limit
    #[arg(long, default_value_t = 250)]
    requests: u32,
    /// Length of a phase in seconds
    #[arg(long, default_value_t = 6)]
    seconds: u64,
    /// Number of rounds. Each round measures all manners
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Manners to measure, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Manner::HOSTILE)]
    manners: Vec<Manner>,
}

/// The behaviour of the first job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Manner {
    /// It makes steps, like the other jobs
    WellBehaved,
    /// It makes steps, and opens pulls that it does not read
    SlowReader,
    /// It pushes and pulls much more than the other jobs
    HugeTensors,
    /// It creates and deletes jobs, and asks for the status
    JobStorm,
    /// It creates and deletes a large job
    LargeJob,
}

impl Manner {
    const HOSTILE: [Self; 4] =
        [Self::SlowReader, Self::HugeTensors, Self::JobStorm, Self::LargeJob];

    /// The manner with this name.
    fn named(name: &str) -> Result<Self, String> {
        Self::from_str(name, false)
    }
}

impl fmt::Display for Manner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("no variant is skipped").get_name())
    }
}

/// The time since 1970 in seconds. All processes on a machine share this clock.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let phases = measure(options)?;
    let fields = [
        "manner",
        "steps",
        "seconds",
        "p90_seconds",
        "longest_seconds",
        "ratio_median",
        "ratio_p90",
        "hostile_cores",
        "load",
    ];
    let mut table = Table::new(json, &fields);
    let calm = |of: &Phase| of.manner == Manner::WellBehaved;
    table.row(row(&phases.iter().filter(|phase| calm(phase)).collect::<Vec<_>>(), None)?);
    for &manner in &options.manners {
        let is_it = |at: &usize| phases[*at].manner == manner;
        let of: Vec<usize> = (0..phases.len()).filter(is_it).collect();
        let around = of.iter().flat_map(|at| [&phases[at - 1], &phases[at + 1]]);
        let around: Vec<_> = around.collect();
        table.row(row(&of.iter().map(|&at| &phases[at]).collect::<Vec<_>>(), Some(&around))?);
    }
    table.finish();
    Ok(())
}

/// A part of the run in which the first job kept one manner.
struct Phase {
    manner: Manner,
    /// The durations in seconds of the steps of other jobs that began in the phase.
    steps: Vec<f64>,
    /// The average number of cores that the process of the first job used.
    cores: f64,
    /// The load average of the machine at the end of the phase.
    load: f64,
}

fn row(phases: &[&Phase], around: Option<&[&Phase]>) -> Result<Value, Error> {
    let all = |phases: &[&Phase]| -> Result<Vec<f64>, Error> {
        let steps: Vec<_> = phases.iter().flat_map(|phase| phase.steps.iter().copied()).collect();
        if steps.is_empty() {
            Err("no step began in a phase; increase --seconds".into())
        } else {
            Ok(steps)
        }
    };
    let steps = all(phases)?;
    let (seconds, p90) = (median(steps.clone()), quantile(steps.clone(), 0.9));
    let around = around.map(all).transpose()?;
    let ratio = |of: f64, to: &dyn Fn(Vec<f64>) -> f64| around.clone().map(|steps| of / to(steps));
    let mean = |of: &dyn Fn(&Phase) -> f64| {
        phases.iter().map(|phase| of(phase)).sum::<f64>() / phases.len() as f64
    };
    Ok(json!({
        "bench": "neighbours", "manner": phases[0].manner.to_string(), "steps": steps.len(),
        "seconds": seconds, "p90_seconds": p90,
        "longest_seconds": steps.iter().copied().fold(0.0, f64::max),
        "ratio_median": ratio(seconds, &median),
        "ratio_p90": ratio(p90, &|steps| quantile(steps, 0.9)),
        "hostile_cores": mean(&|phase| phase.cores), "load": mean(&|phase| phase.load),
    }))
}

fn measure(options: &Options) -> Result<Vec<Phase>, Error> {
    let guarded = Guarded::start(options)?;
    let jobs = (0..options.jobs).map(|number| Neighbour::start(options, &guarded, number));
    let mut jobs = jobs.collect::<Result<Vec<_>, _>>()?;
    for job in &mut jobs {
        job.wait_for("ready")?;
    }
    let mut spans = Vec::new();
    let calm = Manner::WellBehaved;
    let mut phase = |jobs: &mut [Neighbour], manner| -> Result<(), Error> {
        spans.push(Span::of(options, jobs, manner)?);
        Ok(())
    };
    for job in &mut jobs[1..] {
        job.tell(calm)?;
    }
    phase(&mut jobs, calm)?;
    for _ in 0..options.rounds {
        for &manner in &options.manners {
            phase(&mut jobs, manner)?;
            phase(&mut jobs, calm)?;
        }
    }
    let mut steps = Vec::new();
    for job in jobs.split_off(1) {
        steps.extend(job.finish()?);
    }
    let phase = |span: Span| {
        let began = |step: &&Step| step.began >= span.began && step.began < span.ended;
        let steps = steps.iter().filter(began).map(|step| step.seconds).collect();
        Phase { manner: span.manner, steps, cores: span.cores, load: span.load }
    };
    Ok(spans.into_iter().map(phase).collect())
}

/// The time span of a phase.
struct Span {
    manner: Manner,
    began: f64,
    ended: f64,
    cores: f64,
    load: f64,
}

impl Span {
    /// Runs a phase in which the first job has this manner and the other jobs make steps.
    fn of(options: &Options, jobs: &mut [Neighbour], manner: Manner) -> Result<Self, Error> {
        let first = &mut jobs[0];
        first.tell(manner)?;
        thread::sleep(SETTLE);
        let (began, cpu) = (now(), cpu_seconds(first.worker.id())?);
        thread::sleep(Duration::from_secs(options.seconds));
        // The phase includes the time until the job has ended its work, such as the creation of a
        // large job.
        first.stop()?;
        let ended = now();
        let cores = (cpu_seconds(first.worker.id())? - cpu) / (ended - began);
        let load = fs::read_to_string("/proc/loadavg")?;
        let load = load.split(' ').next().unwrap_or_default().parse()?;
        Ok(Self { manner, began, ended, cores, load })
    }
}

/// The processor time that a process has used, in seconds.
fn cpu_seconds(pid: u32) -> Result<f64, Error> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name of the program, which may have spaces, is in parentheses.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = fields.skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
    Ok(ticks.iter().sum::<f64>() / rustix::param::clock_ticks_per_second() as f64)
}

/// A cluster with a separate token for each job.
struct Guarded {
    cluster: Cluster,
    tokens: BTreeMap<String, String>,
    _directory: TempDir,
}

impl Guarded {
    fn start(options: &Options) -> Result<Self, Error> {
        let directory = tempfile::tempdir()?;
        let roles =
            (0..options.jobs).map(|number| Role::Job { name: name(number), is_reader: false });
        let mut lines = String::new();
        let mut tokens = BTreeMap::new();
        for role in std::iter::once(Role::Server).chain(roles) {
            let token = format!("token-of-{role}");
            let requests = NonZero::new(options.requests).filter(|_| role != Role::Server);
            let quota = Quota { requests, ..Quota::default() };
            lines += &format!("{} {quota}\n", Tokens::line(&role, &Token::from(token.clone())));
            tokens.insert(role.to_string(), token);
        }
        let file = directory.path().join("tokens");
        fs::write(&file, lines)?;
        let file = file.to_str().ok_or("the directory for temporary files is not UTF-8")?;
        let coordinator = Cluster::coordinator_with(&["--tokens", file]);
        let flags = ["--tokens", file, "--token", &tokens["server"]];
        let shards = (0..SERVERS).map(|_| Cluster::shard(coordinator.address(), &flags)).collect();
        Ok(Self { cluster: Cluster { coordinator, shards }, tokens, _directory: directory })
    }
}

/// The name of a job, and of the role of its token.
fn name(number: u32) -> String {
    format!("job-{number}")
}

/// A step of a job.
struct Step {
    began: f64,
    seconds: f64,
}

/// The process of a job.
struct Neighbour {
    worker: Talker,
    steps: Vec<Step>,
}

impl Neighbour {
    fn start(options: &Options, guarded: &Guarded, number: u32) -> Result<Self, Error> {
        let name = name(number);
        let mut command = Command::new(binary("zs-bench"));
        command.args(["neighbours-worker", "--address", guarded.cluster.address()]);
        command.args(["--job", &name, "--token", &guarded.tokens[&format!("job:{name}")]]);
        let numbers = [
            ("--tensors", options.tensors as u64),
            ("--numel", options.numel as u64),
            ("--large", options.large),
        ];
        for (flag, value) in numbers {
            command.args([flag, &value.to_string()]);
        }
        if number == 0 {
            command.arg("--hostile");
        }
        Ok(Self { worker: Talker::start(&name, &mut command)?, steps: Vec::new() })
    }

    /// Starts this manner, which lasts until [`Self::stop`].
    fn tell(&mut self, manner: Manner) -> Result<(), Error> {
        self.worker.tell(&manner.to_string())
    }

    /// Ends the current manner, and waits until the job has stopped.
    fn stop(&mut self) -> Result<(), Error> {
        self.worker.tell("stop")?;
        self.wait_for("stopped")
    }

    /// Waits for an event, and collects the steps before it.
    fn wait_for(&mut self, event: &str) -> Result<(), Error> {
        loop {
            let answer = self.worker.answer(ANSWER_WITHIN)?;
            if answer["event"] == event {
                return Ok(());
            }
            if let (Some(began), Some(seconds)) =
                (answer["began"].as_f64(), answer["seconds"].as_f64())
            {
                self.steps.push(Step { began, seconds });
            }
        }
    }

    /// Ends the job, and returns its steps.
    fn finish(mut self) -> Result<Vec<Step>, Error> {
        self.stop()?;
        Ok(std::mem::take(&mut self.steps))
    }
}
