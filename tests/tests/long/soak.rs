//! Ten minutes of random faults every few seconds: processes are killed or stand still, and etcd
//! is restarted. The run ends with the losses and the hash of an undisturbed one, and the memory of
//! the processes that are never killed does not grow. `SOAK_SECONDS` and `CHAOS_SEED` change it.
//!
//! promise: durability

use std::{
    thread,
    time::{Duration, Instant},
};

use zeroshard_tests::Process;

use crate::disturbed::{Random, Run, SERVERS, calm, seed};

/// The number of steps for the estimate of their duration.
const SAMPLE: u64 = 100;
/// The factor by which the faults slow a run down, as measured on two cores.
const SLOWDOWN: f64 = 1.4;
/// The growth of memory from the first to the last third of the run that is allowed: fragmentation,
/// and the buffers of connections that are opened anew.
const GROWTH: f64 = 1.2;
const MORE_BYTES: u64 = 16 << 20;

/// The memory of processes that are only stopped, and never killed.
#[derive(Default)]
struct Memory {
    server: Vec<u64>,
    worker: Vec<u64>,
}

impl Memory {
    fn sample(&mut self, run: &Run) {
        self.server.push(run.shards[0].memory());
        self.worker.push(Process::memory_of(run.workers[0].id()));
    }

    fn check(&self) {
        assert!(self.server.len() >= 6, "the run is too short: {} samples", self.server.len());
        for (name, samples) in [("server 0", &self.server), ("worker 0", &self.worker)] {
            let third = samples.len() / 3;
            let peak = |samples: &[u64]| *samples.iter().max().expect("there are samples");
            let (first, last) = (peak(&samples[..third]), peak(&samples[samples.len() - third..]));
            eprintln!("{name}: {} MB at first, {} MB at last", first >> 20, last >> 20);
            let limit = (first as f64 * GROWTH) as u64 + MORE_BYTES;
            assert!(last <= limit, "the memory of {name} has grown: {samples:?}");
        }
    }
}

fn disturb(run: &mut Run, random: &mut Random) {
    let pause = Duration::from_millis(500 + random.below(4500));
    let Some(leader) = run.leader() else { return };
    match random.below(10) {
        0 => run.kill_coordinator(leader, None),
        1 => run.kill_coordinator((leader + 1) % 3, None),
        2 | 3 => run.kill_server(1 + random.below(SERVERS as u64 - 1) as usize),
        4 => run.kill_worker(1),
        5 => {
            run.say(&format!("the leader stands still for {pause:?}"));
            run.coordinators[leader].stand_still(pause);
        }
        6 | 7 => {
            let server = random.below(SERVERS as u64) as usize;
            run.say(&format!("server {server} stands still for {pause:?}"));
            run.shards[server].stand_still(pause);
        }
        8 => {
            run.say(&format!("worker 0 stands still for {pause:?}"));
            Process::stand_still_for(run.workers[0].id(), pause);
        }
        _ => {
            run.say("etcd is restarted");
            run.etcd.as_mut().expect("the coordinators are elected").restart();
        }
    }
}

#[test]
fn soak_ends_with_the_hash_of_an_undisturbed_run_and_with_flat_memory() {
    let seconds = std::env::var("SOAK_SECONDS").map_or(600.0, |text| text.parse().unwrap());
    // The first run builds the programs.
    calm(1);
    let began = Instant::now();
    calm(SAMPLE);
    let step = began.elapsed().as_secs_f64() / SAMPLE as f64;
    let steps = (seconds / step / SLOWDOWN).max(SAMPLE as f64) as u64;
    eprintln!("a step takes {step:.3} s; the run has {steps} steps");
    let (expected, mut random, mut memory) = (calm(steps), seed(), Memory::default());
    let mut run = Run::start_elected(steps);
    let mut faults = 0;
    loop {
        // A fault begins when the last one is over.
        run.until_step(run.step().unwrap_or_default() + 1);
        memory.sample(&run);
        if run.step() >= Some(steps - 20) {
            break;
        }
        thread::sleep(Duration::from_millis(random.below(3000)));
        disturb(&mut run, &mut random);
        faults += 1;
    }
    eprintln!("{faults} faults");
    run.end(&expected);
    memory.check();
}
