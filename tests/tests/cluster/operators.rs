//! Tests of the commands of `zsctl` for operators: they inspect jobs, and take servers and ranks
//! out of use.

use std::process::Output;

use serde_json::Value;
use zeroshard_client::Error;
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Training, run, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, until_saved},
    connect, job,
    replicas::{step, until_redundant},
    start, until,
};

/// The exit code of a command that has found a problem.
pub(crate) const PROBLEM: i32 = 3;

pub(crate) fn zsctl(cluster: &Cluster, arguments: &[&str]) -> Output {
    run("zsctl", &[&["--address", cluster.address(), "--timeout", "30"], arguments].concat())
}

/// The JSON objects that a command prints, whatever its exit code.
pub(crate) fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The exit code of `status`, and what it prints about the only job.
pub(crate) fn status(cluster: &Cluster) -> (i32, Value) {
    let output = zsctl(cluster, &["status", "--json"]);
    let mut jobs = lines(&output).into_iter().filter(|line| line["event"] == "job");
    let job = jobs.next_back().unwrap_or_default();
    (output.status.code().unwrap(), job)
}

pub(crate) fn spec(name: &str, world: u32) -> JobSpec {
    job(name, world, adamw(), synthetic::kinds(&adamw()))
}

#[tokio::test]
async fn status_fails_and_names_the_reason_while_a_job_cannot_continue() {
    let mut cluster = Cluster::start(1);
    until("a cluster without jobs has no problem", || status(&cluster) == (0, Value::Null)).await;
    let mut jobs = start(cluster.address(), &spec("watched", 2)).await;
    let (code, shown) = status(&cluster);
    assert_eq!((code, &shown["state"], &shown["problem"]), (0, &"open".into(), &Value::Null));
    assert!(shown["waiting_for"].as_str().unwrap().contains("ranks that have not committed"));

    drop(jobs.pop());
    let is_lost = || status(&cluster).0 == PROBLEM;
    until("rank 1 is lost", is_lost).await;
    let waiting_for = status(&cluster).1["waiting_for"].as_str().unwrap().to_owned();
    assert!(waiting_for.contains("ranks without a worker (rank 1)"), "{waiting_for}");
    let text = stdout(&zsctl(&cluster, &["status"]));
    assert!(text.contains("blocked") && text.contains(&waiting_for), "{text}");

    jobs.push(connect(cluster.address()).await.join("watched", 1).await.unwrap());
    assert_eq!(status(&cluster).0, 0);
    // With a limit on the time without a step, a wait for connected ranks is a problem too.
    let late = zsctl(&cluster, &["status", "--late", "0"]);
    assert_eq!(late.status.code(), Some(PROBLEM));

    cluster.shards[0].kill();
    until("the job has failed", || status(&cluster).1["state"] == "failed").await;
    let (code, shown) = status(&cluster);
    assert_eq!(code, PROBLEM);
    assert!(shown["problem"].as_str().unwrap().contains(cluster.shards[0].address()));
}

#[tokio::test]
async fn status_names_the_slowest_rank() {
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &spec("slow", 2)).await;
    for step in 0..3 {
        let late = async {
            crate::until_commits_wait(&cluster, 1).await;
            training::step(&jobs[1], step).await
        };
        let (one, other) = tokio::join!(training::step(&jobs[0], step), late);
        assert_eq!(one.unwrap(), other.unwrap());
    }
    let (code, shown) = status(&cluster);
    assert_eq!((code, &shown["slowest_rank"]), (0, &1.into()));
    assert!(shown["late_seconds"].as_f64().unwrap() > 0.0);
}

#[tokio::test]
async fn a_job_is_deleted_only_after_a_confirmation() {
    let cluster = Cluster::start(1);
    start(cluster.address(), &spec("kept", 1)).await;
    let refused = zsctl(&cluster, &["delete", "kept"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("--yes"), "{refused:?}");
    assert_eq!(status(&cluster).1["name"], "kept");
    let unknown = zsctl(&cluster, &["delete", "other"]);
    assert!(stderr(&unknown).contains("\"other\" does not exist"), "{unknown:?}");
    assert!(zsctl(&cluster, &["delete", "kept", "--yes"]).status.success());
    assert_eq!(status(&cluster).1, Value::Null);
}

#[tokio::test]
async fn why_names_a_lost_rank_and_a_remedy() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("asked", 2)).await;
    let (one, other) = tokio::join!(training::step(&jobs[0], 0), training::step(&jobs[1], 0));
    assert_eq!(one.unwrap(), other.unwrap());
    drop(jobs.pop());
    until("rank 1 is lost", || status(&cluster).0 == PROBLEM).await;
    let why = &lines(&zsctl(&cluster, &["why", "asked", "--json"]))[0];
    assert_eq!(why["trouble"]["error"], "STEP_ABORTED");
    let message = why["trouble"]["message"].as_str().unwrap();
    assert!(message.contains("step 1") && message.contains("rank 1 was lost"), "{message}");
    let text = stdout(&zsctl(&cluster, &["why", "asked"]));
    for part in [
        "open, at version 1",
        "1 of 2 workers",
        "ranks without a worker (rank 1)",
        "start a worker",
        "zeroshard-worker train --address HOST:PORT --job asked --workers 2 --rank 1",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(why["command"].as_str().unwrap().ends_with("--rank 1"), "{why}");
    let unknown = zsctl(&cluster, &["why", "other"]);
    assert_eq!(unknown.status.code(), Some(1));
}

#[tokio::test]
async fn tensors_are_listed_with_shapes_and_sizes() {
    let cluster = Cluster::start(1);
    let spec = spec("listed", 1);
    start(cluster.address(), &spec).await;
    let listed = lines(&zsctl(&cluster, &["tensors", "listed", "--json"]));
    assert_eq!(listed.len(), spec.manifest.tensors().len());
    for (shown, tensor) in listed.iter().zip(spec.manifest.tensors()) {
        assert_eq!(shown["name"], tensor.name.as_str());
        assert_eq!(shown["shape"], Value::from(tensor.shape.clone()));
        assert_eq!(shown["dtype"], tensor.dtype.to_string());
    }
    let slices: u64 = listed.iter().map(|tensor| tensor["slices"].as_u64().unwrap()).sum();
    assert_eq!(slices, spec.manifest.number_of_slices() as u64);
    let table = stdout(&zsctl(&cluster, &["tensors", "listed"]));
    assert!(spec.manifest.tensors().iter().all(|tensor| table.contains(&tensor.name)), "{table}");
}

#[test]
fn completion_scripts_contain_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run("zsctl", &["completion", shell]);
        assert!(output.status.success());
        let script = stdout(&output);
        assert!(["zsctl", "checkpoint", "drain"].iter().all(|word| script.contains(word)));
    }
    assert_eq!(run("zsctl", &["completion", "tcsh"]).status.code(), Some(2));
}

#[tokio::test]
async fn a_cordoned_server_receives_no_slices_even_from_the_next_coordinator() {
    let mut cluster = Cluster::start(2);
    let address = cluster.shards[0].address().to_owned();
    assert!(zsctl(&cluster, &["cordon", &address]).status.success());
    let slices = |cluster: &Cluster| {
        let shown = lines(&zsctl(cluster, &["status", "--json"]));
        let server = shown.iter().find(|line| line["address"] == address.as_str())?.clone();
        Some((server["cordoned"].as_bool()?, server["slices"].as_u64()?))
    };
    let client = connect(cluster.address()).await;
    client.create_job(&spec("first", 1)).await.unwrap();
    until("the other server reports its slices", || {
        lines(&zsctl(&cluster, &["status", "--json"])).iter().any(|line| line["slices"] == 7)
    })
    .await;
    assert_eq!(slices(&cluster), Some((true, 0)));

    let at = cluster.address().to_owned();
    cluster.coordinator.kill();
    cluster.coordinator = Cluster::coordinator_at(&at);
    until("the server is back", || slices(&cluster).is_some()).await;
    assert_eq!(slices(&cluster), Some((true, 0)));

    assert!(zsctl(&cluster, &["uncordon", &address]).status.success());
    let spread = JobSpec { min_servers: 2, ..spec("second", 1) };
    connect(&at).await.create_job(&spread).await.unwrap();
    until("it has slices", || slices(&cluster).is_some_and(|(cordoned, of)| !cordoned && of > 0))
        .await;
    let unknown = zsctl(&cluster, &["cordon", "nowhere:1"]);
    assert!(stderr(&unknown).contains("nowhere:1"), "{unknown:?}");
}

#[tokio::test]
async fn a_server_is_named_by_its_address_its_id_or_its_name_everywhere() {
    let coordinator = Cluster::coordinator();
    let named = |name: &str| Cluster::shard(coordinator.address(), &["--id", name]);
    let shards = vec![named("alpha"), named("beta"), named("gamma")];
    let mut cluster = Cluster { coordinator, shards };
    let address = cluster.shards[0].address().to_owned();
    let find = |cluster: &Cluster, event: &str| {
        let shown = lines(&zsctl(cluster, &["status", "--json"])).into_iter();
        let mut shown = shown.filter(|line| line["event"] == event);
        shown.find(|line| line["address"] == address.as_str())
    };
    until("it is connected", || find(&cluster, "server").is_some()).await;
    let id = find(&cluster, "server").unwrap()["id"].as_str().unwrap().to_owned();
    assert_eq!(find(&cluster, "server").unwrap()["name"], "alpha");
    let table = zsctl(&cluster, &["status"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains(" alpha "), "{table:?}");
    let decimal = u64::from_str_radix(&id, 16).unwrap().to_string();
    for name in [&address, &id, &decimal, "alpha"] {
        for command in ["cordon", "uncordon", "drain", "uncordon"] {
            let output = zsctl(&cluster, &[command, name, "--json"]);
            assert!(output.status.success(), "{command} {name}: {output:?}");
            let said = lines(&output).pop().unwrap();
            assert_eq!(
                (&said["server"], &said["address"]),
                (&id.as_str().into(), &address.as_str().into())
            );
        }
    }
    let spec = JobSpec { replicas: 2, min_servers: 3, ..spec("named", 1) };
    let rank = start(cluster.address(), &spec).await.remove(0);
    step(&rank, 0).await;
    cluster.shards.remove(0).kill();
    step(&rank, 1).await;
    // An error names it as the tables do.
    let why = lines(&zsctl(&cluster, &["why", "named", "--json"])).pop().unwrap();
    let message = why["trouble"]["message"].as_str().unwrap();
    assert!(message.contains(&format!("shard server alpha ({address}) was lost")), "{message}");
    let missing = find(&cluster, "missing_server").unwrap();
    assert_eq!((&missing["id"], &missing["name"]), (&id.as_str().into(), &"alpha".into()));
    assert!(zsctl(&cluster, &["drain", "alpha"]).status.success());
    assert_eq!(find(&cluster, "missing_server"), None);
}

#[tokio::test]
async fn a_drained_server_can_be_stopped_without_changing_a_bit() {
    let spec = |name: &str, replicas, min_servers| {
        let tensors = synthetic::kinds_and_large(&adamw());
        JobSpec { replicas, min_servers, ..job(name, 2, adamw(), tensors) }
    };
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("drained", 2, 3)).await;
    // A step that is aborted is an error here.
    let both = async |number| {
        let [one, other] = [0, 1].map(|rank: usize| training::step(&jobs[rank], number));
        let (one, other) = tokio::join!(one, other);
        assert_eq!(one.unwrap(), other.unwrap());
    };
    both(0).await;
    let drained = cluster.shards.remove(0);
    let address = drained.address().to_owned();
    let (coordinator, at) = (cluster.address().to_owned(), address.clone());
    let drain = tokio::task::spawn_blocking(move || {
        run("zsctl", &["--address", &coordinator, "drain", &at, "--json"])
    });
    let mut steps = 1;
    while !drain.is_finished() {
        both(steps).await;
        steps += 1;
        let shown = status(&cluster).1;
        assert_eq!(shown["degraded_slices"], 0, "no slice has too few replicas at any time");
    }
    let drain = drain.await.unwrap();
    assert!(drain.status.success(), "{drain:?}");
    assert_eq!(lines(&drain).last().unwrap()["event"], "drained");
    until_redundant(&cluster.coordinator, "drained").await;
    let is_empty = || {
        let shown = lines(&zsctl(&cluster, &["status", "--json"]));
        let server = shown.iter().find(|line| line["address"] == address.as_str()).unwrap();
        assert_eq!(server["cordoned"], true);
        server["slices"] == 0
    };
    until("the server reports that it has no slices", is_empty).await;
    let epoch = jobs[0].epoch();
    assert!(drained.stop().success());
    for number in steps..steps + 4 {
        both(number).await;
    }
    steps += 4;
    assert_eq!(jobs[0].epoch(), epoch, "the end of the server has affected no job");
    let aborted = "zeroshard_job_steps_total{job=\"drained\",outcome=\"aborted\"} 0";
    assert!(cluster.coordinator.get("/metrics").contains(aborted), "a drain aborts no step");
    assert_eq!(status(&cluster).0, 0, "a drained server is not missed");
    let hash = jobs[0].state_hash(steps).await.unwrap();
    let calm = Training { steps, ..Training::new(spec("calm", 1, 2)) };
    assert_eq!(hash, calm.run(cluster.address()).await.unwrap().hash);

    // The remaining two servers must keep their slices, because a replica needs two servers.
    let refused = zsctl(&cluster, &["drain", cluster.shards[0].address()]);
    assert_eq!(refused.status.code(), Some(1));
    let said = stderr(&refused);
    assert!(said.contains("\"drained\"") && said.contains("2 other servers"), "{said}");
}

#[tokio::test]
async fn the_loss_of_another_server_right_after_a_drain_began_loses_nothing() {
    let mut cluster = Cluster::start(3);
    let tensors = synthetic::kinds_and_large(&adamw());
    let spec = JobSpec { replicas: 2, min_servers: 3, ..job("fire", 1, adamw(), tensors) };
    let rank = start(cluster.address(), &spec).await.remove(0);
    for number in 0..2 {
        step(&rank, number).await;
    }
    let before = rank.state_hash(2).await.unwrap();
    let address = cluster.shards[0].address().to_owned();
    let client = connect(cluster.address()).await;
    let waits = client.drain_server(&address, false).await.unwrap().stays;
    assert!(waits[0].transient && waits[0].reason.contains("copied"), "{waits:?}");
    cluster.shards[1].kill();
    step(&rank, 2).await;
    step(&rank, 3).await;
    let again = rank.state_hash(4).await.unwrap();
    assert_ne!(before, again);
    assert_eq!(status(&cluster).1["failure"], Value::Null);
    let remaining = client.drain_server(&address, false).await.unwrap().stays;
    assert!(!remaining.is_empty(), "one other server cannot hold two replicas");
    let calm = JobSpec { name: "calm".to_owned(), replicas: 1, min_servers: 1, ..spec };
    let calm = Training { steps: 4, ..Training::new(calm) };
    assert_eq!(again, calm.run(cluster.address()).await.unwrap().hash);
}

#[tokio::test]
async fn a_job_without_replicas_keeps_a_server_until_it_may_return_to_its_checkpoint() {
    let cluster = Cluster::start(2);
    let directory = directory();
    let checkpoints = Some(policy(directory.path(), 2));
    let spec = JobSpec { checkpoints, min_servers: 2, ..spec("saved", 1) };
    let rank = start(cluster.address(), &spec).await.remove(0);
    for number in 0..2 {
        training::step(&rank, number).await.unwrap();
    }
    until_saved(directory.path(), "saved", 2).await;
    until("the coordinator knows it", || status(&cluster).1["saved_version"] == 2).await;
    let before = rank.state_hash(2).await.unwrap();
    let address = cluster.shards[0].address();
    let refused = zsctl(&cluster, &["drain", address]);
    assert_eq!(refused.status.code(), Some(1));
    let said = stderr(&refused);
    assert!(said.contains("\"saved\"") && said.contains("--restore"), "{said}");

    let drain = zsctl(&cluster, &["drain", address, "--restore", "--within", "60"]);
    assert!(drain.status.success(), "{drain:?}");
    let moved = training::step(&rank, 2).await;
    assert!(matches!(moved, Err(Error::RolledBack { version: 2, .. })), "{moved:?}");
    assert_eq!(rank.state_hash(2).await.unwrap(), before);
    assert!(training::step(&rank, 2).await.unwrap().applied);
}

#[tokio::test]
async fn an_evicted_rank_loses_its_lease_and_another_worker_takes_the_rank() {
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &spec("hangs", 2)).await;
    let evict = async {
        crate::until_commits_wait(&cluster, 1).await;
        let evicted = zsctl(&cluster, &["evict", "hangs", "1", "--json"]);
        assert!(evicted.status.success(), "{evicted:?}");
    };
    let (aborted, ()) = tokio::join!(training::step(&jobs[0], 0), evict);
    let Err(Error::StepAborted { cause, .. }) = aborted else { panic!("{aborted:?}") };
    assert!(cause.contains("rank 1 was evicted"), "{cause}");
    let late = training::step(&jobs[1], 0).await;
    assert!(matches!(late, Err(Error::LeaseLost { rank: 1, .. })), "{late:?}");
    let next = connect(cluster.address()).await.join("hangs", 1).await.unwrap();
    let (one, other) = tokio::join!(training::step(&jobs[0], 0), training::step(&next, 0));
    assert_eq!(one.unwrap(), other.unwrap());
    let nobody = zsctl(&cluster, &["evict", "hangs", "7"]);
    assert!(stderr(&nobody).contains('7'), "{nobody:?}");
}

#[tokio::test]
async fn doctor_measures_each_server_and_names_an_unreachable_address() {
    let mut cluster = Cluster::start(2);
    // The first line is about the leader.
    let registered = || lines(&zsctl(&cluster, &["status", "--json"])).len() == 3;
    until("both servers have registered", registered).await;
    let checked = zsctl(&cluster, &["doctor", "--bytes", "1000000", "--json"]);
    assert!(checked.status.success(), "{checked:?}");
    let findings = lines(&checked);
    assert_eq!(findings.len(), 3);
    for shard in &cluster.shards {
        let found = findings.iter().find(|of| of["address"] == shard.address()).unwrap();
        assert!(found["bytes_per_second"].as_f64().unwrap() > 0.0, "{found}");
        assert!(found["clock_ahead_ms"].as_i64().unwrap().abs() < 2000, "{found}");
        assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
    }
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let flags = ["--advertise", &nowhere.to_string()];
    cluster.shards.push(Cluster::shard(cluster.address(), &flags));
    let is_there = || {
        let text = stdout(&zsctl(&cluster, &["status"]));
        text.contains(&nowhere.to_string())
    };
    until("the server has registered", is_there).await;
    let checked = zsctl(&cluster, &["doctor", "--bytes", "1000"]);
    assert_eq!(checked.status.code(), Some(PROBLEM));
    let said = stdout(&checked);
    assert!(said.contains(&format!("shard {nowhere}: it cannot be reached")), "{said}");
    // A coordinator that does not answer is a finding as well.
    let checked = run("zsctl", &["--address", &nowhere.to_string(), "--timeout", "1", "doctor"]);
    assert_eq!(checked.status.code(), Some(PROBLEM));
}

#[tokio::test]
async fn top_prints_once_without_a_terminal() {
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &spec("fast", 1)).await;
    let train = async {
        // More steps than `top` can observe.
        for step in 0..10_000 {
            if training::step(&jobs[0], step).await.is_err() {
                return;
            }
        }
    };
    let top = async {
        let address = cluster.address().to_owned();
        let top = move || run("zsctl", &["--address", &address, "top", "--json"]);
        let output = tokio::task::spawn_blocking(top).await.unwrap();
        assert!(output.status.success(), "{output:?}");
        lines(&output)
    };
    let shown = tokio::select! { shown = top => shown, () = train => panic!("top has not ended") };
    let of = |event: &str| shown.iter().find(|line| line["event"] == event).unwrap();
    assert!(of("job")["steps_per_second"].as_f64().unwrap() > 0.0, "{shown:?}");
    assert!(of("job")["received_bytes_per_second"].as_f64().unwrap() > 0.0, "{shown:?}");
    assert!(of("server")["memory_bytes"].as_u64().unwrap() > 0, "{shown:?}");
}
