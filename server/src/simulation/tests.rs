//! Runs by seed.

use std::{
    collections::HashMap,
    env,
    num::NonZero,
    ops::Range,
    panic::catch_unwind,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use super::{
    faults::Faults,
    record::Record,
    safeguard::{Safeguard, without},
    world::{Size, World},
};

/// The number of runs without the environment variable `SIMULATION_SEEDS`.
const SEEDS: u64 = if cfg!(debug_assertions) { 2000 } else { 5000 };
const STEPS: u64 = 6;

/// What an undisturbed run shows, by number of ranks.
fn undisturbed(world: u32) -> Record {
    static KNOWN: Mutex<Option<HashMap<u32, Record>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let record = known.get_or_insert_default().entry(world).or_insert_with(|| {
        let size = Size { servers: 1, replicas: 1, world, steps: STEPS, save_every: Some(1) };
        let run = World::new(size, 0, Faults::default(), Record::default()).logged();
        run.run().unwrap_or_else(|failure| panic!("undisturbed: {failure}"))
    });
    record.clone()
}

fn world(seed: u64) -> World {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x512E);
    let servers = rng.usize(1..5);
    let replicas = rng.u32(1..4).min(servers as u32);
    let world = rng.u32(1..4);
    let save_every = [None, None, Some(1), Some(2)][rng.usize(..4)];
    let size = Size { servers, replicas, world, steps: STEPS, save_every };
    World::new(size, seed, Faults::of(size, seed), undisturbed(size.world))
}

fn variable(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}")))
}

/// The first of these seeds with a failure, which may not be the lowest.
fn failing(seeds: Range<u64>) -> Option<u64> {
    let next = AtomicU64::new(seeds.start);
    let search = || {
        while let Some(seed) =
            Some(next.fetch_add(1, Ordering::Relaxed)).filter(|of| seeds.contains(of))
        {
            if world(seed).run().is_err() {
                next.store(seeds.end, Ordering::Relaxed);
                return Some(seed);
            }
        }
        None
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(search)).collect();
        all.into_iter().filter_map(|one| one.join().expect("no run panics")).min()
    })
}

#[test]
fn runs_with_faults_show_what_an_undisturbed_run_shows() {
    let seeds = match variable("SIMULATION_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("SIMULATION_SEEDS").unwrap_or(SEEDS),
    };
    if let Some(seed) = failing(seeds) {
        let failure = world(seed).logged().run().err();
        panic!("{}\nSIMULATION_SEED={seed} shows it again", failure.expect("the same run"));
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..10 {
        let log = || {
            let mut world = world(seed).logged();
            world.fail_at_end();
            let log = world.run().expect_err("it fails at its end");
            // The fields of messages that are maps are printed in any order.
            log.lines().map(|line| line.chars().take(60).collect()).collect::<Vec<String>>()
        };
        assert_eq!(log(), log(), "seed {seed}");
    }
}

#[test]
fn the_faults_that_safeguards_prevent_are_found() {
    // Without a safeguard, a run may end with a panic as well.
    let fails = |&seed: &u64| catch_unwind(|| world(seed).run()).map_or(true, |run| run.is_err());
    let all = [Safeguard::Fence, Safeguard::Ledger, Safeguard::Confirmation, Safeguard::UserData];
    for safeguard in all {
        let found = without(safeguard, || (0..1000).find(fails));
        assert!(found.is_some(), "{safeguard:?}");
        eprintln!("without {safeguard:?}: a fault in run {found:?}");
    }
}
