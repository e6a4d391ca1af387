//! Whole clusters with their gRPC stack on a simulated network, by seed: the coordinator, shard
//! servers and clients of production, HTTP/2, deadlines and reconnections, while processes end,
//! hosts lose each other, and messages are late. Each run must end with the reports and the hash of
//! an undisturbed one, and a reader must have the values of the undisturbed run at each version.
//!
//! A seed decides about faults and delays. The order of tasks that are woken at the same instant is
//! random in tokio, so a run that fails prints its events, and may have to be repeated more than
//! once to fail again. `SIMULATION_SEEDS` is the number of seeds, and `SIMULATION_SEED` a single
//! one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod cluster;
mod faults;
mod reader;
mod worker;

use std::{env, time::Duration};

use cluster::{Log, Seen, Size, World};

/// The number of runs without `SIMULATION_SEEDS`.
const SEEDS: u64 = 100;

fn variable(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}")))
}

fn size(seed: u64) -> Size {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x517E);
    let servers = rng.usize(2..4);
    Size { servers, replicas: rng.u32(1..3), world: rng.u32(1..3) }
}

/// Runs a seed. Returns what the workers have seen, and all events.
fn run(seed: u64, disturbed: bool) -> (Seen, Log) {
    World::new(size(seed), seed, disturbed).run()
}

#[test]
fn runs_with_faults_end_like_an_undisturbed_run() {
    let seeds = match variable("SIMULATION_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("SIMULATION_SEEDS").unwrap_or(SEEDS),
    };
    let (runs, mut changed) = (seeds.clone().count() as u64, 0);
    for seed in seeds {
        let (expected, _) = run(seed, false);
        let (found, log) = run(seed, true);
        // A rank that has lost its lease does not receive the report of a step that was decided.
        assert!(found.hash.is_some(), "{}SIMULATION_SEED={seed}", log.text());
        let other = found.reports.iter().find(|(step, report)| expected.reports[step] != **report);
        let is_same = other.is_none() && found.hash == expected.hash;
        assert!(is_same, "{}{other:?}, {:?}\nSIMULATION_SEED={seed}", log.text(), found.hash);
        let differs = |(version, hash): &(&u64, &u64)| {
            expected.versions.get(version).is_some_and(|expected| expected != *hash)
        };
        let other = found.versions.iter().find(differs);
        assert!(other.is_none(), "{}reader: {other:?}\nSIMULATION_SEED={seed}", log.text());
        changed += found.changed;
    }
    // A reader that only copies shows little.
    assert!(runs < 20 || changed >= runs, "{changed} versions came as changes in {runs} runs");
}

/// The virtual time in which a run must end.
const LIMIT: Duration = Duration::from_secs(900);
