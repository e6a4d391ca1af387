//! A rank that makes one step of a job and stops in a phase of the next one, until it is killed.
//!
//! Usage: `paused-rank ADDRESS JOB RANK PHASE`. It prints a line when it is in the phase.

#![expect(clippy::print_stdout, reason = "its line of output is read by a test")]

use std::{env, error::Error, future};

use zeroshard_client::{Cluster, Options};
use zeroshard_tests::{
    phase::{self, Phase},
    training,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [address, name, rank, phase] = &arguments[..] else {
        return Err("usage: paused-rank ADDRESS JOB RANK PHASE".into());
    };
    let phase: Phase = phase.parse()?;
    let cluster = Cluster::connect(address, Options::default()).await?;
    let job = cluster.join(name, rank.parse()?).await?;
    job.initialised().await?;
    let step = job.version().unwrap_or_default();
    training::step(&job, step).await?;
    let attempt = phase::begin(&job, step + 1, phase).await?;
    if phase == Phase::Voted {
        println!("{phase}");
    }
    if matches!(phase, Phase::Voted | Phase::Decided) {
        phase::finish(&job, &attempt, phase).await?;
    }
    if phase != Phase::Voted {
        println!("{phase}");
    }
    future::pending().await
}
