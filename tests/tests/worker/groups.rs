//! Workers that add their gradients before they push them (`--group`).
//!
//! promise: same-bits

use serde_json::Value;
use zeroshard_tests::Cluster;

use crate::{hash, process::Worker, start, train};

const FLAGS: &str = "--batch 8 --context 16 --width 32 --blocks 2 --sample-chars 0 --clip 0.5 \
                     --loss-scale 1024";
/// All levels, and one, three and seven servers.
const CLUSTERS: [&str; 3] =
    ["--level os --shards 1", "--level os_g --shards 3", "--level p_g_os --shards 7"];

fn losses(lines: &[Value]) -> Vec<f64> {
    lines.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// Asserts that the losses differ only by the order of additions.
fn assert_near(found: &[Value], alone: &[Value]) {
    let pairs = losses(found).into_iter().zip(losses(alone));
    let worst = pairs.map(|(found, alone)| (found / alone - 1.0).abs()).fold(0.0, f64::max);
    println!("losses differ by {worst:.1e} at most");
    assert!(worst <= 1e-6);
}

#[test]
fn one_group_has_the_hash_and_the_losses_of_workers_that_push_alone() {
    for workers in [2, 4] {
        let flags = format!("{FLAGS} --steps 20 --workers {workers}");
        let alone = train(&flags);
        for cluster in CLUSTERS {
            let found = train(&format!("{flags} --group {workers} {cluster}"));
            assert_eq!(hash(&found), hash(&alone), "{workers} workers, {cluster}");
            assert_eq!(losses(&found), losses(&alone), "{workers} workers, {cluster}");
        }
    }
}

#[test]
fn two_groups_have_the_same_hash_on_any_number_of_servers_and_at_all_levels() {
    let flags = format!("{FLAGS} --steps 20 --workers 4");
    let alone = train(&flags);
    let found = CLUSTERS.map(|cluster| train(&format!("{flags} --group 2 {cluster}")));
    for lines in &found {
        assert_eq!(hash(lines), hash(&found[0]));
        assert_near(lines, &alone);
    }
}

/// Two replicas, each sharded over two workers, which add the gradients of what both hold.
#[test]
#[cfg_attr(not(feature = "long"), ignore = "it takes half a minute; `tests/run long` runs it")]
fn tensor_parallel_workers_in_one_group_have_the_hash_of_those_that_push_alone() {
    for sequence in ["", "--sequence-parallel"] {
        let flags = format!("{FLAGS} --steps 20 --workers 4 --tensor-parallel 2 {sequence}");
        let alone = train(&flags);
        for cluster in CLUSTERS {
            let found = train(&format!("{flags} --group 4 {cluster}"));
            assert_eq!(hash(&found), hash(&alone), "{cluster} {sequence}");
            assert_eq!(losses(&found), losses(&alone), "{cluster} {sequence}");
        }
        // A group is a replica. Without sequence parallelism, its workers add nothing.
        let pairs = CLUSTERS.map(|cluster| train(&format!("{flags} --group 2 {cluster}")));
        for found in &pairs {
            assert_eq!(hash(found), hash(&pairs[0]));
            assert_near(found, &alone);
        }
        assert_eq!(hash(&pairs[0]) == hash(&alone), sequence.is_empty());
    }
}

#[test]
fn values_are_rounded_on_the_wire_as_without_groups() {
    let flags = format!("{FLAGS} --steps 10 --workers 2 --wire bf16 --micro-batches 2");
    assert_eq!(hash(&train(&format!("{flags} --group 2"))), hash(&train(&flags)));
}

#[test]
fn int8_has_the_same_hash_on_any_number_of_servers_and_at_all_levels() {
    let wires = "--wire int8 --parameter-wire int8 --micro-batches 2";
    let flags = format!("{FLAGS} --steps 20 --workers 4 {wires}");
    let exact = train(&format!("{FLAGS} --steps 20 --workers 4 --micro-batches 2"));
    for group in [1, 2] {
        let found = CLUSTERS.map(|cluster| train(&format!("{flags} --group {group} {cluster}")));
        for lines in &found {
            assert_eq!(hash(lines), hash(&found[0]), "groups of {group}");
            assert_eq!(losses(lines), losses(&found[0]), "groups of {group}");
            let pairs = losses(lines).into_iter().zip(losses(&exact));
            for (loss, exact) in pairs {
                assert!((loss / exact - 1.0).abs() < 0.01, "{loss} {exact}");
            }
        }
    }
}

#[test]
fn the_servers_receive_one_nth_of_the_bytes() {
    let cluster = Cluster::start(2);
    let received = |group: u32| {
        let address = cluster.address();
        let flags = format!("{FLAGS} --address {address} --job {group} --shards 2 --workers 4");
        // The first run uploads the parameters.
        train(&format!("{flags} --steps 1 --group {group}"));
        let [_, before] = cluster.payload();
        train(&format!("{flags} --steps 4 --group {group}"));
        (cluster.payload()[1] - before) as f64
    };
    let alone = received(1);
    for group in [2, 4] {
        let ratio = received(group) * f64::from(group) / alone;
        assert!((ratio - 1.0).abs() < 0.02, "groups of {group}: {ratio}");
    }
}

#[test]
fn a_group_trains_on_when_a_server_is_killed_and_ends_with_the_same_hash() {
    let flags = format!("{FLAGS} --steps 60 --workers 2 --group 2 --replicas 2");
    let expected = hash(&train(&format!("{flags} --shards 2")));
    let mut cluster = Cluster::start(3);
    let mut workers = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags));
    for (server, step) in [(0, 15), (1, 30)] {
        workers[0].until_step(step);
        cluster.shards[server].kill();
        cluster.shards.push(Cluster::shard(cluster.address(), &[]));
    }
    let [first, _] = workers.map(Worker::rest);
    assert_eq!(hash(&first), expected);
}

#[test]
fn a_group_that_has_lost_a_worker_is_started_again_while_the_other_group_waits() {
    let flags = format!("{FLAGS} --steps 60 --workers 4 --group 2");
    let expected = hash(&train(&flags));
    let cluster = Cluster::start(2);
    let start = |rank| Worker::start(&cluster, rank, &flags);
    let [mut first, second, third, mut fourth] = [0, 1, 2, 3].map(start);
    first.until_step(20);
    fourth.kill();
    let failure = third.failure();
    assert!(failure.contains("rank 3") && failure.contains("start all of them again"), "{failure}");
    let restarted = [2, 3].map(start);
    let lines = first.rest();
    assert_eq!(hash(&lines), expected);
    second.rest();
    for worker in restarted {
        worker.rest();
    }
}

#[test]
fn a_group_size_that_does_not_divide_the_number_of_workers_is_refused() {
    let output = start("--workers 4 --group 3");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let message = "--group is 3; expected a divisor of the number of workers, 4";
    assert!(!output.status.success() && text.contains(message), "{text}");
}
