//! Sends invalid input to every RPC of the shipped binaries, and checks that no process panics, no
//! call outlives its deadline, errors are typed and short, another job is not disturbed, and no
//! process uses more memory or files in the end.
//!
//! The messages are generated from the descriptors of the protocol, so that future fields and calls
//! are covered. `tests/run` runs this test for 40 s, and `tests/run long` runs it for half an
//! hour. `LIVE_FUZZ_SECONDS` sets the duration, and `LIVE_FUZZ_SEED` sets the seed. The input of a
//! call depends on the seed, its number, and the current ids and steps of the jobs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod call;
mod counts;
mod facts;
mod generate;
mod guarded;
mod input;
mod jobs;
mod judge;
mod lanes;
mod mutate;
mod schema;
mod valid;
mod workers;

use std::{collections::BTreeSet, env, time::Duration};

use prost_reflect::{DynamicMessage, Kind, MessageDescriptor, Value};
use tokio_util::sync::CancellationToken;
use zeroshard_tests::Bystander as Status;

use facts::{Facts, Member};
use generate::Generator;
use guarded::{Guarded, Usage};
use input::{Input, Target};
use lanes::Fuzz;
use schema::Server;

/// The share of the duration after which the first measurement is made.
const WARM_UP: f64 = 0.3;
/// The maximum number of steps of the bystander. All of them are repeated at the end.
const STEPS: f64 = 6000.0;
/// The permitted growth of memory, because of fragmentation: a factor, and a number of bytes.
const GROWTH: f64 = 1.15;
const MORE_BYTES: u64 = 16 << 20;
/// The permitted growth of the number of open files, because connections may still be closing.
const MORE_FILES: usize = 16;

fn variable(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap())
}

// promise: invalid-input, isolation
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 40 s or more; tests/run runs it"]
async fn servers_withstand_invalid_input_to_every_call_without_leaks() {
    let seconds = variable("LIVE_FUZZ_SECONDS", 60);
    let seed = variable("LIVE_FUZZ_SEED", 1);
    eprintln!("LIVE_FUZZ_SEED={seed} LIVE_FUZZ_SECONDS={seconds}");
    let mut guarded = Guarded::start();
    let address = guarded.cluster.address().to_owned();
    let pause = Duration::from_secs_f64((seconds as f64 / STEPS).max(0.005));
    let bystander = jobs::Bystander::start(&address, pause).await;
    let status = Status::start_with(&address, jobs::options());
    let url = format!("file://{}/checkpoints", guarded.directory.path().display());
    let facts = Facts::new(bystander.member(), url).following(bystander.version.clone());
    let mirror = Target { address: guarded.mirror(), serves: Server::Mirror, number: 0 };
    let targets = targets(&guarded).into_iter().chain([mirror]).collect();
    let mut fuzz = Fuzz::new(seed, facts, targets);
    let beginning = guarded.usage_with_a_job().await;

    let stop = CancellationToken::new();
    let warm = Duration::from_secs_f64(seconds as f64 * WARM_UP);
    let disturb = async {
        fuzz.run(warm).await;
        let before = at_rest(&guarded, &bystander, &beginning).await;
        fuzz.run(Duration::from_secs(seconds).saturating_sub(warm)).await;
        fuzz.counts.print();
        let after = at_rest(&guarded, &bystander, &beginning).await;
        stop.cancel();
        (before, after)
    };
    let (usage, ()) = tokio::join!(disturb, bystander.train(&stop));
    guarded.assert_alive();
    status.finish("calls with invalid input");
    check(&usage.0, &usage.1);
    fuzz.counts.check();
    bystander.check(&address).await;
    guarded.assert_alive();
}

#[test]
fn an_input_depends_only_on_the_seed_its_number_and_the_facts() {
    let (calls, facts) =
        (schema::calls(&schema::pool()), Facts::new(Member::default(), "f".into()));
    let of = Target { address: String::new(), serves: Server::Shard, number: 0 };
    let input = |seed, number| {
        let mut input = Input::new(seed, number, &calls, &of, &facts);
        // Entries of a map have a random order in the bytes of a message.
        input.frames.iter_mut().for_each(|frame| frame.sort_unstable());
        format!("{input:?}")
    };
    let inputs: BTreeSet<String> = (0..200).map(|number| input(7, number)).collect();
    assert!((0..200).all(|number| inputs.contains(&input(7, number))));
    assert!((0..200).filter(|&number| inputs.contains(&input(8, number))).count() < 100);
}

#[test]
fn every_field_of_every_message_is_set_by_some_input() {
    fn fields_of(message: &MessageDescriptor, found: &mut BTreeSet<String>) {
        for field in message.fields() {
            if found.insert(field.full_name().to_owned())
                && let Kind::Message(inner) = field.kind()
                && !field.is_map()
            {
                fields_of(&inner, found);
            }
        }
    }
    fn fields_in(message: &DynamicMessage, found: &mut BTreeSet<String>) {
        for (field, value) in message.fields() {
            found.insert(field.full_name().to_owned());
            match value {
                Value::Message(inner) => fields_in(inner, found),
                Value::List(items) => {
                    items.iter().filter_map(Value::as_message).for_each(|of| fields_in(of, found));
                }
                _ => {}
            }
        }
    }
    let facts = Facts::new(Member::default(), "file:///directory".to_owned());
    let (mut all, mut set) = (BTreeSet::new(), BTreeSet::new());
    for rpc in schema::calls(&schema::pool()) {
        fields_of(&rpc.method.input(), &mut all);
        let random = fastrand::Rng::with_seed(1);
        let member = Member {
            job: "job".to_owned(),
            job_id: 1,
            rank: 2,
            lease: 3,
            world: 4,
            epoch: 5,
            version: 6,
            attempt: 7,
            slices: Vec::new(),
            shapes: Vec::new(),
        };
        let mut generator = Generator { random, member, facts: &facts };
        for _ in 0..2000 {
            for mut message in generator.messages(&rpc, 0) {
                generator.mutate(&mut message);
                fields_in(&message, &mut set);
            }
        }
    }
    let missing: Vec<_> = all.difference(&set).collect();
    assert!(
        all.len() > 200 && missing.is_empty(),
        "of {} fields, these are never set: {missing:?}",
        all.len()
    );
}

/// The processes that are called.
fn targets(guarded: &Guarded) -> Vec<Target> {
    let target = |serves, number, of: &zeroshard_tests::Process| {
        let address = of.address().to_owned();
        Target { address, serves, number }
    };
    let cluster = &guarded.cluster;
    let shards = cluster.shards.iter().enumerate();
    let shards = shards.map(|(number, shard)| target(Server::Shard, number, shard));
    let coordinator = target(Server::Coordinator, 0, &cluster.coordinator);
    // The coordinator is listed twice, because it serves most of the RPCs.
    [coordinator.clone(), coordinator].into_iter().chain(shards).collect()
}

async fn at_rest(
    guarded: &Guarded,
    bystander: &jobs::Bystander,
    beginning: &[Usage],
) -> Vec<Usage> {
    let _no_step = bystander.step.lock().await;
    guarded.rest(beginning).await
}

/// Asserts that no process uses more memory or files than before.
fn check(before: &[Usage], after: &[Usage]) {
    for (before, after) in before.iter().zip(after) {
        let (process, mib) = (before.process, |bytes: u64| bytes >> 20);
        let (was, is) = (before.memory, after.memory);
        let files = (before.files, after.files);
        eprintln!(
            "{process}: {} MiB after the warm-up, {} MiB at the end; {} and {} open files",
            mib(was),
            mib(is),
            files.0,
            files.1
        );
        assert!(
            is <= (was as f64 * GROWTH) as u64 + MORE_BYTES,
            "the memory of {process} has grown"
        );
        assert!(files.1 <= files.0 + MORE_FILES, "the open files of {process} have grown");
    }
}
