//! Tests of the admin port: access control, the status page, and the audit log.
//!
//! promise: invalid-input

use std::{
    fs::File,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::Command,
};

use serde_json::Value;
use zeroshard_client::{Cluster as Client, Error};
use zeroshard_tests::{Cluster, Process, Training, binary, synthetic};

use crate::{adamw, job, options, roles::new_token, sgd, start, tls::Certificates, until};

/// The credential `root:s3cret` in base64.
const BASIC: &str = "Basic cm9vdDpzM2NyZXQ=";

/// Sends `GET path` to the admin port, and returns the status code, headers and body of the answer.
fn get(process: &Process, path: &str, authorization: Option<&str>) -> String {
    let mut stream = TcpStream::connect(process.admin().replace("0.0.0.0", "127.0.0.1")).unwrap();
    let credential = authorization.map(|of| format!("authorization: {of}\r\n")).unwrap_or_default();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: localhost\r\n{credential}connection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.strip_prefix("HTTP/1.1 ").unwrap().to_owned()
}

/// Starts a coordinator whose admin port is reachable from other machines. It logs to `log`.
fn reachable(flags: &[&str], log: &Path) -> Process {
    let mut command = Command::new(binary("zeroshard-server"));
    command.args(["coordinator", "--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0"]);
    command.args(["--json", "--log-format", "json"]).args(flags);
    command.stderr(File::create(log).unwrap());
    Process::start(command)
}

#[test]
fn a_reachable_admin_port_requires_the_token_except_for_probes() {
    let directory = tempfile::tempdir().unwrap();
    let process = reachable(&["--token", "s3cret"], &directory.path().join("log"));
    for path in ["/", "/metrics", "/status.css", "/status.js"] {
        for wrong in [None, Some("Bearer s3cre"), Some("Basic cm9vdDpyb290"), Some("Basic ?")] {
            let answer = get(&process, path, wrong);
            assert!(answer.starts_with("401 "), "{path} {wrong:?}: {answer}");
            // A browser asks for a password.
            assert!(answer.to_lowercase().contains("\r\nwww-authenticate: basic "), "{answer}");
        }
        for right in ["Bearer s3cret", BASIC] {
            let answer = get(&process, path, Some(right));
            assert!(answer.starts_with("200 "), "{path} {right}: {answer}");
        }
    }
    assert!(get(&process, "/healthz", None).starts_with("200 "));
    assert!(get(&process, "/readyz", None).starts_with("200 "));
    // A listener on a loopback address requires no credential.
    let local = Cluster::start_guarded(0, "s3cret");
    assert!(get(&local.coordinator, "/metrics", None).starts_with("200 "));
}

#[test]
fn the_token_of_a_job_does_not_open_the_admin_port() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens");
    let tokens = ["admin", "server", "job:a", "job:a:read"].map(|role| (role, new_token(role)));
    let lines = tokens.each_ref().map(|(_, (_, line))| line.clone());
    std::fs::write(&file, lines.join("\n")).unwrap();
    let log = directory.path().join("log");
    let process = reachable(&["--tokens", file.to_str().unwrap()], &log);
    for (role, (token, _)) in &tokens {
        let expected = if role.starts_with("job") { "403 " } else { "200 " };
        let answer = get(&process, "/", Some(&format!("Bearer {token}")));
        assert!(answer.starts_with(expected), "{role}: {answer}");
    }
}

#[tokio::test]
async fn the_page_shows_jobs_and_escapes_their_names() {
    let cluster = Cluster::start(1);
    let spec = job("<script>alert(1)</script>", 1, adamw(), synthetic::small());
    Training { steps: 3, ..Training::new(spec) }.run(cluster.address()).await.unwrap();
    let spec = job("idle", 2, sgd(1.0), synthetic::small());
    start(cluster.address(), &spec).await;
    let page = get(&cluster.coordinator, "/", None);
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && !page.contains("alert(1)<"));
    for expected in
        ["Gradient norm", "slices by server", "3 applied, 0 skipped", cluster.shards[0].address()]
    {
        assert!(page.contains(expected), "{expected} is not in {page}");
    }
    for expected in ["Bytes of slices by server", "KiB <small>+ 0 B</small>"] {
        assert!(page.contains(expected), "{expected} is not in {page}");
    }
    let shard = get(&cluster.shards[0], "/", None);
    assert!(shard.contains("Slices of this server") && shard.contains("&lt;script&gt;"), "{shard}");
    // Every job can be reached, also those beyond the first ones.
    let client = crate::connect(cluster.address()).await;
    for number in 0..110 {
        let name = format!("waiting-{number:03}");
        client.create_job(&job(&name, 1, sgd(1.0), synthetic::small())).await.unwrap();
    }
    let mut found = std::collections::BTreeSet::new();
    for address in ["/", "/?jobs=2"] {
        let page = get(&cluster.coordinator, address, None);
        assert!(page.contains("of 2, 112 jobs"), "{page}");
        let names = page.split("#job-").skip(1).filter_map(|rest| rest.split(['>', '<']).nth(1));
        found.extend(names.map(str::to_owned));
    }
    assert_eq!(found.iter().filter(|name| name.starts_with("waiting-")).count(), 110);
    let page = get(&cluster.coordinator, "/", None);
    let mut links = page.split("<a href='?").filter_map(|rest| rest.split_once("#job-"));
    let link = links.find(|(query, _)| !query.contains('\'')).unwrap();
    let (query, id) = (link.0.replace("&amp;", "&"), &link.1[..16]);
    assert!(!page.contains(&format!("<section class=card id='job-{id}'")), "{page}");
    let card = get(&cluster.coordinator, &format!("/?{query}"), None);
    assert!(card.contains(&format!("<section class=card id='job-{id}'")), "{card}");
}

/// The lines of the audit log, as JSON.
fn audit(log: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "audit").collect()
}

#[tokio::test]
async fn changes_of_jobs_and_servers_are_in_the_audit_log_with_their_callers() {
    let directory = tempfile::tempdir().unwrap();
    let (file, log) = (directory.path().join("tokens"), directory.path().join("log"));
    let [server, admin, reader] = ["server", "admin", "job:a:read"].map(new_token);
    let lines = [&server, &admin, &reader].map(|(_, line)| line.clone());
    std::fs::write(&file, lines.join("\n")).unwrap();
    let flags = ["--tokens", file.to_str().unwrap()];
    let coordinator = reachable(&flags, &log);
    let mut shard =
        Cluster::shard(coordinator.address(), &[&flags[..], &["--token", &server.0]].concat());

    let client = async |token: &str| {
        let options = options().token(token.to_owned().into());
        Client::connect(coordinator.address(), options).await.unwrap()
    };
    let spec = job("a", 1, sgd(1.0), synthetic::small());
    client(&admin.0).await.create_job(&spec).await.unwrap();
    let refused = client(&reader.0).await.delete_job("a").await;
    assert!(matches!(refused, Err(Error::Forbidden { .. })), "{refused:?}");
    let url = format!("file://{}", directory.path().display());
    let unsaved = client(&admin.0).await.save_checkpoint("other", Some(&url)).await;
    assert!(matches!(unsaved, Err(Error::UnknownJob { .. })), "{unsaved:?}");
    client(&admin.0).await.delete_job("a").await.unwrap();
    client(&admin.0).await.cordon_server(shard.address(), true).await.unwrap();
    let evicted = client(&reader.0).await.evict_rank("a", 0).await;
    assert!(matches!(evicted, Err(Error::Forbidden { .. })), "{evicted:?}");
    shard.kill();
    let losses = || audit(&log).iter().filter(|line| line["verb"] == "lose server").count();
    until("the loss is logged", || losses() == 1).await;

    let stopped =
        Cluster::shard(coordinator.address(), &[&flags[..], &["--token", &server.0]].concat());
    let address = format!("{:?}", stopped.address());
    assert!(stopped.stop().success());
    until("the end is logged", || losses() == 2).await;
    let mut lines = audit(&log).into_iter().filter(|line| line["verb"] == "lose server");
    let end = lines.find(|line| line["subject"] == address).unwrap();
    assert_eq!(end["cause"], "\"it was stopped\"");
    let found = audit(&log);
    let line = |verb: &str, outcome: &str| {
        let mut lines = found.iter();
        lines.find(|line| line["verb"] == verb && line["outcome"] == outcome).unwrap_or_else(|| {
            panic!("{verb} {outcome} is not in {found:?}");
        })
    };
    // The first digits of the hash in the file of tokens.
    let short = |line: &str| line.split_once("blake3:").unwrap().1[..8].to_owned();
    for (verb, outcome, subject, (role, (_, of_token))) in [
        ("register server", "ok", shard.address(), ("server", &server)),
        ("create job", "ok", "a", ("admin", &admin)),
        ("delete job", "refused", "a", ("job:a:read", &reader)),
        ("save job", "failed", "other", ("admin", &admin)),
        ("delete job", "ok", "a", ("admin", &admin)),
        ("cordon server", "ok", shard.address(), ("admin", &admin)),
        ("evict rank", "refused", "rank 0 of job a", ("job:a:read", &reader)),
    ] {
        let line = line(verb, outcome);
        assert_eq!(line["subject"], format!("{subject:?}"), "{line}");
        assert_eq!(line["role"], format!("{role:?}"), "{line}");
        assert_eq!(line["token"], short(of_token), "{line}");
        assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
        assert_eq!(line.get("error").is_some(), outcome != "ok", "{line}");
    }
    let text = std::fs::read_to_string(&log).unwrap();
    assert!([server, admin, reader].iter().all(|(token, _)| !text.contains(token.as_str())));
}

#[tokio::test]
async fn the_audit_log_omits_the_token_of_a_caller_with_a_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let (file, log) = (directory.path().join("tokens"), directory.path().join("log"));
    std::fs::write(&file, new_token("server").1).unwrap();
    let certificates = Certificates::new(&[]);
    let mut flags = vec![format!("--tokens={}", file.display())];
    flags.extend(certificates.flags("server"));
    let coordinator = reachable(&flags.iter().map(String::as_str).collect::<Vec<_>>(), &log);
    // Nobody checks this token.
    let options = certificates.options(Some("admin")).token("unknown".to_owned().into());
    let client = Client::connect(coordinator.address(), options).await.unwrap();
    let missing = client.delete_job("missing").await;
    assert!(matches!(missing, Err(Error::UnknownJob { .. })), "{missing:?}");
    until("the request is logged", || !audit(&log).is_empty()).await;
    let line = &audit(&log)[0];
    assert_eq!((&line["verb"], &line["role"]), (&"delete job".into(), &"\"admin\"".into()));
    assert_eq!(line.get("token"), None, "{line}");
}
