//! The service over real connections, with a shard server that only speaks the control stream.

use std::net::SocketAddr;

use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming, transport::Channel};
use zeroshard_proto::pb::{
    coordinator_client::CoordinatorClient, server_command::Command, server_event::Event as Said,
};

use super::*;
use crate::{
    config::Common,
    coordinator::Coordinator,
    health::Health,
    metrics::Metrics,
    serve::{Context, serve},
};

struct Fixture {
    address: SocketAddr,
    shutdown: CancellationToken,
    server: JoinHandle<()>,
    context: Context,
}

impl Fixture {
    async fn start() -> Self {
        Self::start_with(Common::default()).await
    }

    async fn start_with(common: Common) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let context = Context { common, metrics: Metrics::new(), health: Health::new().await };
        let coordinator = Coordinator::new(context.clone());
        let shutdown = CancellationToken::new();
        let (token, used) = (shutdown.clone(), context.clone());
        let server = tokio::spawn(async move {
            let serving = serve(listener, coordinator.routes(), &used, token.clone());
            tokio::join!(serving, coordinator.run(token)).0.unwrap();
        });
        Self { address, shutdown, server, context }
    }

    async fn client(&self) -> CoordinatorClient<Channel> {
        CoordinatorClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.server.await.unwrap();
    }
}

/// A shard server that holds nothing, and says what it is told to say.
struct FakeShard {
    say: mpsc::UnboundedSender<pb::ServerEvent>,
    commands: Streaming<pb::ServerCommand>,
}

impl FakeShard {
    async fn connect(client: &mut CoordinatorClient<Channel>, address: &str) -> Result<Self, Status> {
        let (say, events) = mpsc::unbounded_channel();
        let hello = Said::Hello(pb::Hello { address: address.to_owned(), ..Default::default() });
        say.send(pb::ServerEvent { event: Some(hello) }).unwrap();
        let commands = client.serve(UnboundedReceiverStream::new(events)).await?.into_inner();
        let mut shard = Self { say, commands };
        assert!(matches!(shard.next().await, Command::Welcome(_)));
        Ok(shard)
    }

    async fn next(&mut self) -> Command {
        self.commands.message().await.unwrap().expect("open").command.expect("known")
    }

    fn say(&self, event: Said) {
        self.say.send(pb::ServerEvent { event: Some(event) }).unwrap();
    }

    /// Opens the job and has its parameters; its epoch.
    async fn open(&mut self) -> u64 {
        let Command::Open(open) = self.next().await else { panic!("OpenJob") };
        let (job, epoch) = (open.spec.unwrap().name, open.epoch);
        self.say(Said::Opened(pb::JobOpened { job: job.clone(), epoch, ..Default::default() }));
        self.say(Said::Initialised(pb::JobInitialised { job, epoch, ..Default::default() }));
        epoch
    }
}

fn create(world: u32, wait_ms: u32) -> pb::CreateJobRequest {
    pb::CreateJobRequest { spec: Some((&spec(world)).into()), wait_ms }
}

fn error(result: Result<impl std::fmt::Debug, Status>) -> Error {
    Error::from_status(&result.expect_err("an error"), "coordinator")
}

async fn membership(stream: &mut Streaming<pb::Membership>) -> pb::Membership {
    stream.message().await.unwrap().expect("open")
}

#[tokio::test]
async fn a_job_trains_a_step_over_the_wire() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut client, "127.0.0.1:1").await.unwrap();
    let (created, epoch) = tokio::join!(client.create_job(create(1, 0)), shard.open());
    assert_eq!(created.unwrap().into_inner().epoch, epoch);

    let join = pb::JoinRequest { job: "job".into(), rank: 0, address: String::new(), ..Default::default() };
    let mut stream = client.join(join).await.unwrap().into_inner();
    let mut member = membership(&mut stream).await;
    if member.version.is_none() {
        member = membership(&mut stream).await;
    }
    assert_eq!((member.epoch, member.version), (epoch, Some(0)));

    let ready = pb::StepReady {
        job: "job".into(),
        epoch,
        step: 0,
        slices: vec![0, 2],
        sums_of_squares: vec![1.0, 3.0],
        overflow: None,
        absent: Vec::new(),
    };
    shard.say(Said::Ready(ready));
    let commit = pb::CommitRequest { job: "job".into(), lease: member.lease, epoch, ..Default::default() };
    let report = client.commit(commit).await.unwrap().into_inner();
    assert_eq!((report.version, report.gradient_norm), (1, 2.0));
    let Command::Decide(decision) = shard.next().await else { panic!("Decision") };
    assert!(decision.apply && decision.step == 0);

    let metrics = fixture.context.metrics.text();
    for line in [
        "zeroshard_job_version{job=\"job\"} 1",
        "zeroshard_steps_total{outcome=\"applied\"} 1",
        "zeroshard_requests_total{code=\"Ok\",method=\"/zeroshard.v1.Coordinator/Commit\"} 1",
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    let leave = pb::LeaveRequest { job: "job".into(), lease: member.lease, ..Default::default() };
    client.leave(leave).await.unwrap();
    assert!(stream.message().await.unwrap().is_none(), "the stream ends with the lease");
    fixture.stop().await;
}

#[tokio::test]
async fn a_worker_that_disconnects_is_lost() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut client, "127.0.0.1:1").await.unwrap();
    let (created, epoch) = tokio::join!(client.create_job(create(2, 0)), shard.open());
    created.unwrap();
    let join =
        |rank| pb::JoinRequest { job: "job".into(), rank, address: String::new(), ..Default::default() };
    let mut stays = client.join(join(0)).await.unwrap().into_inner();
    let goes = fixture.client().await.join(join(1)).await.unwrap();
    assert_eq!(membership(&mut stays).await.epoch, epoch);
    drop(goes);
    let Command::NewEpoch(new) = shard.next().await else { panic!("NewEpoch") };
    assert!(new.epoch > epoch);
    let mut told = membership(&mut stays).await;
    while told.epoch == epoch {
        told = membership(&mut stays).await;
    }
    assert_eq!(told.epoch, new.epoch);
    fixture.stop().await;
}

#[tokio::test]
async fn a_shard_that_disconnects_fails_the_job() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut fixture.client().await, "127.0.0.1:1").await.unwrap();
    let (created, _) = tokio::join!(client.create_job(create(1, 0)), shard.open());
    created.unwrap();
    let join = pb::JoinRequest { job: "job".into(), rank: 0, address: String::new(), ..Default::default() };
    let mut stream = client.join(join).await.unwrap().into_inner();
    drop(shard);
    let ended = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    assert!(matches!(error(ended), Error::JobFailed { .. }));
    let status = client.status(pb::StatusRequest {}).await.unwrap().into_inner();
    assert!(status.servers.is_empty() && status.jobs[0].failure.contains("127.0.0.1:1"));
    client.delete_job(pb::DeleteJobRequest { job: "job".into(), job_id: 0 }).await.unwrap();
    let describe = pb::DescribeJobRequest { job: "job".into() };
    assert_eq!(error(client.describe_job(describe).await), Error::UnknownJob { job: "job".into() });
    fixture.stop().await;
}

#[tokio::test]
async fn the_clock_ends_a_wait() {
    let fixture = Fixture::start().await;
    let answer = fixture.client().await.create_job(create(1, 1)).await;
    assert_eq!(answer.as_ref().unwrap_err().code(), Code::DeadlineExceeded);
    assert!(matches!(error(answer), Error::Timeout { .. }));
    fixture.stop().await;
}

#[tokio::test]
async fn bad_requests_get_typed_errors_and_the_server_lives() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let field = |error| match error {
        Error::Invalid { what, .. } => what,
        other => panic!("{other:?}"),
    };
    let absent = pb::CreateJobRequest::default();
    assert_eq!(field(error(client.create_job(absent).await)), "spec");
    assert_eq!(field(error(client.create_job(create(0, 0)).await)), "world");
    assert_eq!(field(error(client.create_job(create(1, 600_001)).await)), "wait_ms");
    let replicated = JobSpec { replicas: 2, min_servers: 2, ..spec(1) };
    let replicated = pb::CreateJobRequest { spec: Some((&replicated).into()), wait_ms: 0 };
    assert_eq!(field(error(client.create_job(replicated).await)), "replicas");
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        let scaled = pb::CommitRequest { loss_scale: bad, ..Default::default() };
        assert_eq!(field(error(client.commit(scaled).await)), "loss_scale of rank 0 at step 0");
        let clipped = pb::CommitRequest { max_norm: Some(bad), ..Default::default() };
        assert_eq!(field(error(client.commit(clipped).await)), "max_norm of rank 0 at step 0");
    }
    let unknown = pb::Optimizer { name: "adamwx".into(), ..Default::default() };
    let unknown = pb::CommitRequest { groups: vec![unknown], ..Default::default() };
    assert_eq!(field(error(client.commit(unknown).await)), "optimizer");
    for address in ["", "nowhere", "host:0"] {
        let refused = FakeShard::connect(&mut client, address).await.err().expect("refused");
        assert_eq!(field(Error::from_status(&refused, "")), "address of the server");
    }
    for address in ["nowhere", "host:0", "ho st:1", &format!("{}:1", "h".repeat(300))] {
        let join =
            pb::JoinRequest { job: "job".into(), rank: 3, address: address.to_owned(), ..Default::default() };
        assert_eq!(field(error(client.join(join).await)), "address of rank 3");
    }
    client.status(pb::StatusRequest {}).await.unwrap();
    fixture.stop().await;
}

#[tokio::test]
async fn a_stopping_coordinator_answers_everybody() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut fixture.client().await, "127.0.0.1:1").await.unwrap();
    let (created, epoch) = tokio::join!(client.create_job(create(2, 0)), shard.open());
    created.unwrap();
    let mut stream = client
        .join(pb::JoinRequest { job: "job".into(), rank: 0, address: String::new(), ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    let lease = membership(&mut stream).await.lease;
    let commit = pb::CommitRequest { job: "job".into(), lease, epoch, ..Default::default() };
    let mut other = client.clone();
    let waiting = tokio::spawn(async move { other.commit(commit).await });
    // The commit is in once the coordinator counts it among the open calls.
    let in_flight = "zeroshard_requests_in_flight{method=\"/zeroshard.v1.Coordinator/Commit\"} 1";
    while !fixture.context.metrics.text().contains(in_flight) {
        tokio::task::yield_now().await;
    }
    fixture.stop().await;
    assert!(matches!(error(waiting.await.unwrap()), Error::Unavailable { .. }));
    let ended = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    assert!(matches!(error(ended), Error::Unavailable { .. }));
    assert!(shard.commands.message().await.is_ok_and(|last| last.is_none()));
}

#[tokio::test]
async fn health_and_reflection_answer() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let fixture = Fixture::start().await;
    let channel = Channel::from_shared(format!("http://{}", fixture.address)).unwrap();
    let mut health = HealthClient::new(channel.connect().await.unwrap());
    fixture.context.health.until_ready().await;
    for service in ["", "liveness", "readiness", "zeroshard.v1.Coordinator"] {
        let request = HealthCheckRequest { service: service.into() };
        assert_eq!(health.check(request).await.unwrap().into_inner().status, 1, "{service:?} is serving");
    }
    fixture.stop().await;
}

#[tokio::test]
async fn a_stream_without_end_does_not_hold_up_the_end() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let fixture = Fixture::start_with(Common { drain_seconds: 0, ..Common::default() }).await;
    let channel = Channel::from_shared(format!("http://{}", fixture.address)).unwrap();
    let mut health = HealthClient::new(channel.connect().await.unwrap());
    let watch = health.watch(HealthCheckRequest { service: "liveness".into() }).await.unwrap();
    fixture.stop().await;
    drop(watch);
}
