//! The clients and server processes that are measured: those of ZeroShard, and the baselines.

use std::{path::Path, process::Command, time::Instant};

use tokio::task::{JoinHandle, spawn, spawn_blocking};
use zeroshard_client::{
    Cluster, Commit, Job, Options, Target, TensorData, TensorId, Transport, Values,
};
use zeroshard_model::{JobSpec, Manifest, Optimizer, TensorSpec, optimizer::Sgd};
use zeroshard_net::transport::tls::{Tls, TlsFiles};
use zeroshard_tests::{Process, binary};

use super::{Error, plain, raw};

/// A direction of a transfer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Transfer {
    Pull,
    Push,
}

/// Several clients of the same kind, each with a connection of its own.
pub(super) struct Peers {
    clients: Vec<Client>,
    /// They end when they are dropped.
    _servers: Vec<Process>,
}

impl Peers {
    /// Starts a cluster, and clients of a job each.
    pub(super) async fn ours(
        bytes: usize,
        number: usize,
        transport: Transport,
        certificates: Option<&Path>,
    ) -> Result<Self, Error> {
        let (cluster, options) = servers(certificates)?;
        let options = options.transport(Some(transport));
        let mut clients = Vec::with_capacity(number);
        for client in 0..number {
            let name = format!("transfer-{client}");
            let ours = Ours::start(cluster.address(), options.clone(), &name, bytes / 4).await?;
            clients.push(Client::Ours(Box::new(ours)));
        }
        let zeroshard_tests::Cluster { coordinator, mut shards } = cluster;
        shards.push(coordinator);
        Ok(Self { clients, _servers: shards })
    }

    /// Starts other processes of this program that serve a raw stream each.
    pub(super) fn raw(
        bytes: usize,
        number: usize,
        certificates: Option<&Path>,
    ) -> Result<Self, Error> {
        let tls = certificates.map(raw::tls).transpose()?;
        let (mut clients, mut servers) = (Vec::new(), Vec::new());
        for _ in 0..number {
            let mut command = Command::new(binary("zs-bench"));
            command.arg("serve-raw");
            if let Some(directory) = certificates {
                command.arg("--certificates").arg(directory);
            }
            let server = Process::start(command);
            let client = raw::Client::connect(server.address(), bytes, tls.as_ref())?;
            clients.push(Client::Raw(client));
            servers.push(server);
        }
        Ok(Self { clients, _servers: servers })
    }

    /// Starts another process of this program that serves generated code.
    pub(super) async fn plain(bytes: usize, number: usize) -> Result<Self, Error> {
        let mut command = Command::new(binary("zs-bench"));
        command.arg("serve-plain");
        let server = Process::start(command);
        let mut clients = Vec::with_capacity(number);
        for _ in 0..number {
            clients.push(Client::Plain(plain::Client::connect(server.address(), bytes).await?));
        }
        Ok(Self { clients, _servers: vec![server] })
    }

    /// Transfers with all clients at the same time. Returns the duration in seconds.
    pub(super) async fn timed(&mut self, transfer: Transfer) -> Result<f64, Error> {
        let began = Instant::now();
        if let [client] = &mut self.clients[..] {
            // Runs in this task, because another one would have to wake a thread for each transfer.
            client.run(transfer).await?;
        } else {
            let started: Vec<_> =
                self.clients.drain(..).map(|client| client.start(transfer)).collect();
            for ended in started {
                self.clients.push(ended.await??);
            }
        }
        Ok(began.elapsed().as_secs_f64())
    }

    /// Commits the gradients that the clients of ZeroShard have pushed.
    pub(super) async fn commit(&mut self) -> Result<(), Error> {
        for client in &mut self.clients {
            if let Client::Ours(ours) = client {
                ours.commit().await?;
            }
        }
        Ok(())
    }
}

enum Client {
    Ours(Box<Ours>),
    Raw(raw::Client),
    Plain(plain::Client),
}

impl Client {
    async fn run(&mut self, transfer: Transfer) -> Result<(), Error> {
        match (self, transfer) {
            (Self::Ours(client), Transfer::Pull) => client.pull().await,
            (Self::Ours(client), Transfer::Push) => client.push().await,
            (Self::Raw(client), _) => client.run(transfer),
            (Self::Plain(client), Transfer::Pull) => client.pull().await,
            (Self::Plain(client), Transfer::Push) => client.push().await,
        }
    }

    /// Starts a transfer, which returns the client at its end.
    fn start(self, transfer: Transfer) -> JoinHandle<Result<Self, Error>> {
        match self {
            Self::Raw(mut client) => {
                spawn_blocking(move || client.run(transfer).map(|()| Self::Raw(client)))
            }
            mut client => spawn(async move { client.run(transfer).await.map(|()| client) }),
        }
    }
}

/// Starts a coordinator and a shard server, and returns the options for clients.
fn servers(certificates: Option<&Path>) -> Result<(zeroshard_tests::Cluster, Options), Error> {
    let Some(directory) = certificates else {
        return Ok((zeroshard_tests::Cluster::start(1), Default::default()));
    };
    let file = |flag: &str, name: &str| format!("--tls-{flag}={}", directory.join(name).display());
    let flags = [file("ca", "ca.pem"), file("cert", "server.pem"), file("key", "server-key.pem")];
    let flags = [&*flags[0], &*flags[1], &*flags[2]];
    let coordinator = zeroshard_tests::Cluster::coordinator_with(&flags);
    let shards = vec![zeroshard_tests::Cluster::shard(coordinator.address(), &flags)];
    let admin = [directory.join("admin.pem"), directory.join("admin-key.pem")];
    let identity = Some(admin.into());
    let tls = Tls::open(TlsFiles { ca: directory.join("ca.pem"), identity, crl: None })?;
    let options = Options::default().tls(Some(tls));
    Ok((zeroshard_tests::Cluster { coordinator, shards }, options))
}

/// A job of one tensor, as a worker uses it.
struct Ours {
    job: Job,
    version: u64,
    gradient: Values,
    parameters: Vec<f32>,
}

impl Ours {
    async fn start(
        address: &str,
        options: Options,
        name: &str,
        numel: usize,
    ) -> Result<Self, Error> {
        let cluster = Cluster::connect(address, options).await?;
        let manifest = Manifest::new(vec![TensorSpec::new("tensor", [numel as u64])])?;
        let spec = JobSpec::new(name, manifest, vec![Optimizer::Sgd(Sgd::default())]);
        cluster.create_job(&spec).await?;
        let job = cluster.join(name, 0).await?;
        let gradient = Values::from(vec![0.5f32; numel]);
        job.initialise(vec![TensorData::new(TensorId::new(0), gradient.clone())]).await?;
        Ok(Self { job, version: 0, gradient, parameters: vec![0.0; numel] })
    }

    async fn pull(&mut self) -> Result<(), Error> {
        let target = Target::new(TensorId::new(0), &mut self.parameters);
        Ok(self.job.pull(self.version, vec![target]).await?)
    }

    async fn push(&self) -> Result<(), Error> {
        let gradient = TensorData::new(TensorId::new(0), self.gradient.clone());
        Ok(self.job.attempt(self.version)?.push(vec![gradient]).await?)
    }

    async fn commit(&mut self) -> Result<(), Error> {
        self.version = self.job.attempt(self.version)?.commit(Commit::default()).await?.version;
        // Wait for the step, so that it does not take time from the next measurement.
        self.pull().await
    }
}
