//! A client that asks for too much, or stops in the middle, costs a bounded amount of memory, and
//! no time of others.
//!
//! The measured durations depend on the machine, and are printed: `-- --nocapture attacks`.
//!
//! promise: isolation

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, future::join_all, stream};
use prost::Message;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tonic::{Request, client::Grpc, transport::Channel};
use zeroshard_client::{Error, Options, TensorData, TensorId};
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_net::transport::endpoint;
use zeroshard_proto::{
    codec::Codec,
    pb::{self, coordinator_service_client::CoordinatorServiceClient},
    status::from_status,
};
use zeroshard_tests::{Bystander, Cluster, stock, synthetic, training};

use crate::{connect, job, options, sgd, start, until};

/// The time in which every attack must be refused, on a busy machine.
const GENEROUS: Duration = Duration::from_secs(20);

async fn raw(address: &str) -> CoordinatorServiceClient<Channel> {
    CoordinatorServiceClient::connect(format!("http://{address}")).await.unwrap()
}

/// Sends the creation of a job, which must be refused. Returns the error, after it has checked that
/// others were answered meanwhile.
async fn refused(cluster: &Cluster, what: &str, spec: pb::JobSpec) -> Error {
    // Encoded before, because the time of this client is not of interest. As a message, `Bytes` is
    // the content of field 1, which is the specification in this request.
    let spec = Bytes::from(spec.encode_to_vec());
    let size = spec.len();
    let mut client = Grpc::new(endpoint(cluster.address()).unwrap().connect().await.unwrap());
    client.ready().await.unwrap();
    let bystander = Bystander::start(cluster.address());
    let began = Instant::now();
    let path = "/zeroshard.v1.CoordinatorService/CreateJob".parse().unwrap();
    let codec = Codec::<Bytes, pb::CreateJobResponse>::default();
    let status = client.unary(Request::new(spec), path, codec).await.unwrap_err();
    let took = began.elapsed();
    eprintln!("{what} ({size} bytes): refused after {took:?}");
    bystander.finish(what);
    assert!(took < GENEROUS);
    from_status(&status, "coordinator")
}

fn spec(name: &str) -> pb::JobSpec {
    (&job(name, 1, sgd(1.0), synthetic::small())).into()
}

/// The field that an error names, which quotes at most 200 characters of each part of the input,
/// or its sentence.
fn invalid(error: Error) -> String {
    match error {
        Error::Invalid { what, found, .. } => {
            assert!([&what, &found].iter().all(|text| text.chars().count() <= 203), "{found}");
            what
        }
        Error::Refused { sentence } => {
            assert!(sentence.chars().count() <= 503, "{sentence}");
            sentence
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn specifications_with_too_much_of_anything_are_refused_and_delay_nobody() {
    let cluster = Cluster::start(1);
    let rank = start(cluster.address(), &job("small", 1, sgd(1.0), synthetic::small())).await;
    let mesh = |names: usize| pb::JobSpec {
        meshes: vec![pb::Mesh {
            dims: (0..names).map(|dim| pb::MeshDim { name: format!("d{dim}"), size: 1 }).collect(),
            ranks: vec![0],
        }],
        ..spec("attack")
    };
    let found = invalid(refused(&cluster, "40,000 names of dimensions", mesh(40_000)).await);
    assert_eq!(found, "number of dimensions of a mesh");
    let found = invalid(refused(&cluster, "3,000,000 names of dimensions", mesh(3_000_000)).await);
    assert_eq!(found, "size of the specification of the job");
    let groups =
        pb::JobSpec { groups: vec![pb::Optimizer::default(); 2_000_000], ..spec("attack") };
    let found = invalid(refused(&cluster, "2,000,000 parameter groups", groups).await);
    assert_eq!(found, "number of parameter groups");
    let ranks = pb::Mesh { dims: Vec::new(), ranks: vec![1; 65_536] };
    let ranks = pb::JobSpec { meshes: vec![ranks; 100], ..spec("attack") };
    let found = invalid(refused(&cluster, "meshes with 6,553,600 ranks", ranks).await);
    assert_eq!(found, "number of ranks in all meshes");
    let tensors = |number: usize| pb::JobSpec {
        tensors: (0..number)
            .map(|index| (&TensorSpec::new(format!("tensor {index}"), [1])).into())
            .collect(),
        ..spec("attack")
    };
    let found = invalid(refused(&cluster, "1,048,577 tensors", tensors((1 << 20) + 1)).await);
    assert_eq!(found, "number of tensors");
    let tied = pb::JobSpec {
        tensors: (0..300_000)
            .map(|index| pb::Tensor {
                alias_of: (index > 0).then(|| format!("t{}", index - 1)),
                ..(&TensorSpec::new(format!("t{index}"), [1])).into()
            })
            .collect(),
        ..spec("attack")
    };
    let found = invalid(refused(&cluster, "a chain of 300,000 tied tensors", tied).await);
    assert_eq!(
        found,
        "tensor \"t2\" is an alias of \"t1\", which is an alias itself; make it an alias of \"t0\""
    );
    assert!(training::step(&rank[0], 0).await.unwrap().applied);
    assert!(cluster.coordinator.memory() < 1 << 30);
}

#[tokio::test]
async fn errors_quote_little_of_the_input() {
    let cluster = Cluster::start(1);
    let long = "x".repeat(1 << 20);
    let error = async |spec| refused(&cluster, "a name of a megabyte", spec).await;
    assert_eq!(
        invalid(error(pb::JobSpec { name: long.clone(), ..spec("") }).await),
        "name of the job"
    );
    let mut tensor = spec("attack");
    tensor.tensors[0].name = long.clone();
    assert_eq!(invalid(error(tensor).await), "name of tensor 0");
    let mut alias = spec("attack");
    alias.tensors[1].alias_of = Some(long.clone());
    invalid(error(alias).await);
    let mut optimizer = spec("attack");
    optimizer.groups[0].name = long.clone();
    assert_eq!(invalid(error(optimizer).await), "optimizer");
    let mut unknown = spec("attack");
    unknown.groups[0].hyperparameters.insert(long.clone(), 1.0);
    invalid(error(unknown).await);
    let mut client = raw(cluster.address()).await;
    let request = pb::DescribeJobRequest { job: long.clone() };
    let status = client.describe_job(request).await.unwrap_err();
    match from_status(&status, "coordinator") {
        Error::UnknownJob { job } => assert_eq!(job.len(), 203),
        other => panic!("{other:?}"),
    }
    let pulled = stock::pull(cluster.shards[0].address(), stock::read(&long, 0, [0])).await;
    assert!(matches!(pulled, Err(Error::UnknownJob { job }) if job.len() == 203));
}

#[tokio::test]
async fn a_storm_of_creations_ends_at_the_limit_and_delays_nobody() {
    let coordinator = Cluster::coordinator_with(&["--max-jobs", "40"]);
    let shard = Cluster::shard(coordinator.address(), &[]);
    let cluster = Cluster { coordinator, shards: vec![shard] };
    let rank = start(cluster.address(), &job("small", 1, sgd(1.0), synthetic::small())).await;
    let client = connect(cluster.address()).await;
    let bystander = Bystander::start(cluster.address());
    let specs: Vec<JobSpec> = (0..400)
        .map(|index| job(&format!("job {index}"), 1, sgd(1.0), synthetic::small()))
        .collect();
    let created = join_all(specs.iter().map(|spec| client.create_job(spec)));
    let steps = async {
        for step in 0..20 {
            assert!(training::step(&rank[0], step).await.unwrap().applied);
        }
    };
    let (created, ()) = tokio::join!(created, steps);
    bystander.finish("400 creations of jobs");
    let (made, refused): (Vec<_>, Vec<_>) =
        created.into_iter().zip(&specs).partition(|(created, _)| created.is_ok());
    assert_eq!((made.len(), refused.len()), (39, 361));
    for (error, _) in refused {
        assert!(matches!(error, Err(Error::LimitExceeded { limit: 40, .. })), "{error:?}");
    }
    client.delete_job(&made[0].1.name).await.unwrap();
    client.create_job(&job("later", 1, sgd(1.0), synthetic::small())).await.unwrap();
}

#[tokio::test]
async fn connections_beyond_the_limit_are_refused_and_the_others_go_on() {
    let coordinator = Cluster::coordinator_with(&["--max-connections", "12"]);
    let shard = Cluster::shard(coordinator.address(), &[]);
    let cluster = Cluster { coordinator, shards: vec![shard] };
    let rank = start(cluster.address(), &job("small", 1, sgd(1.0), synthetic::small())).await;
    let bystander = Bystander::start(cluster.address());
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(TcpStream::connect(cluster.address()).await.unwrap());
    }
    // The places beyond the limit become free again, and their callers receive an error.
    let hasty = Options::default().timeout(Duration::from_secs(3));
    let refused = async {
        loop {
            let connected = zeroshard_client::Cluster::connect(cluster.address(), hasty.clone());
            let status = match connected.await {
                Ok(client) => client.status().await.map(drop),
                Err(error) => Err(error),
            };
            match status {
                Err(error @ Error::LimitExceeded { .. }) => return error,
                Err(_) => {}
                Ok(()) => panic!("there are too many connections"),
            }
        }
    };
    let refused = tokio::time::timeout(GENEROUS, refused).await.unwrap();
    assert!(matches!(refused, Error::LimitExceeded { limit: 12, .. }), "{refused:?}");
    assert!(training::step(&rank[0], 0).await.unwrap().applied);
    bystander.finish("300 idle connections");
    drop(idle);
    until("another client is served", || {
        std::thread::sleep(Duration::from_millis(50));
        zeroshard_tests::run("zsctl", &["status", "--address", cluster.address()]).status.success()
    })
    .await;
}

/// Opens a connection, and sends the beginning of this number of calls with large requests.
async fn begin_requests(address: &str, calls: usize, bytes: usize) -> Vec<Channel> {
    let body = |bytes: usize| {
        let prefix = [&[0u8][..], &(60u32 << 20).to_be_bytes()].concat();
        let piece = bytes::Bytes::from(vec![0u8; 1 << 16]);
        let pieces = stream::iter(
            std::iter::once(prefix.into()).chain(std::iter::repeat_n(piece, bytes >> 16)),
        );
        let pieces = pieces.map(|data| Ok::<_, tonic::Status>(http_body::Frame::data(data)));
        tonic::body::Body::new(http_body_util::StreamBody::new(pieces.chain(stream::pending())))
    };
    let channel =
        Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    for _ in 0..calls {
        let request =
            http::Request::post("http://coordinator/zeroshard.v1.CoordinatorService/CreateJob")
                .header("content-type", "application/grpc")
                .body(body(bytes))
                .unwrap();
        let mut channel = channel.clone();
        tokio::spawn(async move {
            let ready = std::future::poll_fn(|cx| tower::Service::poll_ready(&mut channel, cx));
            if ready.await.is_ok() {
                let _ = tower::Service::call(&mut channel, request).await;
            }
        });
    }
    vec![channel]
}

#[tokio::test]
async fn requests_that_never_end_use_a_bounded_amount_of_memory() {
    let cluster = Cluster::start(1);
    let rank = start(cluster.address(), &job("small", 1, sgd(1.0), synthetic::small())).await;
    let before = cluster.coordinator.memory();
    let bystander = Bystander::start(cluster.address());
    // 8 GiB in all.
    let mut open = Vec::new();
    for _ in 0..8 {
        open.extend(begin_requests(cluster.address(), 32, 32 << 20).await);
    }
    let began = Instant::now();
    let mut step = 0;
    while began.elapsed() < Duration::from_secs(4) {
        assert!(training::step(&rank[0], step).await.unwrap().applied);
        step += 1;
    }
    bystander.finish("256 large requests that stop in the middle");
    // The allocator keeps what refused requests have used for a moment.
    let grown = |memory: u64| memory.saturating_sub(before) >> 20;
    let (now, peak) = (cluster.coordinator.memory(), cluster.coordinator.peak_memory());
    eprintln!("the coordinator has grown by {} MiB, at most {}", grown(now), grown(peak));
    assert!(grown(now) < 640 && grown(peak) < 3 << 10);
    // Requests as usual are accepted, and large ones again when the others have ended.
    let client = connect(cluster.address()).await;
    client.create_job(&job("other", 1, sgd(1.0), synthetic::small())).await.unwrap();
}

#[tokio::test]
async fn pushes_that_never_end_and_readers_that_stop_do_not_delay_another_job() {
    const NUMEL: usize = 1 << 20;
    let cluster = Cluster::start(1);
    let shard = &cluster.shards[0];
    let hostile = job("hostile", 3, sgd(1.0), vec![TensorSpec::new("w", [NUMEL as u64])]);
    let hostile = start(cluster.address(), &hostile).await;
    // Three ranks, so that early gradients wait for the ranks before them.
    let victim = job("victim", 3, sgd(1.0), synthetic::small());
    let victim = start(cluster.address(), &victim).await;
    let before = shard.memory();
    let mut calls = Vec::new();
    for _ in 0..64 {
        // The gradients of rank 2 wait for those of rank 0, which do not come.
        let begin = stock::open(stock::begin(&hostile[2], Some(0)));
        let begun = stream::iter([begin, stock::extent(0, 0, &vec![1.0; NUMEL / 2])]);
        let address = shard.address().to_owned();
        calls.push(tokio::spawn(async move {
            stock::push_stream(&address, begun.chain(stream::pending())).await
        }));
        let read = stock::read("hostile", 0, vec![0; 64]);
        let mut reader = stock::open_pull(shard.address(), read).await.unwrap();
        reader.message().await.unwrap();
        calls.push(tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(reader);
            unreachable!()
        }));
    }
    let bystander = Bystander::start(cluster.address());
    for step in 0..20 {
        let gradients = synthetic::gradients(&victim[0].spec().manifest, 0, step);
        for rank in victim.iter().rev() {
            rank.attempt(step).unwrap().push(gradients.clone()).await.unwrap();
        }
        let commits = victim.iter().map(|rank| training::commit(rank, step, Default::default()));
        assert!(join_all(commits).await.into_iter().all(|report| report.unwrap().applied));
    }
    bystander.finish("64 pushes that do not end, and 64 readers that do not read");
    let grown = shard.peak_memory().saturating_sub(before);
    eprintln!("the shard server has grown by {} MiB", grown >> 20);
    assert!(grown < 1 << 30);
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    let gradients = || vec![TensorData::new(TensorId::new(0), vec![1.0; NUMEL])];
    for rank in &hostile {
        rank.attempt(0).unwrap().push(gradients()).await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_says_nothing_loses_its_connection() {
    let cluster = Cluster::start(1);
    for server in [&cluster.coordinator, &cluster.shards[0]] {
        let mut silent = TcpStream::connect(server.address()).await.unwrap();
        silent.write_all(b"PRI * HTTP/2").await.unwrap();
        let closed = tokio::time::timeout(GENEROUS, async {
            while tokio::io::AsyncReadExt::read(&mut silent, &mut [0; 64])
                .await
                .is_ok_and(|n| n > 0)
            {}
        });
        closed.await.expect("the server closes the connection");
    }
    let client = zeroshard_client::Cluster::connect(cluster.address(), options()).await.unwrap();
    assert_eq!(client.status().await.unwrap().servers.len(), 1);
}
