//! Each process is killed, or stands still, in each phase of a step. The job ends with the bits of
//! a run that was not disturbed.
//!
//! promise: durability

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures_util::future::join_all;
use zeroshard_client::{Attempt, Error, Job};
use zeroshard_model::JobSpec;
use zeroshard_tests::{
    Cluster, Training, binary,
    phase::{self, Phase},
    synthetic, training,
};

use crate::{
    adamw,
    checkpoints::{directory, policy},
    connect, job,
    replicas::until_redundant,
    start, until_commits_wait,
};

/// The disturbed step is step 1.
const STEPS: u64 = 3;

/// For how many seconds a process stands still. After 30 s, its peers close their connections;
/// ranks then lose their leases, because the coordinator finds their streams closed.
const STILL: &[u64] = if cfg!(feature = "long") { &[5, 15, 40] } else { &[5] };

fn spec(name: &str, replicas: u32) -> JobSpec {
    let tensors = synthetic::kinds_and_large(&adamw());
    JobSpec { min_servers: 3, replicas, ..job(name, 2, adamw(), tensors) }
}

/// The hash of an undisturbed run.
async fn calm(address: &str) -> String {
    let run = Training { steps: STEPS, ..Training::new(spec("calm", 1)) };
    run.run(address).await.unwrap().hash
}

/// The next step after a step has ended in this way: it is run again if it was aborted, and that of
/// the checkpoint follows if the job was restored.
fn next(step: u64, ended: Result<(), Error>) -> u64 {
    match ended {
        // It was decided, and this rank has sent it once more.
        Ok(()) | Err(Error::StepMismatch { .. }) => step + 1,
        Err(Error::StepAborted { .. }) => step,
        Err(Error::RolledBack { version, .. }) => version,
        Err(error) => panic!("step {step}: {error}"),
    }
}

/// Makes the steps from `step` on.
async fn train_from(job: &Job, mut step: u64) {
    while step < STEPS {
        step = next(step, training::step(job, step).await.map(drop));
    }
}

/// Makes a step, as often as it is aborted.
async fn repeat(job: &Job, step: u64) {
    while next(step, training::step(job, step).await.map(drop)) == step {}
}

/// Finishes an attempt at step 1 that was begun, and makes the steps that follow.
async fn train_on(job: &Job, attempt: &Attempt, phase: Phase) {
    train_from(job, next(1, phase::finish(job, attempt, phase).await)).await;
}

/// Trains a job, and calls `kill` in a phase of step 1. Returns the final hash.
async fn disturb(
    cluster: &mut Cluster,
    spec: &JobSpec,
    phase: Phase,
    kill: impl FnOnce(&mut Cluster),
) -> String {
    let jobs = start(cluster.address(), spec).await;
    let [first, second] = &jobs[..] else { panic!("two ranks") };
    tokio::join!(repeat(first, 0), repeat(second, 0));
    if spec.checkpoints.is_some() {
        first.save(1).await.unwrap();
    }
    // Rank 1 is one phase behind rank 0, which waits for it.
    let behind = if phase == Phase::Decided { Phase::Sent } else { Phase::Begun };
    let one = phase::begin(first, 1, phase).await.unwrap();
    let other = phase::begin(second, 1, behind).await.unwrap();
    match phase {
        Phase::Begun | Phase::HalfSent | Phase::Sent => {
            kill(cluster);
            tokio::join!(train_on(first, &one, phase), train_on(second, &other, behind));
        }
        Phase::Voted => {
            let later = async {
                until_commits_wait(cluster, 1).await;
                kill(cluster);
                train_on(second, &other, behind).await;
            };
            tokio::join!(train_on(first, &one, phase), later);
        }
        Phase::Decided => {
            let (decided, also) = tokio::join!(
                phase::finish(first, &one, phase),
                phase::finish(second, &other, behind)
            );
            decided.and(also).unwrap();
            kill(cluster);
            tokio::join!(train_from(first, 2), train_from(second, 2));
        }
    }
    let hash = first.state_hash(STEPS).await.unwrap();
    tokio::try_join!(first.leave(), second.leave()).unwrap();
    hash
}

fn replace_shard(cluster: &mut Cluster) {
    cluster.shards[0].kill();
    cluster.shards[0] = Cluster::shard(cluster.address(), &[]);
}

fn replace_coordinator(cluster: &mut Cluster) {
    let address = cluster.address().to_owned();
    cluster.coordinator.kill();
    cluster.coordinator = Cluster::coordinator_at(&address);
}

#[tokio::test]
async fn a_server_with_a_backup_is_killed_in_each_phase() {
    for phase in Phase::ALL {
        let mut cluster = Cluster::start(3);
        let expected = calm(cluster.address()).await;
        let spec = spec("server", 2);
        assert_eq!(disturb(&mut cluster, &spec, phase, replace_shard).await, expected, "{phase}");
        until_redundant(&cluster.coordinator, "server").await;
    }
}

#[tokio::test]
async fn the_coordinator_is_killed_in_each_phase() {
    for phase in Phase::ALL {
        let mut cluster = Cluster::start(3);
        let expected = calm(cluster.address()).await;
        let spec = spec("coordinator", 1);
        let found = disturb(&mut cluster, &spec, phase, replace_coordinator).await;
        assert_eq!(found, expected, "{phase}");
    }
}

#[tokio::test]
async fn the_coordinator_and_a_server_are_killed_in_each_phase() {
    for phase in Phase::ALL {
        let mut cluster = Cluster::start(3);
        let expected = calm(cluster.address()).await;
        let kill = |cluster: &mut Cluster| {
            cluster.shards[0].kill();
            replace_coordinator(cluster);
            cluster.shards[0] = Cluster::shard(cluster.address(), &[]);
        };
        let found = disturb(&mut cluster, &spec("both", 2), phase, kill).await;
        assert_eq!(found, expected, "{phase}");
        until_redundant(&cluster.coordinator, "both").await;
    }
}

#[tokio::test]
#[cfg_attr(not(feature = "long"), ignore = "it takes a minute; `tests/run long` runs it")]
async fn a_server_without_a_backup_is_killed_in_each_phase_and_the_job_restored() {
    for phase in Phase::ALL {
        let (mut cluster, directory) = (Cluster::start(4), directory());
        let expected = calm(cluster.address()).await;
        let checkpoints = Some(policy(directory.path(), 1));
        let spec = JobSpec { checkpoints, ..spec("restored", 1) };
        let kill = |cluster: &mut Cluster| cluster.shards[0].kill();
        assert_eq!(disturb(&mut cluster, &spec, phase, kill).await, expected, "{phase}");
    }
}

#[tokio::test]
async fn a_server_and_the_coordinator_stand_still_in_each_phase() {
    let mut runs = Vec::new();
    for &seconds in STILL {
        for phase in Phase::ALL {
            for server in [true, false].into_iter().take(if seconds < 30 { 2 } else { 1 }) {
                // All clusters are started before the first run begins: a start blocks the thread.
                let mut cluster = Cluster::start(3);
                let run = async move {
                    let expected = calm(cluster.address()).await;
                    let stand_still = |cluster: &mut Cluster| {
                        let process =
                            if server { &cluster.shards[0] } else { &cluster.coordinator };
                        process.stand_still(Duration::from_secs(seconds));
                    };
                    let found = disturb(&mut cluster, &spec("still", 2), phase, stand_still).await;
                    assert_eq!(found, expected, "{phase}, server: {server}, {seconds} s");
                };
                runs.push(run);
            }
        }
    }
    join_all(runs).await;
}

/// Starts rank 1 in a process of its own. Returns when it has reached the phase.
async fn paused_rank(address: &str, name: &str, phase: Phase) -> Child {
    paused(address, name, 1, phase).await
}

/// Like [`paused_rank`], for any rank.
pub(crate) async fn paused(address: &str, name: &str, rank: u32, phase: Phase) -> Child {
    let mut command = Command::new(binary("paused-rank"));
    command.args([address, name, &rank.to_string(), &phase.to_string()]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        line
    });
    assert_eq!(line.await.unwrap(), format!("{phase}\n"));
    child
}

#[tokio::test]
async fn a_worker_is_killed_in_each_phase() {
    let cluster = Cluster::start(3);
    let expected = calm(cluster.address()).await;
    let address = cluster.address();
    for phase in Phase::ALL {
        let name = format!("worker.{phase}");
        connect(address).await.create_job(&spec(&name, 1)).await.unwrap();
        let first = connect(address).await.join(&name, 0).await.unwrap();
        first.initialise(synthetic::parameters(&first.spec().manifest)).await.unwrap();
        let paused = paused_rank(address, &name, phase);
        let begun = async {
            repeat(&first, 0).await;
            if phase == Phase::Decided {
                repeat(&first, 1).await;
            }
        };
        let (mut worker, ()) = tokio::join!(paused, begun);
        if phase == Phase::Voted {
            until_commits_wait(&cluster, 1).await;
        }
        worker.kill().unwrap();
        worker.wait().unwrap();
        let again = async {
            let second = connect(address).await.join(&name, 1).await.unwrap();
            train_from(&second, second.version().unwrap()).await;
            second
        };
        let next = if phase == Phase::Decided { 2 } else { 1 };
        let ((), second) = tokio::join!(train_from(&first, next), again);
        assert_eq!(first.state_hash(STEPS).await.unwrap(), expected, "{phase}");
        tokio::try_join!(first.leave(), second.leave()).unwrap();
    }
}
