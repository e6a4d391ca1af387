//! A cluster with a file of tokens: a token permits what its role says.
//!
//! promise: invalid-input

use std::path::Path;

use futures_util::stream;
use serde_json::Value;
use tempfile::TempDir;
use zeroshard_client::{Cluster as Client, CreateJob, Error, Job, Options, Result};
use zeroshard_model::{JobSpec, JobVersion};
use zeroshard_net::{
    Token,
    transport::{Connection, Credentials},
};
use zeroshard_proto::{
    pb::{
        self, coordinator_service_client::CoordinatorServiceClient,
        data_service_client::DataServiceClient, shard_service_client::ShardServiceClient,
    },
    status::from_status,
};
use zeroshard_tests::{Cluster, Process, Training, run, stock, synthetic, training};

use crate::{adamw, job, options, until};

/// A cluster, and the tokens of its file by role.
pub(crate) struct Guarded {
    cluster: Cluster,
    directory: TempDir,
    tokens: Vec<(String, String)>,
}

/// A new token and its line in the file, from `zsctl`.
pub(crate) fn new_token(role: &str) -> (String, String) {
    new_token_with(role, &[])
}

/// Creates a token with limits. Returns the token and its line in the file.
pub(crate) fn new_token_with(role: &str, limits: &[&str]) -> (String, String) {
    let output = run("zsctl", &[&["--json", "token", "new", role], limits].concat());
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |key: &str| made[key].as_str().unwrap().to_owned();
    (text("token"), text("line"))
}

impl Guarded {
    fn start(roles: &[&str]) -> Self {
        Self::start_with(roles.iter().map(|role| (*role, new_token(role))))
    }

    /// Starts a cluster with these tokens. One of them must have the role `server`.
    pub(crate) fn start_with<'a>(
        with: impl IntoIterator<Item = (&'a str, (String, String))>,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (mut tokens, mut lines) = (Vec::new(), String::new());
        for (role, (token, line)) in with {
            lines += &format!("{line}\n");
            tokens.push((role.to_owned(), token));
        }
        let file = directory.path().join("tokens");
        std::fs::write(&file, lines).unwrap();
        let flags = ["--tokens", file.to_str().unwrap()];
        let coordinator = Cluster::coordinator_with(&flags);
        let cluster = Cluster { coordinator, shards: Vec::new() };
        let mut guarded = Self { cluster, directory, tokens };
        let own = guarded.token("server").to_owned();
        guarded.cluster.shards.push(guarded.shard(&own));
        guarded
    }

    fn file(&self) -> std::path::PathBuf {
        self.directory.path().join("tokens")
    }

    fn shard(&self, token: &str) -> Process {
        let file = self.file();
        let flags = ["--tokens", file.to_str().unwrap(), "--token", token];
        Cluster::shard(self.cluster.address(), &flags)
    }

    pub(crate) fn address(&self) -> &str {
        self.cluster.address()
    }

    pub(crate) fn token(&self, role: &str) -> &str {
        &self.tokens.iter().find(|(of, _)| of == role).unwrap().1
    }

    fn options(&self, role: &str) -> Options {
        options().token(self.token(role).to_owned().into())
    }

    /// Opens a connection to a server with the token of a role.
    fn connection(&self, address: &str, role: &str) -> Connection {
        let token = Token::from(self.token(role).to_owned());
        Connection::lazy(address, &Credentials::new(&token, None).unwrap()).unwrap()
    }

    pub(crate) async fn client(&self, role: &str) -> Client {
        Client::connect(self.cluster.address(), self.options(role)).await.unwrap()
    }

    /// Creates a small job with one rank at version 0, and returns the rank.
    pub(crate) async fn rank(&self, role: &str, name: &str) -> Job {
        let spec = job(name, 1, adamw(), synthetic::small());
        let client = self.client(role).await;
        client.create_job(&spec).await.unwrap();
        let rank = client.join(name, 0).await.unwrap();
        rank.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
        rank
    }

    /// Trains a job, and returns its hash.
    async fn train(&self, role: &str, name: &str) -> Result<String> {
        let spec = job(name, 1, adamw(), synthetic::small());
        let training = Training { options: self.options(role), ..Training::new(spec) };
        training.run(self.cluster.address()).await.map(|trained| trained.hash)
    }
}

fn forbidden<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Forbidden { role, action }) => format!("{role}: {action}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_token_opens_the_jobs_of_its_role_only() {
    let guarded = Guarded::start(&["server", "admin", "job:a", "job:b", "job:a:read"]);
    let hash = guarded.train("job:a", "a").await.unwrap();
    guarded.train("job:b", "b/part").await.unwrap();
    assert!(forbidden(guarded.train("job:b", "a").await).contains("job:b"));
    forbidden(guarded.train("job:a:read", "a").await);

    let (reader, other) = (guarded.client("job:a:read").await, guarded.client("job:b").await);
    assert_eq!(reader.state_hash("a").await.unwrap(), hash);
    forbidden(other.state_hash("a").await);
    forbidden(other.describe_job("a").await);
    forbidden(other.join("a", 0).await);
    forbidden(reader.join("a", 0).await);
    forbidden(other.delete_job("a").await);
    forbidden(reader.delete_job("a").await);
    forbidden(reader.describe_job("b/part").await);
    // A job cannot take over from another one that its token does not open.
    let mut create = CreateJob::new(job("b", 1, adamw(), synthetic::small()));
    create.from = Some(JobVersion { job: "a".to_owned(), job_id: 1, version: 1 });
    forbidden(other.create_job(create).await);

    let names = async |role: &str| {
        let status = guarded.client(role).await.status().await.unwrap();
        let mut names: Vec<_> = status.jobs.into_iter().map(|job| job.name).collect();
        names.sort();
        names
    };
    assert_eq!(names("job:a:read").await, ["a"]);
    assert_eq!(names("job:b").await, ["b/part"]);
    assert_eq!(names("admin").await, ["a", "b/part"]);
    // Nor do the reports of the servers name jobs of others.
    let connection = guarded.connection(guarded.cluster.address(), "job:b");
    let mut raw = CoordinatorServiceClient::new(connection);
    let status = raw.status(pb::StatusRequest::default()).await.unwrap();
    assert!(!format!("{status:?}").contains("\"a\""), "{status:?}");
    guarded.client("admin").await.delete_job("b/part").await.unwrap();
    assert_eq!(reader.state_hash("a").await.unwrap(), hash, "nothing has changed");
}

#[tokio::test]
async fn a_shard_server_checks_the_token_of_each_pull_and_push() {
    let guarded = Guarded::start(&["server", "job:a", "job:b", "job:a:read"]);
    guarded.train("job:a", "a").await.unwrap();
    let shard = guarded.cluster.shards[0].address();
    let client = |role: &str| DataServiceClient::new(guarded.connection(shard, role));
    let pull = async |role: &str| {
        let mut client = client(role);
        let read =
            async { client.pull(stock::read("a", 3, [0])).await?.into_inner().message().await };
        read.await.map(drop).map_err(|status| from_status(&status, "shard server"))
    };
    assert_eq!(pull("job:a:read").await, Ok(()));
    assert_eq!(pull("job:a").await, Ok(()));
    forbidden(pull("job:b").await);
    let follow = async |role: &str| {
        let mut client = ShardServiceClient::new(guarded.connection(shard, role));
        let changes = client.changes(pb::ChangesRequest { job: "a".into(), ..Default::default() });
        changes.await.map(drop).map_err(|status| from_status(&status, "shard server"))
    };
    assert_eq!(follow("job:a:read").await, Ok(()));
    forbidden(follow("job:b").await);
    let push = async |role: &str| {
        let contents = Some(stock::gradients(3));
        let begin = pb::PushBegin { job: "a".into(), epoch: 1, contents, ..Default::default() };
        let pushed = client(role).push(stream::iter([stock::open(begin)])).await;
        pushed.map(drop).map_err(|status| from_status(&status, "shard server"))
    };
    forbidden(push("job:b").await);
    forbidden(push("job:a:read").await);
    let with_its_token = push("job:a").await;
    assert!(!matches!(with_its_token, Err(Error::Forbidden { .. })), "{with_its_token:?}");
}

#[tokio::test]
async fn only_a_token_of_a_server_registers_a_shard_server() {
    let guarded = Guarded::start(&["server", "admin", "job:a"]);
    until("the server has joined", || guarded.cluster.shards[0].get("/readyz") == "ready\n").await;
    let strangers = ["admin", "job:a"].map(|role| guarded.shard(guarded.token(role)));
    let refused = "code=\"PermissionDenied\",method=\"/zeroshard.v1.CoordinatorService/Serve\"";
    let refusals = || {
        let metrics = guarded.cluster.coordinator.get("/metrics");
        let line = metrics.lines().find(|line| line.contains(refused))?;
        line.rsplit(' ').next()?.parse::<f64>().ok()
    };
    until("the strangers are refused", || refusals().is_some_and(|refusals| refusals >= 4.0)).await;
    assert!(strangers.iter().all(|stranger| stranger.get("/readyz") == "not ready\n"));
    assert_eq!(guarded.client("admin").await.status().await.unwrap().servers.len(), 1);
}

#[tokio::test]
async fn only_an_admin_cordons_and_drains_servers_and_evicts_ranks() {
    let guarded = Guarded::start(&["server", "admin", "job:a"]);
    guarded.train("job:a", "a").await.unwrap();
    let server = guarded.cluster.shards[0].address();
    for role in ["server", "job:a"] {
        let client = guarded.client(role).await;
        assert!(forbidden(client.cordon_server(server, true).await).contains(role));
        forbidden(client.drain_server(server, false).await);
        forbidden(client.evict_rank("a", 0).await);
    }
    let admin = guarded.client("admin").await;
    assert!(!admin.status().await.unwrap().servers[0].cordoned, "nothing has changed");
    assert_eq!(admin.cordon_server(server, true).await.unwrap().address, server);
    assert!(admin.status().await.unwrap().servers[0].cordoned);
}

#[tokio::test]
async fn servers_with_their_own_tokens_build_backups_from_each_other() {
    let mut guarded = Guarded::start(&["server", "job:a"]);
    let own = guarded.token("server").to_owned();
    guarded.cluster.shards.extend([guarded.shard(&own), guarded.shard(&own)]);
    let spec =
        JobSpec { replicas: 2, min_servers: 3, ..job("a", 1, adamw(), synthetic::kinds(&adamw())) };
    let client = guarded.client("job:a").await;
    client.create_job(&spec).await.unwrap();
    let rank = client.join("a", 0).await.unwrap();
    rank.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    until("the rank knows of version 0", || rank.version() == Some(0)).await;
    assert!(training::step(&rank, 0).await.unwrap().applied);
    let before = client.state_hash("a").await.unwrap();
    guarded.cluster.shards.remove(0).kill();
    let placed = async || client.describe_job("a").await.map(|job| job.placement.servers().len());
    while placed().await.unwrap_or(3) > 2 {
        tokio::task::yield_now().await;
    }
    // The lost slices are copied from one server to the other.
    let is_redundant = || {
        let metrics = guarded.cluster.coordinator.get("/metrics");
        metrics.contains("zeroshard_job_degraded_slices{job=\"a\"} 0\n")
            && metrics.contains("zeroshard_servers 2\n")
    };
    until("the job has all its backups", is_redundant).await;
    assert_eq!(client.state_hash("a").await.unwrap(), before);
}

#[tokio::test]
async fn tokens_are_added_and_revoked_without_a_restart() {
    let guarded = Guarded::start(&["server", "job:a"]);
    guarded.train("job:a", "a").await.unwrap();
    let (token, line) = new_token("job:a");
    let (_, server) = (guarded.token("server"), std::fs::read_to_string(guarded.file()).unwrap());
    let server = server.lines().next().unwrap();
    std::fs::write(guarded.file(), format!("{server}\n{line}\n")).unwrap();
    let status = |token: &str| {
        let arguments = ["--address", guarded.cluster.address(), "--token", token, "status"];
        run("zsctl", &arguments).status.success()
    };
    until("the new token is accepted", || status(&token)).await;
    assert!(!status(guarded.token("job:a")), "the old one is not");
}

#[test]
fn a_wrong_file_of_tokens_ends_the_start_with_the_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens");
    std::fs::write(&file, "admin blake3:12\n").unwrap();
    let refused = |file: &Path| {
        let output = run("zeroshard-server", &["coordinator", "--tokens", file.to_str().unwrap()]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(refused(&file).contains("line 1"));
    assert!(refused(&directory.path().join("missing")).contains("missing"));
}
