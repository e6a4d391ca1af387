//! Information for operators: metrics, probes, `zsctl`.

use std::{collections::BTreeSet, io::Write};

use serde_json::Value;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use zeroshard_net::transport::endpoint;
use zeroshard_tests::{Cluster, Process, Training, binary, run, synthetic};

use crate::{adamw, connect, job, sgd, start, until};

/// The value of a series in Prometheus' text format.
fn series(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is in {metrics}")).parse().unwrap()
}

#[tokio::test]
async fn metrics_count_bytes_requests_steps_and_memory() {
    let cluster = Cluster::start(1);
    let spec = job("metrics", 2, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    let trained = tokio::join!(
        zeroshard_tests::training::step(&jobs[0], 0),
        zeroshard_tests::training::step(&jobs[1], 0)
    );
    assert!(trained.0.is_ok() && trained.1.is_ok());
    for job in &jobs {
        zeroshard_tests::training::pull(job, 1).await.unwrap();
    }
    // Gauges are updated once a second.
    let version = "zeroshard_job_version{job=\"metrics\",role=\"shard\"} 1\n";
    until("the version is shown", || cluster.shards[0].get("/metrics").contains(version)).await;
    let shard = cluster.shards[0].get("/metrics");
    let bytes = 4 * 1003;
    let payload = |operation, direction| {
        format!(
            "zeroshard_payload_bytes_total{{direction=\"{direction}\",operation=\"{operation}\"}}"
        )
    };
    assert_eq!(series(&shard, &payload("pull", "sent")), f64::from(2 * bytes));
    // The initial parameters, and the gradients of two ranks.
    assert_eq!(series(&shard, &payload("push", "received")), f64::from(3 * bytes));
    assert_eq!(series(&shard, &payload("push", "duplicate")), 0.0);
    for (kind, expected) in
        [("master", bytes), ("state", 2 * bytes), ("parked", 0), ("published", 0), ("snapshot", 0)]
    {
        assert_eq!(
            series(&shard, &format!("zeroshard_memory_bytes{{kind=\"{kind}\"}}")),
            f64::from(expected)
        );
    }
    for phase in ["reduce", "decide", "apply"] {
        assert_eq!(
            series(
                &shard,
                &format!(
                    "zeroshard_job_step_phase_seconds_count{{job=\"metrics\",phase=\"{phase}\"}}"
                )
            ),
            1.0
        );
    }
    let pushes = "zeroshard_requests_total{code=\"Ok\",method=\"/zeroshard.v1.DataService/Push\"}";
    assert_eq!(series(&shard, pushes), 3.0);
    assert_eq!(series(&shard, "zeroshard_coordinator_connected"), 1.0);
    assert!(shard.contains("zeroshard_request_seconds_bucket"));
    assert!(series(&shard, "process_resident_memory_bytes") > 0.0);

    let coordinator = cluster.coordinator.get("/metrics");
    assert_eq!(series(&coordinator, "zeroshard_steps_total{outcome=\"applied\"}"), 1.0);
    assert_eq!(series(&coordinator, "zeroshard_steps_total{outcome=\"skipped\"}"), 0.0);
    assert_eq!(series(&coordinator, "zeroshard_steps_total{outcome=\"aborted\"}"), 0.0);
    assert_eq!(series(&coordinator, "zeroshard_servers"), 1.0);
    assert_eq!(series(&coordinator, "zeroshard_job_workers{job=\"metrics\"}"), 2.0);
    let of_job = |name: &str| series(&coordinator, &format!("zeroshard_job_{name}"));
    assert_eq!(of_job("steps_total{job=\"metrics\",outcome=\"applied\"}"), 1.0);
    assert_eq!(of_job("step_wait_seconds_count{for=\"ranks\",job=\"metrics\"}"), 1.0);
    // One of the two ranks commits after the other.
    assert_eq!(of_job("rank_lateness_seconds_count{job=\"metrics\"}"), 1.0);
    assert_eq!(of_job("state{job=\"metrics\",state=\"open\"}"), 1.0);
    assert_eq!(of_job("state{job=\"metrics\",state=\"failed\"}"), 0.0);
}

/// The names of all series of ZeroShard, without labels.
fn names(metrics: &str) -> BTreeSet<&str> {
    let series = metrics.lines().filter(|line| line.starts_with("zeroshard_"));
    series.map(|line| &line[..line.find(['{', ' ']).expect("a value")]).collect()
}

#[tokio::test]
async fn each_role_shows_its_own_series_and_those_of_a_deleted_job_vanish() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let directory = tempfile::tempdir().unwrap();
    let spec = job("deleted", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    zeroshard_tests::training::step(&jobs[0], 0).await.unwrap();
    let url = format!("file://{}", directory.path().display());
    connect(cluster.address()).await.save_checkpoint("deleted", Some(&url)).await.unwrap();
    let (coordinator, shard) = (&cluster.coordinator, &cluster.shards[0]);
    let version = "zeroshard_job_version{job=\"deleted\",role=\"shard\"} 1\n";
    until("the version is shown", || shard.get("/metrics").contains(version)).await;
    let texts = [coordinator.get("/metrics"), shard.get("/metrics")];
    let [of_coordinator, of_shard] = texts.each_ref().map(|text| names(text));
    let common = ["build_info", "job_epoch", "job_version", "requests_in_flight", "requests_total"]
        .map(|name| format!("zeroshard_{name}"));
    for name in of_coordinator.intersection(&of_shard) {
        let is_common = common.iter().any(|of| of == name) || name.contains("request_seconds");
        assert!(is_common, "{name} is shown by both roles");
    }
    let saved = "zeroshard_job_last_checkpoint_version{job=\"deleted\"}";
    assert_eq!(series(&texts[0], saved), 1.0);
    assert!(series(&texts[1], "zeroshard_memory_limit_bytes{kind=\"parked\"}") > 0.0);
    assert!(texts[1].contains("tier_bytes{tier=\"host\"}"), "a part of --memory");
    assert!(!texts[1].contains("tier=\"device\"") && !texts[1].contains("tier_bytes{tier=\"disk"));

    connect(cluster.address()).await.delete_job("deleted").await.unwrap();
    let empty = "zeroshard_memory_bytes{kind=\"master\"} 0\n";
    until("its memory is free", || shard.get("/metrics").contains(empty)).await;
    for process in [coordinator, shard] {
        let text = process.get("/metrics");
        assert!(!text.contains("job=\"deleted\""), "{text}");
    }
}

pub(crate) async fn health(process: &Process) -> ServingStatus {
    let channel = endpoint(process.address()).unwrap().connect().await.unwrap();
    let request = HealthCheckRequest { service: String::new() };
    let answer = HealthClient::new(channel).check(request).await.unwrap();
    answer.into_inner().status()
}

#[tokio::test]
async fn probes_report_whether_a_server_is_ready() {
    let cluster = Cluster::start(1);
    // A server is ready when the coordinator knows it.
    start(cluster.address(), &job("probes", 1, sgd(1.0), synthetic::small())).await;
    for process in [&cluster.coordinator, &cluster.shards[0]] {
        assert_eq!(process.get("/healthz"), "ok\n");
        assert_eq!(process.get("/readyz"), "ready\n");
        assert_eq!(health(process).await, ServingStatus::Serving);
        assert!(process.get("/").contains("ZeroShard"));
    }
    // A server without a coordinator is alive but not ready.
    let nobody =
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let lonely = Cluster::shard(&nobody, &[]);
    assert_eq!(lonely.get("/healthz"), "ok\n");
    assert_eq!(lonely.get("/readyz"), "not ready\n");
    assert_eq!(health(&lonely).await, ServingStatus::NotServing);
}

fn lines(output: &std::process::Output) -> Vec<Value> {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn zsctl_shows_the_cluster_and_deletes_jobs() {
    let cluster = Cluster::start(2);
    let spec = job("mine", 1, adamw(), synthetic::kinds(&adamw()));
    let trained = Training::new(spec).run(cluster.address()).await.unwrap();
    let zsctl =
        |arguments: &[&str]| run("zsctl", &[&["--address", cluster.address()], arguments].concat());

    let status = lines(&zsctl(&["status", "--json"]));
    let servers: Vec<_> = status.iter().filter(|line| line["event"] == "server").collect();
    let addresses: Vec<_> =
        servers.iter().map(|server| server["address"].as_str().unwrap()).collect();
    assert_eq!(servers.len(), 2);
    assert!(cluster.shards.iter().all(|shard| addresses.contains(&shard.address())));
    let jobs: Vec<_> = status.iter().filter(|line| line["event"] == "job").collect();
    assert_eq!(jobs.len(), 1);
    assert_eq!((&jobs[0]["name"], &jobs[0]["version"]), (&Value::from("mine"), &Value::from(3)));
    assert_eq!((&jobs[0]["tensors"], &jobs[0]["slices"]), (&Value::from(9), &Value::from(7)));
    assert_eq!(jobs[0]["failure"], Value::Null);
    let table = String::from_utf8(zsctl(&["status"]).stdout).unwrap();
    assert!(
        table.contains("mine")
            && cluster.shards.iter().all(|shard| table.contains(shard.address()))
    );

    assert_eq!(lines(&zsctl(&["hash", "mine", "--json"]))[0]["state_hash"], trained.hash.as_str());
    assert_eq!(String::from_utf8(zsctl(&["hash", "mine"]).stdout).unwrap().trim(), trained.hash);
    let unknown = zsctl(&["hash", "other"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8(unknown.stderr).unwrap().contains("\"other\""));

    assert_eq!(lines(&zsctl(&["delete", "mine", "--yes", "--json"]))[0]["event"], "deleted");
    assert!(connect(cluster.address()).await.status().await.unwrap().jobs.is_empty());
}

#[tokio::test]
async fn a_server_is_configured_by_file_and_environment_and_flags_take_precedence() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let text =
        "[common]\nwait_seconds = 7\nlog = \"error\"\n[coordinator]\nlisten = \"127.0.0.1:0\"\n";
    file.write_all(text.as_bytes()).unwrap();
    let mut command = std::process::Command::new(zeroshard_tests::binary("zeroshard-server"));
    command.args(["coordinator", "--json", "--config"]).arg(file.path());
    // The file specifies the address of the gRPC server. Without the flag there would be no admin
    // server.
    command.args(["--admin-listen", "127.0.0.1:0"]).env("ZEROSHARD_ADMIN_LISTEN", "off");
    let process = Process::start(command);
    assert!(process.address().starts_with("127.0.0.1:"));
    assert_eq!(process.get("/healthz"), "ok\n");
}

#[tokio::test]
async fn a_probe_succeeds_when_the_server_is_ready_also_without_the_token() {
    let cluster = Cluster::start_guarded(1, "s3cret");
    let probe = |arguments: &[&str]| run("zeroshard-server", &[&["probe"], arguments].concat());
    let lonely = Cluster::shard("127.0.0.1:9", &[]);
    for server in [&cluster.coordinator, &cluster.shards[0]] {
        until("it is ready", || probe(&[server.address()]).status.success()).await;
    }
    let output = probe(&[lonely.address(), "--service", "readiness"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("not ready"), "{said}");
    assert!(probe(&[lonely.address(), "--service", "liveness"]).status.success());
    let output = probe(&["127.0.0.1:9"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("127.0.0.1:9"), "{said}");
    // In a container, the environment says where the server listens.
    let mut command = std::process::Command::new(binary("zeroshard-server"));
    let port = cluster.shards[0].address().rsplit(':').next().unwrap();
    command.arg("probe").env("ZEROSHARD_LISTEN", format!("0.0.0.0:{port}"));
    assert!(command.status().unwrap().success());
}
