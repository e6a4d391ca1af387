//! A worker: it creates and joins the job, and makes steps, again if they are aborted.

use std::{sync::Mutex, time::Duration};

use zeroshard_client::{Cluster, Error, Job, Options, Result, StepReport};
use zeroshard_model::JobSpec;
use zeroshard_tests::{synthetic, training};

use crate::cluster::{COORDINATOR, Log, Seen, Size};

pub(crate) const STEPS: u64 = 6;
/// The pause after each step.
const PAUSE: Duration = Duration::from_millis(700);

fn spec(size: Size) -> JobSpec {
    let adamw = "adamw".parse().unwrap();
    let spec = synthetic::job("job", size.world, adamw, synthetic::small()).unwrap();
    JobSpec { replicas: size.replicas, min_servers: size.servers as u32, ..spec }
}

/// Trains to the end, and records the reports, and the hash of the state. A rank that has lost its
/// lease, because its connection was silent for too long, joins again.
pub(crate) async fn train(size: Size, rank: u32, log: &Log, seen: &Mutex<Seen>) -> Result<()> {
    let options = Options::default().timeout(Duration::from_secs(120));
    let client = Cluster::connect(COORDINATOR, options).await?;
    client.create_job(&spec(size)).await?;
    loop {
        let job = client.join("job", rank).await?;
        match make_steps(&job, log, seen).await {
            Err(error @ Error::LeaseLost { .. }) => note(log, rank, &error.to_string()),
            result => return result,
        }
    }
}

async fn make_steps(job: &Job, log: &Log, seen: &Mutex<Seen>) -> Result<()> {
    if job.rank() == 0 && job.version().is_none() {
        job.initialise(synthetic::parameters(&job.spec().manifest)).await?;
    }
    let first = job.version().unwrap_or(0);
    for step in first..STEPS {
        let report = make(job, step, log).await?;
        let text = format!("{:?} {:?}", report.gradient_norm, report.absent);
        note(log, job.rank(), &format!("step {step}: {text}"));
        seen.lock().unwrap().reports.insert((step, job.rank()), text);
        // The faults are spread over the run.
        tokio::time::sleep(PAUSE).await;
    }
    let hash = job.state_hash(STEPS).await?;
    seen.lock().unwrap().hash = Some(hash);
    Ok(())
}

async fn make(job: &Job, step: u64, log: &Log) -> Result<StepReport> {
    loop {
        match training::step(job, step).await {
            Err(error @ Error::StepAborted { .. }) => note(log, job.rank(), &error.to_string()),
            result => return result,
        }
    }
}

fn note(log: &Log, rank: u32, event: &str) {
    log.add(turmoil::elapsed(), &format!("rank {rank}: {event}"));
}
