//! Servers, workers and the coordinator are killed at random moments of a run with replicas. It
//! ends with the losses and the hash of an undisturbed run. `CHAOS_SEED` chooses the moments.
//!
//! promise: durability

use std::{thread, time::Duration};

use crate::disturbed::{Run, SERVERS, calm, seed};

#[test]
fn chaos_kills_any_process_ten_times_in_a_run() {
    const STEPS: u64 = 300;
    let (expected, mut random) = (calm(STEPS), seed());
    let mut run = Run::start(STEPS);
    for kill in 0..10 {
        run.until_step(kill * 28 + 1 + random.below(25));
        // Within a step or between two.
        thread::sleep(Duration::from_millis(random.below(200)));
        match random.below(6) {
            0 => run.kill_coordinator(0, None),
            rank @ 1..=2 => run.kill_worker(rank as u32 - 1),
            server => run.kill_server(server as usize - 3),
        }
    }
    run.end(&expected);
}

#[test]
fn chaos_kills_the_coordinator_and_a_server_at_the_same_instant_in_twenty_runs() {
    const STEPS: u64 = 20;
    let (expected, mut random) = (calm(STEPS), seed());
    for _ in 0..20 {
        let mut run = Run::start(STEPS);
        run.until_step(random.below(15));
        thread::sleep(Duration::from_millis(random.below(200)));
        run.kill_coordinator(0, Some(random.below(SERVERS as u64) as usize));
        run.end(&expected);
    }
}
