//! `zsctl status` and `why`, the status page, the log and the metrics, in states that once looked
//! healthy.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Process, binary, run, training};

use crate::{
    checkpoints::policy,
    connect,
    operators::{PROBLEM, lines, spec, status, stderr, stdout, zsctl},
    start, until,
};

/// The exit code of `status`, and its lines with this event.
fn shown(cluster: &Cluster, event: &str) -> (i32, Vec<Value>) {
    let output = zsctl(cluster, &["status", "--json"]);
    let of_event = lines(&output).into_iter().filter(|line| line["event"] == event);
    (output.status.code().unwrap(), of_event.collect())
}

fn metric(process: &Process, name: &str) -> Option<f64> {
    let text = process.get("/metrics");
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[tokio::test]
async fn a_cluster_without_servers_has_a_problem() {
    let cluster = Cluster::start(0);
    let output = zsctl(&cluster, &["status"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(PROBLEM), "{text}");
    let leader = format!("leader {}, version {}", cluster.address(), env!("CARGO_PKG_VERSION"));
    assert!(text.starts_with(&leader) && text.contains("no shard server is connected"), "{text}");
    let why = stdout(&zsctl(&cluster, &["why"]));
    assert!(why.contains("start shard servers"), "{why}");
    let page = cluster.coordinator.get("/");
    let remedy = "<code>zeroshard-server shard --coordinator HOST:PORT</code>";
    assert!(page.contains("No shard server is connected.") && page.contains(remedy), "{page}");
    assert_eq!(metric(&cluster.coordinator, "zeroshard_servers "), Some(0.0));
}

#[tokio::test]
async fn a_lost_server_is_missed_until_it_is_back_or_drained() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(binary("zeroshard-server"));
    command.args(["coordinator", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command.args(["--json", "--log", "info"]).stderr(log.reopen().unwrap());
    let coordinator = Process::start(command);
    let shards = (0..2).map(|_| Cluster::shard(coordinator.address(), &[])).collect();
    let mut cluster = Cluster { coordinator, shards };
    until("both are connected", || shown(&cluster, "server").1.len() == 2).await;
    assert_eq!(shown(&cluster, "server").0, 0);
    // Nothing is wrong, but the operator is told to start workers.
    for command in ["status", "why"] {
        let text = stdout(&zsctl(&cluster, &[command]));
        assert!(text.contains("zeroshard-worker train --address HOST:PORT"), "{text}");
    }
    assert!(cluster.coordinator.get("/").contains("<code>zeroshard-worker train"));
    let lost = cluster.shards[0].address().to_owned();
    cluster.shards[0].kill();
    until("it is missed", || shown(&cluster, "missing_server").1.len() == 1).await;
    let (code, missing) = shown(&cluster, "missing_server");
    assert_eq!((code, &missing[0]["address"]), (PROBLEM, &lost.as_str().into()));
    let text = stdout(&zsctl(&cluster, &["status"]));
    assert!(text.contains("1 of 2 servers") && text.contains("missing for"), "{text}");
    let why = stdout(&zsctl(&cluster, &["why"]));
    assert!(why.contains(&lost) && why.contains(&format!("zsctl drain {lost}")), "{why}");
    assert_eq!(metric(&cluster.coordinator, "zeroshard_servers_missing "), Some(1.0));
    let page = cluster.coordinator.get("/");
    assert!(page.contains("<span class='state bad'>lost</span>"), "{page}");
    assert!(page.contains("1 <small>of 2</small>") && page.contains(">warning</b>"), "{page}");
    let remedy = format!("<code>zsctl drain {lost}</code>");
    assert!(page.contains("A shard server is missing.") && page.contains(&remedy), "{page}");
    let warnings = cluster.coordinator.get("/?events=warning");
    assert!(warnings.contains(&lost) && !warnings.contains(">info</b>"), "{warnings}");
    let errors = cluster.coordinator.get("/?events=error");
    assert!(errors.contains("No error has occurred"), "{errors}");
    let logged = std::fs::read_to_string(log.path()).unwrap();
    let level = logged.lines().find(|line| line.contains("was lost (")).unwrap();
    assert!(level.contains("WARN"), "{level}");

    // A cordoned server is not shown as an ordinary one.
    let other = cluster.shards[1].address().to_owned();
    assert!(zsctl(&cluster, &["cordon", &other]).status.success());
    assert!(cluster.coordinator.get("/").contains("<span class='state warn'>cordoned</span>"));
    assert!(zsctl(&cluster, &["uncordon", &other]).status.success());
    assert!(zsctl(&cluster, &["drain", &lost]).status.success());
    assert_eq!(shown(&cluster, "missing_server"), (0, Vec::new()));
}

#[tokio::test]
async fn failed_saves_are_a_problem_of_the_job() {
    let cluster = Cluster::start(1);
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("checkpoints");
    let spec = JobSpec { checkpoints: Some(policy(&place, 1)), ..spec("unsaved", 1) };
    let rank = start(cluster.address(), &spec).await.remove(0);
    // A file takes the place of the directory.
    std::fs::remove_dir_all(&place).unwrap();
    std::fs::write(&place, "").unwrap();
    training::step(&rank, 0).await.unwrap();
    until("the save has failed", || status(&cluster).1["failed_saves"] != 0).await;
    let (code, job) = status(&cluster);
    assert_eq!(code, PROBLEM);
    assert!(job["problem"].as_str().unwrap().contains("saves have failed"), "{job}");
    let why = stdout(&zsctl(&cluster, &["why", "unsaved"]));
    assert!(why.contains("can write to the URL"), "{why}");
    assert!(cluster.coordinator.get("/").contains("1 save failed"));
    std::fs::remove_file(&place).unwrap();
    training::step(&rank, 1).await.unwrap();
    until("it is saved", || status(&cluster).1["saved_version"] == 2).await;
    let (code, job) = status(&cluster);
    assert_eq!((code, &job["failed_saves"]), (0, &0.into()));
    assert!(job["saved_seconds_ago"].as_f64().unwrap() >= 0.0);
}

#[tokio::test]
async fn a_coordinator_that_learns_from_its_servers_is_recovering() {
    let mut cluster = Cluster::start(1);
    let _ranks = start(cluster.address(), &spec("known", 1)).await;
    cluster.shards[0].kill();
    let at = cluster.address().to_owned();
    cluster.coordinator.kill();
    cluster.coordinator = Cluster::coordinator_at(&at);
    let (code, leader) = shown(&cluster, "leader");
    assert_eq!((code, &leader[0]["recovering"]), (PROBLEM, &true.into()));
    let text = stdout(&zsctl(&cluster, &["status"]));
    assert!(text.lines().next().unwrap().contains("recovering"), "{text}");
    let why = stdout(&zsctl(&cluster, &["why"]));
    assert!(why.contains("recovering") && why.contains("wait"), "{why}");
}

#[tokio::test]
async fn an_abort_before_the_first_commit_is_counted_and_the_end_of_a_run_is_no_problem() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("ends", 2)).await;
    let aborted = || {
        metric(&cluster.coordinator, "zeroshard_job_steps_total{job=\"ends\",outcome=\"aborted\"} ")
    };
    assert_eq!(aborted(), Some(0.0));
    drop(jobs.pop());
    until("the abort is counted", || aborted() == Some(1.0)).await;
    jobs.push(connect(cluster.address()).await.join("ends", 1).await.unwrap());
    until("rank 0 knows the new epoch", || jobs[0].epoch() == jobs[1].epoch()).await;
    let (one, other) = tokio::join!(training::step(&jobs[0], 0), training::step(&jobs[1], 0));
    assert_eq!(one.unwrap(), other.unwrap());
    assert!(metric(&cluster.coordinator, "zeroshard_job_gradient_norm{job=\"ends\"} ").is_some());
    jobs.remove(0).leave().await.unwrap();
    let (code, job) = status(&cluster);
    assert_eq!((code, &job["problem"]), (0, &Value::Null), "{job}");
    let why = stdout(&zsctl(&cluster, &["why", "ends"]));
    assert!(!why.contains("start a worker"), "{why}");
}

#[test]
fn zsctl_refuses_a_directory_with_a_typing_error_and_survives_a_closed_pipe() {
    let directory = tempfile::tempdir().unwrap();
    let wrong = directory.path().join("chekpoints");
    let url = format!("file://{}", wrong.display());
    for command in [["checkpoint", "ls"], ["checkpoint", "verify"]] {
        let job: &[&str] = if command[1] == "verify" { &["job"] } else { &[] };
        let arguments = [&command[..], job, &["--url", &url, "--json"]].concat();
        let output = run("zsctl", &arguments);
        assert_eq!(output.status.code(), Some(1));
        let error: Value = serde_json::from_str(stderr(&output).trim()).unwrap();
        assert_eq!((&error["event"], &error["error"]), (&"error".into(), &"INVALID".into()));
        assert!(!wrong.exists());
    }
    let fits = |memory: &str| {
        let arguments = ["plan", "--parameters", "7B", "--servers", "2", "--memory", memory];
        run("zsctl", &arguments).status.code()
    };
    assert_eq!((fits("64GiB"), fits("8")), (Some(0), Some(PROBLEM)));

    let mut child = Command::new(binary("zsctl"));
    child.args(["completion", "bash"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn an_admin_port_that_other_machines_reach_needs_a_token() {
    let mut command = Command::new(binary("zeroshard-server"));
    command.args(["coordinator", "--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0"]);
    command.env_remove("ZEROSHARD_TOKEN");
    let output = command.output().unwrap();
    assert!(!output.status.success());
    assert!(stderr(&output).contains("--insecure"), "{}", stderr(&output));
}

#[tokio::test]
async fn a_cluster_permits_checkpoints_below_a_prefix_only() {
    let coordinator = Cluster::coordinator_with(&["--checkpoint-urls", "file:///tmp/permitted"]);
    let client = connect(coordinator.address()).await;
    let checkpoints = Some(policy(Path::new("/tmp/permitted/../etc"), 1));
    let refused = client.create_job(&JobSpec { checkpoints, ..spec("a", 1) }).await;
    assert!(matches!(refused, Err(zeroshard_client::Error::Invalid { .. })), "{refused:?}");
    for name in [" ", "a\u{202e}b"] {
        let refused = client.create_job(&spec(name, 1)).await;
        assert!(matches!(refused, Err(zeroshard_client::Error::Invalid { .. })), "{refused:?}");
    }
}
