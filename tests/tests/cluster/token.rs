//! A cluster with a token serves only clients that carry it.
//!
//! promise: invalid-input

use zeroshard_client::{Cluster as Client, Error, Options, Result};
use zeroshard_net::transport::{Connection, Credentials};
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};
use zeroshard_tests::{Cluster, Process, Training, binary, run, stock, synthetic};

use crate::{adamw, job, operations::health, options, until};

const TOKEN: &str = "a-long-shared-secret";

fn with(token: Option<&str>) -> Options {
    options().token(token.unwrap_or_default().to_owned().into())
}

fn refused<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Unauthenticated { found }) => found,
        other => panic!("{other:?}"),
    }
}

/// The response of a shard server to a call of a generated client with `token`.
async fn ask(shard: &Process, token: &str) -> Result<()> {
    let credentials = Credentials::new(&token.to_owned().into(), None)?;
    let mut client = ShardServiceClient::new(Connection::lazy(shard.address(), &credentials)?);
    let answer = client.digest(pb::DigestRequest::default()).await;
    answer.map(|_| ()).map_err(|status| from_status(&status, "shard server"))
}

#[tokio::test]
async fn clients_with_the_token_train_as_without_a_token() {
    let spec = job("guarded", 2, adamw(), synthetic::kinds(&adamw()));
    let guarded = Cluster::start_guarded(2, TOKEN);
    let training = Training { options: with(Some(TOKEN)), ..Training::new(spec) };
    let trained = training.run(guarded.address()).await.unwrap();
    // A token is accepted by a cluster without one, and an empty token means no token.
    let open = Cluster::start(1);
    assert_eq!(trained, training.run(open.address()).await.unwrap());
    assert!(Client::connect(open.address(), with(Some(""))).await.is_ok());
}

#[tokio::test]
async fn clients_without_the_token_are_refused_by_every_service() {
    let cluster = Cluster::start_guarded(1, TOKEN);
    let spec = job("guarded", 1, adamw(), synthetic::small());
    let ours = Training { options: with(Some(TOKEN)), ..Training::new(spec) };
    let trained = ours.run(cluster.address()).await.unwrap();

    for (token, found) in
        [(None, "no token"), (Some(""), "no token"), (Some("another"), "a wrong token")]
    {
        assert_eq!(refused(Client::connect(cluster.address(), with(token)).await), found);
    }
    let shard = &cluster.shards[0];
    assert_eq!(
        refused(stock::pull(shard.address(), stock::read("guarded", 3, [0])).await),
        "no token"
    );
    let contents = Some(stock::gradients(3));
    let begin = pb::PushBegin { job: "guarded".into(), epoch: 1, contents, ..Default::default() };
    let push = vec![stock::open(begin), stock::extent(0, 0, &[7.0; 100_000])];
    assert_eq!(refused(stock::push(shard.address(), push).await), "no token");
    assert_eq!(refused(ask(shard, "another").await), "a wrong token");
    assert!(matches!(ask(shard, TOKEN).await, Err(Error::UnknownJob { .. })));

    let client = Client::connect(cluster.address(), with(Some(TOKEN))).await.unwrap();
    assert_eq!(client.state_hash("guarded").await.unwrap(), trained.hash);
    // The metrics count refusals with their own code.
    let refusals = "zeroshard_requests_total{code=\"Unauthenticated\",method=\"/zeroshard.v1.DataService/Push\"} 1\n";
    until("the refusal is counted", || shard.get("/metrics").contains(refusals)).await;
}

#[tokio::test]
async fn probes_need_no_token() {
    let cluster = Cluster::start_guarded(1, TOKEN);
    for process in [&cluster.coordinator, &cluster.shards[0]] {
        until("it is ready", || process.get("/readyz") == "ready\n").await;
        assert_eq!(
            health(process).await,
            tonic_health::pb::health_check_response::ServingStatus::Serving
        );
    }
}

#[tokio::test]
async fn a_shard_server_with_a_wrong_token_does_not_join() {
    let cluster = Cluster::start_guarded(1, TOKEN);
    until("the right one has joined", || cluster.shards[0].get("/readyz") == "ready\n").await;
    let strangers = [
        Cluster::shard(cluster.address(), &[]),
        Cluster::guarded_shard(cluster.address(), "another"),
    ];
    let metrics = || cluster.coordinator.get("/metrics");
    let refused = "zeroshard_requests_total{code=\"Unauthenticated\",method=\"/zeroshard.v1.CoordinatorService/Serve\"} ";
    let refusals =
        || metrics().lines().find_map(|line| line.strip_prefix(refused)?.parse::<f64>().ok());
    // Each of them retries, so both have called when there are many refusals.
    until("the strangers are refused", || refusals().is_some_and(|refusals| refusals >= 4.0)).await;
    assert!(metrics().contains("zeroshard_servers 1\n"));
    assert!(strangers.iter().all(|stranger| stranger.get("/readyz") == "not ready\n"));
}

#[test]
fn zsctl_accepts_the_token_and_reports_a_missing_one() {
    let cluster = Cluster::start_guarded(0, TOKEN);
    let zsctl =
        |token: &str| run("zsctl", &["--address", cluster.address(), "--token", token, "status"]);
    // The cluster has no servers, which is a problem and no error.
    assert_eq!(zsctl(TOKEN).status.code(), Some(3));
    for wrong in ["", "another"] {
        let output = zsctl(wrong);
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("ZEROSHARD_TOKEN"), "{said}");
    }
}

#[test]
fn a_server_that_other_machines_can_reach_needs_a_token_or_the_flag_insecure() {
    let open = ["coordinator", "--listen", "0.0.0.0:0", "--admin-listen", "off"];
    let output = run("zeroshard-server", &open);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("--insecure"), "{said}");
    for allowed in [["--insecure", "--json"], ["--json", "--token=s3cret"]] {
        let mut command = std::process::Command::new(binary("zeroshard-server"));
        command.args(open).args(allowed);
        assert!(Process::start(command).address().starts_with("0.0.0.0:"));
    }
}

#[test]
fn every_program_reads_the_token_from_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let file = file.to_str().unwrap();
    let coordinator = Cluster::coordinator_with(&["--token-file", file]);
    let shard = Cluster::shard(coordinator.address(), &["--token-file", file]);
    let status = |flags: &[&str]| {
        run("zsctl", &[&["--address", coordinator.address(), "status"], flags].concat())
    };
    assert!(!status(&[]).status.success());
    let output = status(&["--token-file", file]);
    assert_ne!(output.status.code(), Some(1), "{output:?}");
    let worker = [
        "train",
        "--job",
        "a",
        "--address",
        coordinator.address(),
        "--shards",
        "1",
        "--steps",
        "1",
    ];
    let out = directory.path().to_str().unwrap();
    let small = ["--context", "16", "--width", "32", "--token-file", file, "--out", out];
    let output = run("zeroshard-worker", &[&worker[..], &small].concat());
    assert!(output.status.success(), "{output:?}");
    drop(shard);
}

#[test]
fn no_program_shows_a_token() {
    for arguments in [&["zeroshard-server", "coordinator", "--help"][..], &["zsctl", "--help"]] {
        let mut command = std::process::Command::new(binary(arguments[0]));
        let output = command.args(&arguments[1..]).env("ZEROSHARD_TOKEN", TOKEN).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("--token") && !said.contains(TOKEN), "{said}");
    }
    let broken = format!("{TOKEN} {TOKEN}");
    for (program, command) in [("zeroshard-server", "coordinator"), ("zsctl", "status")] {
        let output = run(program, &[command, "--token", &broken]);
        assert!(!output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("visible ASCII") && !said.contains(TOKEN), "{said}");
    }
}
