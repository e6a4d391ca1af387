//! Traces of steps, which all processes send to a collector over OTLP.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::status::StatusCode,
};
use tokio::net::TcpListener;
use tonic::{Request, Response, Status, transport::server::TcpIncoming};
use zeroshard_client::{Cluster as Client, Commit, Error, Options, trace};
use zeroshard_tests::{Cluster, binary, synthetic};

/// The training text: sources of this project.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/src");

/// A span that the collector has received.
#[derive(Debug, Clone)]
struct Span {
    service: String,
    /// The server or the process.
    instance: String,
    trace: String,
    id: String,
    /// Empty for a root.
    parent: String,
    name: String,
    start: u64,
    end: u64,
    is_failed: bool,
    attributes: BTreeMap<String, String>,
}

/// A collector of traces.
#[derive(Debug, Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attributes(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let pair = |of: &KeyValue| Some((of.key.clone(), text(of.value.as_ref()?.value.as_ref()?)));
    attributes.iter().filter_map(pair).collect()
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut received = self.0.lock().unwrap();
        for of_process in request.into_inner().resource_spans {
            let resource = attributes(&of_process.resource.unwrap_or_default().attributes);
            let spans = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.extend(spans.map(|span| Span {
                service: resource["service.name"].clone(),
                instance: resource["service.instance.id"].clone(),
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                name: span.name,
                start: span.start_time_unix_nano,
                end: span.end_time_unix_nano,
                is_failed: span.status.is_some_and(|of| of.code == StatusCode::Error as i32),
                attributes: attributes(&span.attributes),
            }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts a collector, and returns its URL.
    async fn start() -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let collector = Self::default();
        let service = TraceServiceServer::new(collector.clone());
        let server = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpIncoming::from(listener));
        tokio::spawn(server);
        (collector, url)
    }

    /// The spans of each step. After the last step there are only pulls.
    fn steps(&self) -> BTreeMap<String, Vec<Span>> {
        let (steps, others): (BTreeMap<_, _>, BTreeMap<String, Vec<Span>>) = self
            .traces()
            .into_iter()
            .partition(|(_, spans)| spans.iter().any(|span| span.name == "push"));
        let is_pull = |span: &Span| ["pull", "send"].contains(&span.name.as_str());
        assert!(others.values().flatten().all(is_pull), "{others:#?}");
        steps
    }

    /// The spans of each trace.
    fn traces(&self) -> BTreeMap<String, Vec<Span>> {
        let mut traces = BTreeMap::<_, Vec<_>>::new();
        for span in self.0.lock().unwrap().iter() {
            traces.entry(span.trace.clone()).or_default().push(span.clone());
        }
        traces
    }
}

/// Trains for four steps with two ranks and two shard servers, each in a process of its own. All
/// spans have been sent when this returns.
fn train(flags: &[&str]) {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(binary("zeroshard-worker"))
        .args(["train", "--processes", "--workers", "2", "--shards", "2", "--steps", "4"])
        .args(["--batch", "4", "--context", "16", "--data", TEXT, "--out"])
        .arg(out.path())
        .args(flags)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Asserts that the spans are one tree from the pushes of both ranks to the decision.
fn assert_is_tree(spans: &[Span]) {
    let ids: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).collect();
    assert_eq!(ids.len(), spans.len(), "an id is used twice: {spans:#?}");
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let roots: Vec<_> = spans.iter().filter(|span| span.parent.is_empty()).collect();
    let [root] = roots[..] else { panic!("not one root: {spans:#?}") };
    assert_eq!((root.name.as_str(), root.service.as_str()), ("step", "zeroshard-server"));
    assert!(!root.is_failed);
    for span in spans {
        assert!(span.start <= span.end, "{span:#?}");
        assert!(span.parent.is_empty() || ids.contains(span.parent.as_str()), "{span:#?}");
    }
    let ranks = |of: &[&Span]| -> BTreeSet<String> {
        of.iter().map(|span| span.attributes["zeroshard.rank"].clone()).collect()
    };
    let (pushes, receives, commits) = (named("push"), named("receive"), named("commit"));
    for of in [&pushes, &receives, &commits] {
        assert_eq!(ranks(of), BTreeSet::from(["0".to_owned(), "1".to_owned()]), "{spans:#?}");
    }
    let servers: BTreeSet<_> =
        pushes.iter().map(|push| &push.attributes["server.address"]).collect();
    assert_eq!(servers.len(), 2, "{pushes:#?}");
    for push in &pushes {
        assert_eq!((push.service.as_str(), &push.parent), ("zeroshard-worker", &root.id));
        assert!(root.start <= push.start, "a push began before the step: {spans:#?}");
        assert!(push.end <= root.end, "a push ended after the decision: {spans:#?}");
    }
    for receive in receives {
        assert_eq!(receive.service, "zeroshard-server");
        let push = spans.iter().find(|push| push.id == receive.parent).unwrap();
        assert_eq!(receive.instance, push.attributes["server.address"], "on which server");
        let caller = pushes.iter().find(|push| push.id == receive.parent).unwrap();
        assert_eq!(caller.attributes["zeroshard.rank"], receive.attributes["zeroshard.rank"]);
        assert!(caller.start <= receive.start, "{caller:#?} {receive:#?}");
    }
    let (pulls, sends) = (named("pull"), named("send"));
    assert_eq!(ranks(&pulls), BTreeSet::from(["0".to_owned(), "1".to_owned()]), "{spans:#?}");
    assert!(!sends.is_empty());
    for send in sends {
        let pull = spans.iter().find(|pull| pull.id == send.parent).unwrap();
        assert_eq!(
            (pull.name.as_str(), &pull.attributes["server.address"]),
            ("pull", &send.instance)
        );
    }
    for name in ["reduce", "apply"] {
        let places: BTreeSet<_> = named(name).iter().map(|span| &span.instance).collect();
        assert_eq!(places, servers, "{name}");
    }
    for (name, count) in
        [("reduce", 2), ("apply", 2), ("wait for ranks", 1), ("wait for servers", 1)]
    {
        assert_eq!(named(name).len(), count, "{name}: {spans:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_one_tree_of_spans_from_the_pushes_to_the_decision() {
    let (collector, url) = Collector::start().await;
    train(&["--otlp-endpoint", &url]);
    let traces = collector.steps();
    assert_eq!(traces.len(), 4, "one trace per step: {traces:#?}");
    traces.values().for_each(|spans| assert_is_tree(spans));
    let root = |spans: &Vec<Span>| {
        let root = spans.iter().find(|span| span.parent.is_empty()).unwrap();
        root.attributes["zeroshard.step"].clone()
    };
    let steps: BTreeSet<String> = traces.values().map(root).collect();
    assert_eq!(steps, ["0", "1", "2", "3"].map(str::to_owned).into());
}

#[tokio::test(flavor = "multi_thread")]
async fn all_processes_leave_out_the_same_steps() {
    let (collector, url) = Collector::start().await;
    train(&["--otlp-endpoint", &url, "--trace-ratio", "0"]);
    assert_eq!(collector.traces().len(), 0, "{:#?}", collector.traces());
    train(&["--otlp-endpoint", &url, "--trace-ratio", "0.5"]);
    // The ids depend on the random id of the job: any number of the four may be chosen.
    collector.steps().values().for_each(|spans| assert_is_tree(spans));
}

#[tokio::test(flavor = "multi_thread")]
async fn saves_and_copies_have_spans_that_name_their_server() {
    let (collector, url) = Collector::start().await;
    let flags = ["--otlp-endpoint", url.as_str()];
    let coordinator = Cluster::coordinator_with(&flags);
    let mut shards: Vec<_> =
        (0..2).map(|_| Cluster::shard(coordinator.address(), &flags)).collect();
    let checkpoints = tempfile::tempdir().unwrap();
    let place = format!("file://{}", checkpoints.path().display());
    let spec = synthetic::job("demo", 1, "sgd".parse().unwrap(), synthetic::small()).unwrap();
    let spec = zeroshard_model::JobSpec { replicas: 2, min_servers: 2, ..spec };
    let options = Options::default().timeout(zeroshard_tests::timeout());
    let client = Client::connect(coordinator.address(), options).await.unwrap();
    client.create_job(&spec).await.unwrap();
    let rank = client.join("demo", 0).await.unwrap();
    rank.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    client.save_checkpoint("demo", Some(&place)).await.unwrap();
    // The new server copies all slices.
    shards.remove(0).kill();
    shards.push(Cluster::shard(coordinator.address(), &flags));
    let is_whole = || async {
        let job = client.status().await.unwrap().jobs.remove(0);
        job.degraded_slices == 0 && job.version.is_some() && job.epoch > 1
    };
    while !is_whole().await {
        tokio::task::yield_now().await;
    }
    let addresses: Vec<String> = shards.iter().map(|of| of.address().to_owned()).collect();
    drop((rank, client));
    for server in shards.into_iter().chain([coordinator]) {
        assert!(server.stop().success());
    }
    let spans = collector.0.lock().unwrap().clone();
    let places = |name: &str| -> BTreeSet<String> {
        spans.iter().filter(|of| of.name == name).map(|of| of.instance.clone()).collect()
    };
    // The spans of the server that was killed may not have been sent.
    assert!(places("save").contains(&addresses[0]), "{spans:#?}");
    assert!(places("copy").contains(&addresses[1]), "{spans:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_of_a_step_names_its_trace() {
    let (collector, url) = Collector::start().await;
    trace::start(&url, 1.0, "client", "test").unwrap();
    let flags = ["--otlp-endpoint", url.as_str()];
    let coordinator = Cluster::coordinator_with(&flags);
    let shard = Cluster::shard(coordinator.address(), &flags);
    let spec = synthetic::job("demo", 2, "sgd".parse().unwrap(), synthetic::small()).unwrap();
    let options = Options::default().timeout(Duration::from_secs(2));
    let client = Client::connect(coordinator.address(), options).await.unwrap();
    client.create_job(&spec).await.unwrap();
    let (first, second) = tokio::try_join!(client.join("demo", 0), client.join("demo", 1)).unwrap();
    first.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let attempt = first.attempt(0).unwrap();
    attempt.push(synthetic::gradients(&spec.manifest, 0, 0)).await.unwrap();
    // Rank 1 never commits.
    let error = attempt.commit(Commit::default()).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    let named = error.to_string();
    let (_, id) = named.split_once("(trace ").unwrap_or_else(|| panic!("{named}"));
    let id = id.strip_suffix(')').unwrap();
    trace::flush();
    let spans = &collector.traces()[id];
    let commit = spans.iter().find(|span| span.name == "commit").unwrap();
    assert!(commit.is_failed, "{commit:#?}");

    // The loss of rank 1 aborts the step, which ends the trace.
    drop(second);
    let aborted = async {
        loop {
            match attempt.commit(Commit::default()).await.unwrap_err() {
                Error::Timeout { .. } => {}
                error => break error.to_string(),
            }
        }
    };
    let aborted = tokio::time::timeout(zeroshard_tests::timeout(), aborted).await.unwrap();
    assert!(aborted.contains(id), "{aborted}");

    // It is lost again, after the other rank has pushed and before it has committed.
    let again = client.join("demo", 1).await.unwrap();
    let attempt = loop {
        let attempt = first.attempt(0).unwrap();
        match attempt.push(synthetic::gradients(&spec.manifest, 0, 0)).await {
            Ok(()) => break attempt,
            Err(Error::StepAborted { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    drop(again);
    let lost = attempt.reach_epoch(attempt.epoch() + 1).await;
    assert!(matches!(lost, Err(Error::StepAborted { .. })), "{lost:?}");

    drop(first);
    trace::flush();
    for server in [shard, coordinator] {
        assert!(server.stop().success());
    }
    let traces = collector.traces();
    let pushed = traces.values().filter(|spans| spans.iter().any(|span| span.name == "push"));
    assert!(pushed.clone().count() >= 2, "{traces:#?}");
    for spans in pushed {
        let root = spans.iter().find(|span| span.name == "step").unwrap();
        assert!(root.is_failed, "{spans:#?}");
    }
}
