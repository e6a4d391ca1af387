//! Two processes with one server id: a copied unit file, or a pod that comes back while its old
//! process still runs.

use std::{
    sync::atomic::AtomicU64,
    time::{Duration, Instant},
};

use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Process, Training, synthetic};

use crate::{
    adamw, connect, job,
    replicas::{train, until_redundant},
    start,
};

/// The seconds for which the first process stands still.
const STOPS: &[u64] = if cfg!(feature = "long") {
    &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 25, 30, 40, 50, 60]
} else {
    &[1, 7]
};

fn spec(name: &str, replicas: u32) -> JobSpec {
    let tensors = synthetic::kinds_and_large(&adamw());
    JobSpec { min_servers: 3, replicas, ..job(name, 2, adamw(), tensors) }
}

fn named(address: &str, id: &str) -> Process {
    Cluster::shard(address, &["--id", id])
}

#[test]
fn a_server_with_the_id_of_one_that_answers_exits_and_says_why() {
    let coordinator = Cluster::coordinator();
    let first = named(coordinator.address(), "zero");
    let connected = "zeroshard_servers 1\n";
    let deadline = Instant::now() + zeroshard_tests::timeout();
    while !coordinator.get("/metrics").contains(connected) {
        assert!(Instant::now() < deadline, "the server did not register");
    }
    let address = coordinator.address();
    let second = zeroshard_tests::run(
        "zeroshard-server",
        &["shard", "--coordinator", address, "--id", "zero", "--listen", "127.0.0.1:0"]
            .into_iter()
            .chain(["--admin-listen", "off"])
            .collect::<Vec<_>>(),
    );
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success(), "{text}");
    assert!(text.contains(first.address()) && text.contains("--id"), "{text}");
    assert!(coordinator.get("/metrics").contains(connected), "the first one stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_processes_with_one_id_the_one_that_answers_stays_and_no_bit_changes() {
    const STEPS: u64 = 40;
    let calm = Cluster::start(3);
    let run = Training { steps: STEPS, ..Training::new(spec("calm", 1)) };
    let expected = run.run(calm.address()).await.unwrap().hash;
    for &seconds in STOPS {
        let coordinator = Cluster::coordinator();
        let address = coordinator.address().to_owned();
        let shards = ["a", "b", "c"].map(|id| named(&address, id));
        let jobs = start(&address, &spec("two", 2)).await;
        until_redundant(&coordinator, "two").await;
        let (one, other) = (AtomicU64::new(0), AtomicU64::new(0));
        tokio::join!(train(&jobs[0], 0..10, &one), train(&jobs[1], 0..10, &other));
        let [mut old, b, c] = shards;
        old.stand_still(Duration::from_secs(seconds));
        let mut newcomer = named(&address, "a");
        tokio::join!(train(&jobs[0], 10..STEPS, &one), train(&jobs[1], 10..STEPS, &other));
        let deadline = Instant::now() + Duration::from_secs(seconds) + zeroshard_tests::timeout();
        let (gone, stays) = loop {
            match (old.ended(), newcomer.ended()) {
                (Some(status), _) => break (status, &mut newcomer),
                (_, Some(status)) => break (status, &mut old),
                _ => assert!(Instant::now() < deadline, "after {seconds} s: both still run"),
            }
            tokio::task::yield_now().await;
        };
        assert!(!gone.success(), "after {seconds} s: {gone:?}");
        let servers = connect(&address).await.status().await.unwrap().servers;
        let known: Vec<&str> = servers.iter().map(|of| of.server.address.as_str()).collect();
        assert!(stays.ended().is_none() && known.contains(&stays.address()), "{known:?}");
        assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected, "after {seconds} s");
        drop((b, c));
    }
}
