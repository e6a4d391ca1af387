//! The service over real connections, with a shard server that implements only the control stream.

use std::{net::SocketAddr, sync::Arc, task, time::Instant};

use prost::Message;
use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status, Streaming, transport::Channel};
use zeroshard_coordinator::cluster::context::JobLimits;
use zeroshard_model::{name::server_id, version::VERSION};
use zeroshard_proto::{
    pb::{
        self, coordinator_service_client::CoordinatorServiceClient,
        serve_request::Event as ServerEvent, serve_response::Command,
    },
    status::from_status,
};

use super::*;
use crate::{
    config::{Common, MAX_WAIT},
    coordinator::{
        Coordinator, Place,
        control::Registration,
        driver::{Driver, Host, MAX_COMMANDS},
        leadership::Leadership,
        requests::Waits,
    },
    failure::Failure,
    metrics::Metrics,
    serve::{Context, serve},
    shutdown::Shutdown,
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
        Self::start_as(Leadership::alone().unwrap(), common).await
    }

    async fn start_as(leadership: Leadership, common: Common) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let context = Context::new(common, 100, Failure::default()).await.unwrap();
        let jobs = JobLimits { timeout: None, number: 100 };
        let place = Place { address, is_new: true };
        let coordinator = Coordinator::new(context.clone(), leadership, place, jobs);
        let shutdown = CancellationToken::new();
        let (token, used) = (shutdown.clone(), context.clone());
        let server = tokio::spawn(async move {
            let token = Shutdown::at_once(token);
            let serving = serve(listener, coordinator.routes(), &used, token.clone());
            tokio::join!(serving, coordinator.run(token)).0.unwrap();
        });
        Self { address, shutdown, server, context }
    }

    async fn client(&self) -> CoordinatorServiceClient<Channel> {
        CoordinatorServiceClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.server.await.unwrap();
    }
}

/// A shard server that holds no data, accepts every lease and decision, and otherwise sends the
/// messages that the test passes in.
struct FakeShard {
    say: mpsc::UnboundedSender<pb::ServeRequest>,
    commands: mpsc::UnboundedReceiver<Result<pb::ServeResponse, Status>>,
    reader: JoinHandle<()>,
}

fn hello(address: &str) -> pb::Hello {
    pb::Hello { address: address.to_owned(), server_id: 5, incarnation: 6, ..Default::default() }
}

impl FakeShard {
    async fn connect(
        client: &mut CoordinatorServiceClient<Channel>,
        address: &str,
    ) -> Result<Self, Status> {
        Self::greet(client, hello(address)).await
    }

    async fn greet(
        client: &mut CoordinatorServiceClient<Channel>,
        hello: pb::Hello,
    ) -> Result<Self, Status> {
        let (say, events) = mpsc::unbounded_channel();
        say.send(pb::ServeRequest { event: Some(ServerEvent::Hello(hello)) }).unwrap();
        let mut stream = client.serve(UnboundedReceiverStream::new(events)).await?.into_inner();
        let (forward, commands) = mpsc::unbounded_channel();
        let answers = say.clone();
        let reader = tokio::spawn(async move {
            while let Some(command) = stream.message().await.transpose() {
                let answer =
                    command.as_ref().ok().and_then(|message| reply(message.command.as_ref()?));
                if let Some(event) = answer {
                    let _ = answers.send(pb::ServeRequest { event: Some(event) });
                }
                let _ = forward.send(command);
            }
        });
        let mut shard = Self { say, commands, reader };
        assert!(matches!(shard.next().await, Command::Welcome(_)));
        Ok(shard)
    }

    async fn next(&mut self) -> Command {
        self.next_message().await.command.expect("known")
    }

    async fn next_message(&mut self) -> pb::ServeResponse {
        self.commands.recv().await.expect("open").unwrap()
    }

    fn say(&self, event: ServerEvent) {
        self.say.send(pb::ServeRequest { event: Some(event) }).unwrap();
    }

    /// Opens the job and reports its parameters as complete. Returns the epoch and id.
    async fn open(&mut self) -> (u64, u64) {
        let Command::Open(open) = self.next().await else { panic!("OpenJob") };
        let (job, epoch, job_id) = (open.spec.unwrap().name, open.epoch, open.job_id);
        self.say(ServerEvent::Opened(pb::JobOpened { job: job.clone(), epoch, job_id }));
        self.say(ServerEvent::Initialised(pb::JobInitialised { job, epoch, job_id }));
        let Command::Publish(publish) = self.next().await else { panic!("Publish") };
        assert_eq!((publish.epoch, publish.job_id), (epoch, job_id));
        (epoch, job_id)
    }
}

impl Drop for FakeShard {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn reply(command: &Command) -> Option<ServerEvent> {
    match command.clone() {
        Command::Confirm(pb::Confirm { number }) => {
            Some(ServerEvent::Confirmed(pb::Confirmed { number }))
        }
        Command::Grant(pb::GrantLease { job, job_id, rank, lease }) => {
            Some(ServerEvent::Granted(pb::LeaseGranted { job, job_id, rank, lease }))
        }
        Command::Decide(pb::Decision { job, job_id, epoch, step, .. }) => {
            Some(ServerEvent::Stored(pb::DecisionStored { job, job_id, epoch, step }))
        }
        _ => None,
    }
}

fn join(rank: u32) -> pb::JoinRequest {
    pb::JoinRequest { job: "job".into(), rank, ..Default::default() }
}

fn create(world: u32) -> pb::CreateJobRequest {
    pb::CreateJobRequest { spec: Some((&spec(world)).into()), ..Default::default() }
}

fn describe() -> pb::DescribeJobRequest {
    pb::DescribeJobRequest { job: "job".into() }
}

/// The turn of rank 0 at step 0.
fn turn(member: &pb::JoinResponse) -> pb::Turn {
    let &pb::JoinResponse { job_id, lease, epoch, .. } = member;
    pb::Turn { job: "job".into(), job_id, lease, epoch, ..Default::default() }
}

fn error(result: Result<impl std::fmt::Debug, Status>) -> Error {
    from_status(&result.expect_err("an error"), "coordinator")
}

async fn membership(stream: &mut Streaming<pb::JoinResponse>) -> pb::JoinResponse {
    stream.message().await.unwrap().expect("open")
}

#[tokio::test]
async fn a_job_trains_a_step_over_the_wire() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut client, "127.0.0.1:1").await.unwrap();
    let (created, (epoch, job_id)) = tokio::join!(client.create_job(create(1)), shard.open());
    let created = created.unwrap().into_inner();
    assert_eq!((created.epoch, created.job_id), (epoch, job_id));
    assert_ne!(job_id, 0);

    let mut stream = client.join(join(0)).await.unwrap().into_inner();
    let mut member = membership(&mut stream).await;
    if member.version.is_none() {
        member = membership(&mut stream).await;
    }
    assert_eq!((member.epoch, member.version), (epoch, Some(0)));

    let ready = pb::StepReady {
        job: "job".into(),
        epoch,
        step: 0,
        slices: [(0, 1.0), (2, 3.0)]
            .map(|(slice, sum_of_squares)| pb::ReducedSlice {
                slice,
                sum_of_squares,
                ..Default::default()
            })
            .into(),
        overflow: None,
        absent: Vec::new(),
        copies: 0,
        job_id,
        attempt: 0,
    };
    let Command::Grant(grant) = shard.next().await else { panic!("GrantLease") };
    assert_eq!((grant.rank, grant.lease, grant.job_id), (0, member.lease, job_id));
    shard.say(ServerEvent::Ready(ready));
    let turn = |step| pb::Turn { step, ..turn(&member) };
    let commit = pb::CommitRequest { turn: Some(turn(0)), ..Default::default() };
    let report = client.commit(commit).await.unwrap().into_inner();
    assert_eq!((report.version, report.gradient_norm), (1, 2.0));
    let message = shard.next_message().await;
    let Some(Command::Decide(decision)) = message.command else { panic!("Decision") };
    assert!(decision.update.is_some() && decision.step == 0);
    // It is above that of the server, which has seen none.
    assert!(message.term > 0);
    let discard = pb::DiscardRequest { turn: Some(turn(1)) };
    assert_eq!(client.discard(discard).await.unwrap().into_inner().attempt, 1);
    let Command::NewAttempt(new) = shard.next().await else { panic!("NewAttempt") };
    assert_eq!((new.step, new.attempt), (1, 1));

    let metrics = fixture.context.metrics.text();
    for line in [
        "zeroshard_job_version{job=\"job\",role=\"coordinator\"} 1",
        "zeroshard_job_steps_total{job=\"job\",outcome=\"applied\"} 1",
        "zeroshard_requests_total{code=\"Ok\",method=\"/zeroshard.v1.CoordinatorService/Commit\"} 1",
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    let leave = pb::LeaveRequest { job: "job".into(), lease: member.lease, job_id, done: false };
    client.leave(leave).await.unwrap();
    assert!(stream.message().await.unwrap().is_none(), "the stream ends with the lease");
    fixture.stop().await;
}

#[tokio::test]
async fn a_worker_that_disconnects_is_lost() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut client, "127.0.0.1:1").await.unwrap();
    let (created, (epoch, _)) = tokio::join!(client.create_job(create(2)), shard.open());
    created.unwrap();
    let mut stays = client.join(join(0)).await.unwrap().into_inner();
    let goes = fixture.client().await.join(join(1)).await.unwrap();
    assert_eq!(membership(&mut stays).await.epoch, epoch);
    drop(goes);
    let new = loop {
        if let Command::NewEpoch(new) = shard.next().await {
            break new;
        }
    };
    assert_eq!(new.rank, 1);
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
    let (created, _) = tokio::join!(client.create_job(create(1)), shard.open());
    created.unwrap();
    let mut stream = client.join(join(0)).await.unwrap().into_inner();
    drop(shard);
    let ended = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    assert!(matches!(error(ended), Error::JobFailed { .. }));
    let status = client.status(pb::StatusRequest::default()).await.unwrap().into_inner();
    assert!(
        status.servers.is_empty()
            && status.jobs[0].failure.as_ref().is_some_and(|f| f.contains("127.0.0.1:1"))
    );
    client.delete_job(pb::DeleteJobRequest { job: "job".into(), job_id: 0 }).await.unwrap();
    let describe = pb::DescribeJobRequest { job: "job".into() };
    assert_eq!(error(client.describe_job(describe).await), Error::UnknownJob { job: "job".into() });
    fixture.stop().await;
}

#[tokio::test]
async fn a_coordinator_whose_leadership_has_ended_decides_nothing_and_ends_every_call_and_stream() {
    let leadership = Leadership::elected(5, Instant::now() + Duration::from_secs(3600));
    let fixture = Fixture::start_as(leadership.clone(), Common::default()).await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut client, "127.0.0.1:1").await.unwrap();
    let (created, _) = tokio::join!(client.create_job(create(1)), shard.open());
    created.unwrap();
    let mut member = client.join(join(0)).await.unwrap().into_inner();
    member.message().await.unwrap().unwrap();
    let more = JobSpec { name: "more".into(), min_servers: 2, ..spec(1) };
    let more = pb::CreateJobRequest { spec: Some((&more).into()), ..Default::default() };
    let mut waiting = {
        let mut client = fixture.client().await;
        tokio::spawn(async move { client.create_job(more).await })
    };
    // The call waits for a second server.
    while client.status(pb::StatusRequest::default()).await.unwrap().into_inner().jobs.len() < 2 {
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
    }
    // As if this process had stood still for longer than its leadership lasts.
    leadership.end();
    let refused = error(client.create_job(create(1)).await);
    let Error::Unavailable { cause, .. } = refused else { panic!("{refused:?}") };
    assert!(cause.contains("no longer the leader"), "{cause}");
    assert!(matches!(error((&mut waiting).await.unwrap()), Error::Unavailable { .. }));
    // It does not know any more which jobs exist.
    assert!(matches!(error(client.describe_job(describe()).await), Error::Unavailable { .. }));
    assert!(matches!(
        error(client.status(pb::StatusRequest::default()).await),
        Error::Unavailable { .. }
    ));
    let ended = loop {
        match member.message().await {
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    assert!(matches!(error(ended), Error::Unavailable { .. }));
    fixture.stop().await;
}

// promise: no-silent-hang
#[tokio::test]
async fn the_clock_ends_a_wait() {
    let fixture = Fixture::start().await;
    let mut request = Request::new(create(1));
    request.set_timeout(Duration::from_millis(500));
    let answer = fixture.client().await.create_job(request).await;
    assert_eq!(answer.as_ref().unwrap_err().code(), Code::DeadlineExceeded);
    // The server's own error arrives before tonic ends the call at its deadline.
    let Error::Timeout { waiting_for, .. } = error(answer) else { panic!("a timeout") };
    assert!(waiting_for.contains("0 of 1 are connected"), "{waiting_for}");
    fixture.stop().await;
}

#[tokio::test]
async fn a_wait_above_the_maximum_is_shortened_not_refused() {
    let waits = Waits { default: Duration::from_secs(1), rank: Duration::from_secs(30) };
    let mut request = Request::new(());
    assert!(waits.of(&request).left() <= waits.default);
    request.set_timeout(Duration::from_secs(86_400));
    let left = waits.of(&request).left();
    assert!(left <= MAX_WAIT && left > MAX_WAIT - Duration::from_secs(60), "{left:?}");
    assert_eq!(waits.of_join(u32::MAX), MAX_WAIT);
    assert_eq!((waits.of_join(0), waits.of_join(7)), (waits.default, Duration::from_millis(7)));
}

#[tokio::test]
async fn a_creation_whose_caller_disconnects_closes_the_job_on_its_servers() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut client, "127.0.0.1:1").await.unwrap();
    let creating = tokio::spawn(async move { client.create_job(create(1)).await });
    let Command::Open(open) = shard.next().await else { panic!("OpenJob") };
    creating.abort();
    // This happens long before the deadline of the creation.
    let close = tokio::time::timeout(WAIT / 3, shard.next()).await.expect("closed at once");
    let Command::Close(close) = close else { panic!("CloseJob") };
    assert_eq!(close.job_id, open.job_id);
    fixture.stop().await;
}

/// A driver without a service.
fn driver() -> Arc<Driver> {
    let (metrics, failure) = (Metrics::new(), Failure::default());
    let host = Host { metrics, failure, name: "host:1".to_owned() };
    Driver::new(Cluster::default(), host, Leadership::alone().unwrap())
}

/// A worker continues a lease while the coordinator has not noticed yet that its connection has
/// broken, if the coordinator has learned the job from its servers again meanwhile.
#[tokio::test]
async fn the_end_of_an_earlier_stream_of_a_lease_does_not_end_the_lease() {
    let driver = driver();
    let ends = |of: Caller| driver.end_lease("job".to_owned(), 0, Lease(1), of);
    let waits = |of: Caller| {
        let mut context = task::Context::from_waker(task::Waker::noop());
        driver.poll_membership("job", (Lease(1), of), &mut context).is_pending()
    };
    let [first, second] = [driver.next_caller(), driver.next_caller()];
    driver.add_lease(Lease(1), first);
    assert!(waits(first));
    driver.act(&mut driver.lock(), vec![Action::Attached(Lease(1), second)]);
    assert!(!waits(first), "its stream has ended");
    ends(first);
    assert!(waits(second));
    ends(second);
    assert!(!waits(second));
}

#[tokio::test]
async fn a_server_that_does_not_read_its_commands_is_dismissed() {
    let driver = driver();
    let server = Server { id: 1, incarnation: 1, address: "host:1".into() };
    let (about, reports) = (About::default(), Vec::new());
    let registration = Registration { server, about, term: 0, reports };
    let mut control = driver.add_server(registration).unwrap();
    let said = |said| driver.tell(Event::FromServer { from: control.link, event: said });
    let create =
        |caller| Event::Create { caller, job_id: JOB, create: creation(spec(1)), wait: WAIT };
    let creator = tokio::spawn({
        let driver = driver.clone();
        async move { driver.call(create).await }
    });
    assert_eq!(control.commands.recv().await, Some(super::Command::Welcome));
    assert!(matches!(control.commands.recv().await, Some(super::Command::Open(_))));
    said(super::ServerEvent::Opened { job: job(), epoch: 1 });
    assert_eq!(creator.await.unwrap(), Ok(Reply::Created { epoch: 1, job_id: JOB }));
    // Each join that is given up costs a GrantLease and a NewEpoch.
    for number in 0..=(MAX_COMMANDS as u64 / 2) {
        assert!(control.dismissal.cause().is_none() || number == MAX_COMMANDS as u64 / 2);
        let (caller, lease) = (Caller(1000 + number), Lease(1 + number));
        let join =
            Join { job: "job".into(), rank: 0, address: None, lease, rank_wait: WAIT, wait: WAIT };
        driver.tell(Event::Join { caller, join });
        driver.tell(Event::LeaseEnded { job: "job".into(), rank: 0, lease });
    }
    let cause = format!("it did not read {MAX_COMMANDS} commands");
    assert_eq!(control.dismissal.cause(), Some(cause.as_str()));
    assert_eq!(control.commands.len(), MAX_COMMANDS);
}

#[tokio::test]
async fn invalid_requests_get_typed_errors_and_the_server_continues() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let field = |error| match error {
        Error::Invalid { what, .. } => what,
        Error::Refused { sentence } => sentence,
        other => panic!("{other:?}"),
    };
    let absent = pb::CreateJobRequest::default();
    assert_eq!(field(error(client.create_job(absent).await)), "the request has no `spec`");
    assert_eq!(field(error(client.create_job(create(0)).await)), "world");
    assert_eq!(
        field(error(client.commit(pb::CommitRequest::default()).await)),
        "the request has no `turn`"
    );
    let commit = || pb::CommitRequest { turn: Some(pb::Turn::default()), ..Default::default() };
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        let scaled = pb::CommitRequest { loss_scale: bad, ..commit() };
        assert_eq!(field(error(client.commit(scaled).await)), "loss_scale of rank 0 at step 0");
        let clipped = pb::CommitRequest { max_norm: Some(bad), ..commit() };
        assert_eq!(field(error(client.commit(clipped).await)), "max_norm of rank 0 at step 0");
    }
    let unknown = pb::Optimizer { name: "adamwx".into(), ..Default::default() };
    let unknown = pb::CommitRequest { groups: vec![unknown], ..commit() };
    assert_eq!(field(error(client.commit(unknown).await)), "optimizer");
    for (server_id, incarnation, what) in [(0, 1, "server_id"), (1, 0, "incarnation")] {
        let hello = pb::Hello { server_id, incarnation, ..hello("host:1") };
        let refused = FakeShard::greet(&mut client, hello).await.err().expect("refused");
        assert_eq!(field(from_status(&refused, "")), format!("{what} of shard server host:1"));
    }
    // Its id is not that of the name, or the name changes how the text around it is shown.
    for name in ["another", "shard\u{202e}1"] {
        let server_id = server_id("shard\u{202e}1");
        let hello = pb::Hello { server_id, name: name.to_owned(), ..hello("host:1") };
        let refused = FakeShard::greet(&mut client, hello).await.err().expect("refused");
        assert_eq!(field(from_status(&refused, "")), "name of shard server host:1");
    }
    let hello = pb::Hello { job_reports: u32::MAX, ..hello("host:1") };
    let refused = FakeShard::greet(&mut client, hello).await.err().expect("refused");
    assert_eq!(field(from_status(&refused, "")), "job_reports of shard server host:1");
    for address in ["", "nowhere", "host:0"] {
        let refused = FakeShard::connect(&mut client, address).await.err().expect("refused");
        assert_eq!(field(from_status(&refused, "")), "address of the server");
    }
    for address in ["nowhere", "host:0", "ho st:1", &format!("{}:1", "h".repeat(300))] {
        let join = pb::JoinRequest {
            job: "job".into(),
            rank: 3,
            address: Some(address.to_owned()),
            ..Default::default()
        };
        assert_eq!(field(error(client.join(join).await)), "address of rank 3");
    }
    client.status(pb::StatusRequest::default()).await.unwrap();
    fixture.stop().await;
}

#[tokio::test]
async fn clients_and_servers_of_another_minor_version_are_refused() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let status = |version: &str| pb::StatusRequest { version: version.to_owned() };
    let mismatch = |program: &str, version: &str| Error::VersionMismatch {
        program: program.to_owned(),
        version: version.to_owned(),
        coordinator: VERSION.to_owned(),
    };
    let refused = error(client.status(status("0.999.0")).await);
    assert_eq!(refused, mismatch("the client", "0.999.0"));
    let (minor, _) = VERSION.rsplit_once('.').unwrap();
    for version in ["", VERSION, &format!("{minor}.999")] {
        let answer = client.status(status(version)).await.unwrap().into_inner();
        assert_eq!(answer.version, VERSION);
    }
    let hello = |version: &str| pb::Hello { version: version.to_owned(), ..hello("host:1") };
    let refused = FakeShard::greet(&mut client, hello("0.999.0")).await.err().expect("refused");
    let refused = from_status(&refused, "");
    assert_eq!(refused, mismatch("shard server host:1", "0.999.0"));
    let newer = format!("{minor}.999");
    let _shard = FakeShard::greet(&mut client, hello(&newer)).await.unwrap();
    let shown = client.status(status("")).await.unwrap().into_inner();
    assert_eq!(shown.servers[0].version, newer);
    fixture.stop().await;
}

#[tokio::test]
async fn fields_of_later_versions_do_not_change_an_answer() {
    let fixture = Fixture::start().await;
    let channel = Channel::from_shared(format!("http://{}", fixture.address)).unwrap();
    let mut grpc = tonic::client::Grpc::new(channel.connect().await.unwrap());
    let mut answers = Vec::new();
    for later in [false, true] {
        // Field 4095 with a text, which this version does not know.
        let unknown: &[u8] = if later { &[0xfa, 0xff, 0x01, 3, b'n', b'e', b'w'] } else { &[] };
        let mut request = pb::DescribeJobRequest { job: "job".into() }.encode_to_vec();
        request.extend_from_slice(unknown);
        grpc.ready().await.unwrap();
        let path = "/zeroshard.v1.CoordinatorService/DescribeJob".parse().unwrap();
        let described = grpc.unary(Request::new(Bytes::from(request)), path, Raw).await;
        answers.push(error(described));
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0], Error::UnknownJob { job: "job".into() });
    fixture.stop().await;
}

/// A codec that sends an encoded message, and ignores the answer.
#[derive(Clone, Copy)]
struct Raw;

impl tonic::codec::Codec for Raw {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl tonic::codec::Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut tonic::codec::EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(out, &item);
        Ok(())
    }
}

impl tonic::codec::Decoder for Raw {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, _: &mut tonic::codec::DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(None)
    }
}

#[tokio::test]
async fn a_stopping_coordinator_answers_all_calls() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut shard = FakeShard::connect(&mut fixture.client().await, "127.0.0.1:1").await.unwrap();
    let (created, _) = tokio::join!(client.create_job(create(2)), shard.open());
    created.unwrap();
    let mut stream = client.join(join(0)).await.unwrap().into_inner();
    let turn = turn(&membership(&mut stream).await);
    let commit = pb::CommitRequest { turn: Some(turn), ..Default::default() };
    let mut other = client.clone();
    let waiting = tokio::spawn(async move { other.commit(commit).await });
    // The commit has arrived when the coordinator counts it among the open calls.
    let in_flight =
        "zeroshard_requests_in_flight{method=\"/zeroshard.v1.CoordinatorService/Commit\"} 1";
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
    while let Some(command) = shard.commands.recv().await {
        command.unwrap();
    }
}

#[tokio::test]
async fn health_and_reflection_answer() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let fixture = Fixture::start().await;
    let channel = Channel::from_shared(format!("http://{}", fixture.address)).unwrap();
    let mut health = HealthClient::new(channel.connect().await.unwrap());
    fixture.context.health.until_ready().await;
    for service in ["", "liveness", "readiness", "zeroshard.v1.CoordinatorService"] {
        let request = HealthCheckRequest { service: service.into() };
        assert_eq!(
            health.check(request).await.unwrap().into_inner().status,
            1,
            "{service:?} is serving"
        );
    }
    fixture.stop().await;
}

#[tokio::test]
async fn an_endless_stream_does_not_delay_the_shutdown() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let fixture = Fixture::start_with(Common { drain_seconds: 0, ..Common::default() }).await;
    let channel = Channel::from_shared(format!("http://{}", fixture.address)).unwrap();
    let mut health = HealthClient::new(channel.connect().await.unwrap());
    let watch = health.watch(HealthCheckRequest { service: "liveness".into() }).await.unwrap();
    fixture.stop().await;
    drop(watch);
}
