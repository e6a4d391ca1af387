//! Readers need not trust a mirror: they compare what it sends with the hashes of the servers.
//!
//! promise: consistent-reads

use std::{
    pin::Pin,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use futures_util::{Stream, StreamExt};
use tokio::net::TcpListener;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Server, server::TcpIncoming},
};
use zeroshard_client::{Copied, Follow};
use zeroshard_model::TensorSpec;
use zeroshard_proto::pb::{
    self,
    mirror_service_client::MirrorServiceClient,
    mirror_service_server::{MirrorService, MirrorServiceServer},
};
use zeroshard_tests::{Cluster, Process, binary};

use crate::{
    adamw, connect,
    follow::{Reader, Truth},
    job,
    replicas::step,
    start,
};

/// What the process between a mirror and its readers does.
#[derive(Default)]
struct Plan {
    /// How many full copies get a wrong value from now on.
    wrong_copies: AtomicU32,
    /// How many responses with changes say from now on that nothing has changed.
    empty_changes: AtomicU32,
    /// How many calls have arrived.
    changes: AtomicU32,
    copies: AtomicU32,
}

impl Plan {
    /// Returns whether something is still to be done, and counts it.
    fn takes(number: &AtomicU32) -> bool {
        number.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

/// Passes on what a mirror sends, and changes some of it.
struct Liar {
    plan: Arc<Plan>,
    mirror: MirrorServiceClient<Channel>,
    /// The hash of the only slice at the version that the readers have.
    hash: Arc<std::sync::Mutex<u64>>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl MirrorService for Liar {
    type ChangesStream = Answers<pb::ChangesResponse>;

    async fn changes(
        &self,
        request: Request<pb::ChangesRequest>,
    ) -> Result<Response<Self::ChangesStream>, Status> {
        self.plan.changes.fetch_add(1, Relaxed);
        let is_for_changes = request.get_ref().from.is_some();
        let lies = is_for_changes && Plan::takes(&self.plan.empty_changes);
        let answers = self.mirror.clone().changes(request).await?.into_inner();
        let hash = self.hash.clone();
        let answers = answers.map(move |answer| {
            answer.map(|mut answer| {
                for part in &mut answer.changes {
                    let mut before = hash.lock().unwrap();
                    match lies {
                        // One block without changes. The hash is that of the old values.
                        true => (part.change, part.hash) = (vec![0].into(), Some(*before)),
                        false => *before = part.hash.unwrap(),
                    }
                }
                answer
            })
        });
        Ok(Response::new(answers.boxed()))
    }

    type CopyStream = Answers<pb::CopyResponse>;

    async fn copy(
        &self,
        request: Request<pb::CopyRequest>,
    ) -> Result<Response<Self::CopyStream>, Status> {
        self.plan.copies.fetch_add(1, Relaxed);
        let lies = Plan::takes(&self.plan.wrong_copies);
        let answers = self.mirror.clone().copy(request).await?.into_inner();
        let answers = answers.map(move |answer| {
            answer.map(|mut answer| {
                let mut values = answer.values.to_vec();
                values[5] ^= u8::from(lies);
                answer.values = values.into();
                answer
            })
        });
        Ok(Response::new(answers.boxed()))
    }
}

/// Starts a mirror of a job, and a server that lies in its name. Returns the address of the latter.
async fn lying(cluster: &Cluster, job: &str) -> (Process, String, Arc<Plan>) {
    let mut command = Command::new(binary("zsctl"));
    command.args(["--json", "--address", cluster.address(), "mirror", job]);
    command.args(["--listen", "127.0.0.1:0"]);
    let process = Process::start(command);
    let mirror = MirrorServiceClient::connect(format!("http://{}", process.address())).await;
    let (plan, mirror) = (Arc::new(Plan::default()), mirror.unwrap());
    let liar = Liar { plan: plan.clone(), mirror, hash: Arc::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = Server::builder().add_service(MirrorServiceServer::new(liar));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    (process, address, plan)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_values_of_a_mirror_never_become_a_version_of_a_reader() {
    let cluster = Cluster::start(1);
    let spec = job("lied", 1, adamw(), vec![TensorSpec::new("w", [5000])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let (_mirror, address, plan) = lying(&cluster, "lied").await;
    let follow = Follow { mirror: Some(address), ..Follow::default() };
    let mut reader = Reader::with(&client, "lied", follow).await;
    plan.wrong_copies.store(2, Relaxed);
    truth.record(&trainer, 0).await;
    // The wrong copies were given up.
    assert_eq!(reader.next().await.copied(), Some(Copied::Interrupted));
    truth.check(&reader).await;
    assert_eq!(plan.copies.load(Relaxed), 3, "two wrong copies and a right one");

    for number in 0..6 {
        step(&trainer, number).await;
        truth.record(&trainer, number + 1).await;
        // From its first change on, the process knows the hash.
        let lies = number % 2 == 1;
        plan.empty_changes.store(lies.into(), Relaxed);
        let version = reader.next().await;
        assert_eq!(version.version().version, number + 1);
        assert_eq!(version.copied(), lies.then_some(Copied::Differed), "version {}", number + 1);
        truth.check(&reader).await;
    }
    assert_eq!(plan.empty_changes.load(Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_copy_asks_a_mirror_once_for_the_newest_version() {
    let cluster = Cluster::start(1);
    let spec = job("asked", 1, adamw(), vec![TensorSpec::new("w", [5000])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let (_mirror, address, plan) = lying(&cluster, "asked").await;
    truth.record(&trainer, 0).await;
    let follow = Follow { mirror: Some(address), ..Follow::default() };
    let mut warm = Reader::with(&client, "asked", follow.clone()).await;
    // The mirror has the version when this reader has it.
    warm.next().await;
    let before = [&plan.changes, &plan.copies].map(|calls| calls.load(Relaxed));
    let mut reader = Reader::with(&client, "asked", follow).await;
    assert_eq!(reader.next().await.copied(), Some(Copied::Joined));
    truth.check(&reader).await;
    let after = [&plan.changes, &plan.copies].map(|calls| calls.load(Relaxed));
    assert_eq!([after[0] - before[0], after[1] - before[1]], [1, 1]);
}
