//! Starts the workers of a run. The cluster runs in this process, in separate processes, or is
//! already running.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use tokio::runtime::{Builder, Handle, Runtime};
use zeroshard_net::{Token, trace};
use zeroshard_server::embedded;

use super::cli::Train;
use super::error::{Error, Result};
use super::plan::Plan;
use super::processes;
use super::progress::{self, Line, Output};
use super::report::{self, Outcome, Summary};
use super::text::Corpus;
use super::train;

/// The number of threads for transfers. Each worker computes on a separate thread.
const IO_THREADS: usize = 2;

/// Runs `train` with these flags.
///
/// # Errors
/// [`Error::Flag`] for flags that contradict each other, [`Error::Text`] for a folder without text,
/// and all errors of the run.
pub fn run(flags: &Train) -> Result<()> {
    let mut plan = flags.plan()?;
    if let Some(collector) = flags.otlp_endpoint.as_deref().filter(|url| !url.is_empty()) {
        let process = trace::this_process();
        trace::start(collector, flags.trace_ratio, "zeroshard-worker", &process)?;
    }
    if flags.address.is_none() && plan.token.reveal().is_none() {
        // Other users of this machine cannot use the servers that are started.
        plan.token = Token::random()?;
    }
    if flags.address.is_none() {
        // All connections stay on this machine.
        plan.tls = None;
    }
    // The text is read here even if other processes will train, so that a wrong folder is reported
    // before they are started.
    let corpus = Corpus::read(&flags.data, plan.context())?;
    plan.model(&corpus)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .enable_all()
        .build()
        .map_err(|cause| Error::System { doing: "start the runtime", cause })?;
    let result = if flags.makes_processes() {
        runtime.block_on(processes::run(flags, &plan))
    } else {
        run_in_process(flags, plan, corpus, &runtime)
    };
    // Does not wait for transfers, which may hang.
    runtime.shutdown_background();
    trace::flush();
    result
}

/// Runs the workers of this process, with the cluster that the flags name or with an embedded
/// cluster.
fn run_in_process(flags: &Train, plan: Plan, corpus: Corpus, runtime: &Runtime) -> Result<()> {
    let ranks: Vec<u32> =
        flags.rank.map_or_else(|| (0..plan.parallelism.workers()).collect(), |rank| vec![rank]);
    let run =
        Run { plan: Arc::new(plan), corpus: Arc::new(corpus), runtime: runtime.handle().clone() };
    let outcome = match &flags.address {
        Some(address) => run.workers(flags, address, &ranks)?,
        None => {
            let mut options = embedded::Options::new(run.plan.shards as usize);
            options.common.token = run.plan.token.clone();
            let cluster = runtime.block_on(embedded::Cluster::start(options))?;
            let outcome = run.workers(flags, &cluster.address(), &ranks)?;
            runtime.block_on(cluster.shutdown())?;
            outcome
        }
    };
    match outcome {
        Some(outcome) => write_report(flags, &run.plan, &outcome),
        None => Ok(()),
    }
}

fn write_report(flags: &Train, plan: &Plan, outcome: &Outcome) -> Result<()> {
    report::write_files(&flags.out, plan, outcome)?;
    match (flags.json, flags.quiet) {
        (true, _) => progress::line(&Line::Done(&Summary::new(plan, outcome))),
        (false, false) => report::print(&flags.out, plan, outcome),
        (false, true) => Ok(()),
    }
}

#[derive(Clone)]
struct Run {
    plan: Arc<Plan>,
    corpus: Arc<Corpus>,
    runtime: Handle,
}

impl Run {
    /// Runs workers as threads until all are done. Returns the first error without waiting for the
    /// other threads, which end with the process.
    fn workers(&self, flags: &Train, address: &str, ranks: &[u32]) -> Result<Option<Outcome>> {
        let (done, results) = mpsc::channel();
        for &rank in ranks {
            let (run, done, address) = (self.clone(), done.clone(), address.to_owned());
            let mut output = match (flags.json, flags.quiet) {
                (true, _) if rank == 0 => Output::Json,
                (false, false) if rank == ranks[0] => Output::people(rank, run.plan.steps),
                _ => Output::Quiet,
            };
            let work = move || {
                // The report is also sent during unwinding, so a panic is reported as an error.
                let mut report = Report { done, rank, result: None };
                let result =
                    train::train(&run.plan, &run.corpus, &run.runtime, &address, rank, &mut output);
                output.finish();
                report.result = Some(result);
            };
            thread::Builder::new()
                .name(format!("worker-{rank}"))
                .spawn(work)
                .map_err(|cause| Error::System { doing: "start a thread", cause })?;
        }
        drop(done);
        let mut outcome = None;
        for result in results {
            outcome = result?.or(outcome);
        }
        Ok(outcome)
    }
}

/// Sends the result of a worker when it is dropped, also after a panic.
struct Report {
    done: mpsc::Sender<Result<Option<Outcome>>>,
    rank: u32,
    result: Option<Result<Option<Outcome>>>,
}

impl Drop for Report {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or(Err(Error::Panicked { rank: self.rank }));
        // Sending fails if another worker has failed, because the receiver is then dropped.
        let _ = self.done.send(result);
    }
}
