//! Runs by seed.

use std::{
    collections::{BTreeMap, HashMap},
    env,
    num::NonZero,
    ops::Range,
    panic::catch_unwind,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use zeroshard_model::Line;
use zeroshard_shard::job::Safeguard::{Confirmation, Fence, Ledger};

use super::{
    faults::Faults,
    reader::Shown,
    record::Record,
    safeguard::{Safeguard, without},
    world::{Size, World},
};

/// The number of runs without the environment variable `SIMULATION_SEEDS`.
const SEEDS: u64 = if cfg!(debug_assertions) { 2000 } else { 5000 };
/// The number of runs with two coordinators. With optimisation, a run takes 8 ms of one core.
const PAIR_SEEDS: u64 = if cfg!(debug_assertions) { 250 } else { 1000 };
const STEPS: u64 = 6;
/// The number of failed runs after which no more are begun.
const FAILURES: usize = 20;

/// Returns the record of an undisturbed run with this number of ranks and these skipped batches.
fn undisturbed(world: u32, line: &Line) -> Record {
    type Key = (u32, Vec<Range<u64>>);
    static KNOWN: Mutex<Option<HashMap<Key, Record>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (world, line.skips().to_vec());
    let record = known.get_or_insert_default().entry(key).or_insert_with(|| {
        let size = Size {
            servers: 1,
            replicas: 1,
            world,
            steps: STEPS,
            readers: 0,
            has_mirror: false,
            save_every: Some(1),
        };
        let run = World::new(size, 0, Faults::default(), Record::default());
        let run = run.along(line.clone()).logged();
        run.run().unwrap_or_else(|failure| panic!("undisturbed: {failure}"))
    });
    record.clone()
}

fn size(seed: u64) -> Size {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x512E);
    let servers = rng.usize(1..5);
    let replicas = rng.u32(1..4).min(servers as u32);
    let world = rng.u32(1..4);
    let save_every = [None, None, Some(1), Some(2)][rng.usize(..4)];
    let readers = [0, 0, 0, 0, 1, 1, 1, 2][rng.usize(..8)];
    let has_mirror = readers == 2 && rng.bool();
    let readers = readers + usize::from(has_mirror && rng.u32(..4) == 0);
    Size { servers, replicas, world, steps: STEPS, readers, has_mirror, save_every }
}

fn world(seed: u64) -> World {
    let size = size(seed);
    World::new(size, seed, Faults::of(size, seed), undisturbed(size.world, &Line::default()))
}

/// A run with two coordinators.
fn pair(seed: u64) -> World {
    let size = size(seed);
    World::new(size, seed, Faults::of_pair(size, seed), undisturbed(size.world, &Line::default()))
}

fn variable(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}")))
}

/// What a number of runs has shown.
#[derive(Debug, Default)]
struct Runs {
    /// The number of runs that have ended as they must.
    ended: u64,
    /// The number of those in which two coordinators have decided about steps.
    with_two_deciders: u64,
    /// The number of those that have ended on a later line, and of those that have skipped batches.
    on_other_lines: u64,
    with_other_batches: u64,
    /// The number of those in which a reader has shown a version, and in which it has received
    /// changes.
    with_readers: u64,
    with_changes: u64,
    /// What readers have shown.
    shown: Shown,
    /// What has failed, by seed.
    failures: BTreeMap<u64, String>,
}

impl Runs {
    fn add(&mut self, seed: u64, outcome: Result<Record, String>) {
        match outcome {
            Ok(record) => {
                self.ended += 1;
                self.with_two_deciders += u64::from(record.deciders > 1);
                self.on_other_lines += u64::from(record.line.number > 0);
                self.with_other_batches += u64::from(!record.line.skips().is_empty());
                self.with_readers += u64::from(!record.shown.copied.is_empty());
                self.with_changes += u64::from(record.shown.changed > 0);
                self.shown.add(&record.shown);
            }
            Err(failure) => _ = self.failures.insert(seed, failure),
        }
    }

    fn merge(mut self, other: Self) -> Self {
        self.ended += other.ended;
        self.with_two_deciders += other.with_two_deciders;
        self.on_other_lines += other.on_other_lines;
        self.with_other_batches += other.with_other_batches;
        self.with_readers += other.with_readers;
        self.with_changes += other.with_changes;
        self.shown.add(&other.shown);
        self.failures.extend(other.failures);
        self
    }
}

/// Runs a seed without a log, and compares it with an undisturbed run of the same batches. A panic
/// is a failure, too.
fn outcome(seed: u64, world: fn(u64) -> World) -> Result<Record, String> {
    let run = || {
        let record = world(seed).run()?;
        record.compare(&undisturbed(size(seed).world, &record.line))?;
        Ok(record)
    };
    catch_unwind(run).unwrap_or_else(|_| Err("it has panicked".to_owned()))
}

/// Runs the seeds on all processors, until some have failed.
fn run(seeds: Range<u64>, world: fn(u64) -> World) -> Runs {
    let next = AtomicU64::new(seeds.start);
    let failed = AtomicUsize::new(0);
    let work = || {
        let mut runs = Runs::default();
        while failed.load(Ordering::Relaxed) < FAILURES {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if !seeds.contains(&seed) {
                break;
            }
            let outcome = outcome(seed, world);
            failed.fetch_add(usize::from(outcome.is_err()), Ordering::Relaxed);
            runs.add(seed, outcome);
        }
        runs
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let all = all.into_iter().map(|one| one.join().expect("panics of runs are caught"));
        all.fold(Runs::default(), Runs::merge)
    })
}

// promise: atomic-steps, exactly-once, durability, consistent-reads
#[test]
fn runs_with_faults_show_what_an_undisturbed_run_shows() {
    let seeds = match variable("SIMULATION_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("SIMULATION_SEEDS").unwrap_or(SEEDS),
    };
    let Runs { ended, with_readers, with_changes, shown, .. } =
        check(seeds, world, "SIMULATION_SEED");
    eprintln!(
        "{with_readers} runs have had readers, {with_changes} of them with changes: {shown:?}"
    );
    // Runs in which readers only copy show little.
    assert!(ended < 100 || with_readers > ended / 3 && with_changes > with_readers / 2);
    // There are five reasons for a copy.
    assert!(ended < 1000 || shown.completed > 0 && shown.copied.len() == 5);
    assert!(ended < 1000 || shown.mirrored > ended / 20 && shown.lies > ended / 50);
}

// promise: atomic-steps
/// Two coordinators without an election (in one of eight runs with one) never both decide about a
/// step, and the run goes on with the one that stays.
#[test]
fn of_two_coordinators_at_most_one_decides_about_a_step() {
    let seeds = match variable("SIMULATION_PAIR_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("SIMULATION_PAIR_SEEDS").unwrap_or(PAIR_SEEDS),
    };
    let runs = check(seeds, pair, "SIMULATION_PAIR_SEED");
    let Runs { ended, with_two_deciders, .. } = runs;
    // Runs in which only one coordinator ever decides show nothing.
    assert!(ended < 100 || with_two_deciders >= ended / 10, "{with_two_deciders} of {ended}");
}

/// Runs the seeds. `variable` names the one that repeats a run.
///
/// # Panics
/// If runs fail. The message has their seeds, and everything that has happened in one of them.
fn check(seeds: Range<u64>, world: fn(u64) -> World, variable: &str) -> Runs {
    let runs = run(seeds, world);
    let Runs { ended, with_two_deciders, on_other_lines, with_other_batches, .. } = runs;
    eprintln!(
        "{ended} runs have ended; in {with_two_deciders} of them two coordinators decided, \
         {on_other_lines} were rolled back or rewound, {with_other_batches} with other batches"
    );
    let Some((first, _)) = runs.failures.first_key_value() else { return runs };
    let log = world(*first).logged().run().expect_err("the same run fails again");
    let list = runs.failures.iter().map(|(seed, failure)| format!("{variable}={seed}: {failure}"));
    panic!("{log}\n{}", list.collect::<Vec<_>>().join("\n"));
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
    type Start = fn(u64) -> World;
    let all: [(Safeguard, Start); 10] = [
        (Safeguard::State(Fence), world),
        (Safeguard::State(Ledger), world),
        (Safeguard::State(Confirmation), world),
        (Safeguard::UserData, world),
        (Safeguard::Terms, pair),
        (Safeguard::ReadableVersion, world),
        (Safeguard::EveryStep, world),
        (Safeguard::ReaderHashes, world),
        (Safeguard::MirrorHashes, world),
        (Safeguard::ReaderLines, world),
    ];
    for (safeguard, world) in all {
        let fails = |&seed: &u64| outcome(seed, world).is_err();
        let found = without(safeguard, || (0..1000).find(fails));
        assert!(found.is_some(), "{safeguard:?}");
        eprintln!("without {safeguard:?}: a fault in run {found:?}");
    }
}
