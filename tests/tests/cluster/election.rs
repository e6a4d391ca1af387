//! Several coordinators, of which etcd makes one the leader.
//!
//! promise: no-silent-hang, durability

use std::{
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use zeroshard_client::Job;
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Etcd, Process, Training, binary, synthetic, training};

use crate::{adamw, job, start, tls::Certificates, until};

fn spec(name: &str) -> JobSpec {
    JobSpec { min_servers: 3, ..job(name, 2, adamw(), synthetic::kinds(&adamw())) }
}

/// Three coordinators and three shard servers.
struct Elected {
    coordinators: Vec<Process>,
    /// The addresses of the coordinators, separated by commas.
    addresses: String,
    shards: Vec<Process>,
    etcd: Etcd,
    seconds: u64,
}

impl Elected {
    /// Another coordinator is elected when the leader has been silent for `seconds`.
    async fn start(seconds: u64) -> Self {
        let etcd = Etcd::start();
        let candidate = |_| Cluster::candidate("127.0.0.1:0", etcd.address(), seconds);
        let coordinators: Vec<_> = (0..3).map(candidate).collect();
        let addresses = coordinators.iter().map(Process::address).collect::<Vec<_>>().join(",");
        let shards = (0..3).map(|_| Cluster::shard(&addresses, &[])).collect();
        let cluster = Self { coordinators, addresses, shards, etcd, seconds };
        cluster.next_leader(None).await;
        cluster
    }

    /// The leader, if there is one. A standby is not ready.
    fn leader(&self) -> Option<usize> {
        self.coordinators.iter().position(is_ready)
    }

    /// Waits until there is a leader other than `last`.
    async fn next_leader(&self, last: Option<usize>) -> usize {
        let other = || self.leader().filter(|&leader| Some(leader) != last);
        until("another coordinator is the leader", || other().is_some()).await;
        other().unwrap()
    }

    /// Kills a coordinator, and starts it again.
    fn restart(&mut self, coordinator: usize) {
        let address = self.coordinators[coordinator].address().to_owned();
        self.coordinators[coordinator].kill();
        self.coordinators[coordinator] =
            Cluster::candidate(&address, self.etcd.address(), self.seconds);
    }
}

fn is_ready(coordinator: &Process) -> bool {
    coordinator.get("/readyz") == "ready\n"
}

async fn calm(steps: u64) -> String {
    let cluster = Cluster::start(3);
    let run = Training { steps, ..Training::new(spec("calm")) };
    run.run(cluster.address()).await.unwrap().hash
}

async fn train(jobs: &[Job], steps: std::ops::Range<u64>, done: &AtomicU64) {
    let rank = async |job: &Job| {
        for step in steps.clone() {
            training::step(job, step).await.unwrap();
            done.fetch_max(step, Ordering::Relaxed);
        }
    };
    tokio::join!(rank(&jobs[0]), rank(&jobs[1]));
}

#[tokio::test]
async fn another_coordinator_continues_the_run_when_the_leader_dies() {
    const STEPS: u64 = 30;
    let mut cluster = Elected::start(4).await;
    let jobs = start(&cluster.addresses, &spec("elected")).await;
    let (epoch, done) = (jobs[0].epoch(), AtomicU64::new(0));
    let addresses = cluster.addresses.clone();
    let kills = async {
        for kill in 1..3 {
            until("the next kill is due", || done.load(Ordering::Relaxed) >= kill * 10).await;
            let leader = cluster.leader().unwrap();
            cluster.restart(leader);
            cluster.next_leader(Some(leader)).await;
        }
    };
    tokio::join!(train(&jobs, 0..STEPS, &done), kills);
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), calm(STEPS).await);
    assert_eq!(jobs[0].epoch(), epoch);
    // A client that starts now finds the leader, too.
    let status = crate::connect(&addresses).await.status().await.unwrap();
    assert_eq!((status.servers.len(), status.jobs.len()), (3, 1));
    drop(cluster.shards);
}

#[tokio::test]
async fn a_leader_that_stood_still_for_too_long_decides_nothing_and_becomes_a_standby() {
    let mut cluster = Elected::start(4).await;
    let jobs = start(&cluster.addresses, &spec("still")).await;
    let done = AtomicU64::new(0);
    train(&jobs, 0..2, &done).await;
    let first = cluster.leader().unwrap();
    cluster.coordinators[first].stand_still(Duration::from_secs(6));
    // The gradients are sent, and the commits wait at the leader that stands still.
    train(&jobs, 2..6, &done).await;
    let second = cluster.next_leader(Some(first)).await;
    until("the old leader is a standby", || !is_ready(&cluster.coordinators[first])).await;
    // A leader that is stopped gives its leadership back, and each of the others may follow.
    assert!(cluster.coordinators.remove(second).stop().success());
    train(&jobs, 6..8, &done).await;
    assert_eq!(jobs[0].state_hash(8).await.unwrap(), calm(8).await);
}

#[tokio::test]
async fn the_run_continues_soon_after_the_leaders_machine_is_lost_without_a_word() {
    let cluster = Elected::start(4).await;
    let jobs = start(&cluster.addresses, &spec("silent")).await;
    let done = AtomicU64::new(0);
    train(&jobs, 0..2, &done).await;
    // Its connections stay open, and no packet comes.
    cluster.coordinators[cluster.leader().unwrap()].stand_still(Duration::from_secs(600));
    let began = Instant::now();
    train(&jobs, 2..4, &done).await;
    // The probes of HTTP/2 take half a minute to find it.
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(jobs[0].state_hash(4).await.unwrap(), calm(4).await);
}

#[tokio::test]
async fn a_short_restart_of_etcd_is_not_noticed() {
    let mut cluster = Elected::start(20).await;
    let jobs = start(&cluster.addresses, &spec("short")).await;
    let (leader, done) = (cluster.leader(), AtomicU64::new(0));
    train(&jobs, 0..2, &done).await;
    cluster.etcd.restart();
    train(&jobs, 2..4, &done).await;
    assert_eq!(cluster.leader(), leader);
    assert_eq!(jobs[0].state_hash(4).await.unwrap(), calm(4).await);
}

#[tokio::test]
async fn the_leader_stops_deciding_while_it_cannot_reach_etcd_and_the_run_continues_afterwards() {
    let mut cluster = Elected::start(4).await;
    let jobs = start(&cluster.addresses, &spec("silent")).await;
    let (epoch, done) = (jobs[0].epoch(), AtomicU64::new(0));
    train(&jobs, 0..2, &done).await;
    cluster.etcd.kill();
    until("there is no leader", || cluster.leader().is_none()).await;
    // The ranks begin without a leader.
    tokio::join!(train(&jobs, 2..4, &done), async { cluster.etcd.restart() });
    assert_eq!(jobs[0].state_hash(4).await.unwrap(), calm(4).await);
    assert_eq!(jobs[0].epoch(), epoch);
}

/// The flags of a candidate with the certificate of an operator, for an etcd with TLS.
fn tls_flags(etcd: &Etcd, certificates: &Certificates) -> [String; 4] {
    let file = |flag: &str, name: &str| format!("--{flag}={}", certificates.path(name).display());
    [
        format!("--election=https://{}", etcd.address()),
        file("etcd-ca", "ca.pem"),
        file("etcd-cert", "admin.pem"),
        file("etcd-key", "admin-key.pem"),
    ]
}

#[tokio::test]
async fn an_etcd_with_tls_elects_a_leader_and_the_next_one() {
    let certificates = Certificates::new(&[]);
    let etcd = Etcd::with_tls(certificates.path("").as_path());
    let flags = tls_flags(&etcd, &certificates);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let candidate = |_| Cluster::candidate_with("127.0.0.1:0", &flags);
    let mut coordinators: Vec<_> = (0..2).map(candidate).collect();
    until("there is a leader", || coordinators.iter().any(is_ready)).await;
    let leader = coordinators.iter().position(is_ready).unwrap();
    assert!(coordinators.remove(leader).stop().success());
    until("the other one is the leader", || is_ready(&coordinators[0])).await;
}

/// The first warning of a coordinator about its election.
async fn election_warning(flags: &[String]) -> String {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(binary("zeroshard-server"));
    let addresses = ["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
    command.arg("coordinator").args(addresses).arg("--json").args(flags);
    command.stderr(log.reopen().unwrap());
    let _coordinator = Process::start(command);
    let warning = || {
        let text = std::fs::read_to_string(log.path()).unwrap();
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        lines.find(|line| line.contains("the election failed")).map(str::to_owned)
    };
    until("the coordinator logs why it is not elected", || warning().is_some()).await;
    warning().unwrap()
}

#[tokio::test]
async fn a_coordinator_and_an_etcd_that_do_not_trust_each_other_are_told_what_to_do() {
    let (certificates, stranger) = (Certificates::new(&[]), Certificates::new(&[]));
    let etcd = Etcd::with_tls(certificates.path("").as_path());
    let flags = tls_flags(&etcd, &certificates);
    let untrusting = election_warning(&tls_flags(&etcd, &stranger)).await;
    assert!(untrusting.contains("set --etcd-ca to the authority"), "{untrusting}");
    let anonymous = election_warning(&flags[..2]).await;
    assert!(anonymous.contains("set --etcd-cert and --etcd-key to"), "{anonymous}");
    let named = flags.each_ref().map(|flag| flag.replace("127.0.0.1", "127.0.0.2"));
    let other_name = election_warning(&named).await;
    assert!(other_name.contains("not for 127.0.0.2"), "{other_name}");
    let open = Etcd::start();
    let plain = election_warning(&tls_flags(&open, &certificates)).await;
    assert!(plain.contains("may not use TLS"), "{plain}");
}
