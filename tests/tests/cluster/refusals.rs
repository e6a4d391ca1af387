//! Invalid input is refused with a typed error. The state is unchanged, and the server continues.
//!
//! promise: invalid-input

use std::time::Duration;

use tonic::Request;
use zeroshard_client::{
    Cluster as Client, Commit, Error, Job, Target, TensorData, TensorId, Transport,
};
use zeroshard_model::{JobSpec, Result};
use zeroshard_net::transport::endpoint;
use zeroshard_proto::{
    codec::Codec,
    pb::{self, coordinator_service_client::CoordinatorServiceClient},
    status::from_status,
};
use zeroshard_tests::{Cluster, Training, stock, synthetic, training};

use crate::{adamw, connect, job, options, sgd, start};

/// The invalid field that an error names, or its sentence.
fn invalid<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Invalid { what, expected, .. }) if !expected.is_empty() => what,
        Err(Error::Refused { sentence }) if !sentence.is_empty() => sentence,
        other => panic!("{other:?}"),
    }
}

/// Sends `mischief` to a job in the middle of a step, and checks that the final state of the job is
/// the same as without it.
async fn changes_nothing(name: &str, mischief: impl AsyncFnOnce(&Cluster, &[Job])) {
    let cluster = Cluster::start(1);
    let spec = |name| job(name, 2, adamw(), synthetic::kinds(&adamw()));
    let expected =
        Training { steps: 2, ..Training::new(spec("calm")) }.run(cluster.address()).await.unwrap();
    let jobs = start(cluster.address(), &spec(name)).await;
    let (first, second) = tokio::join!(training::step(&jobs[0], 0), training::step(&jobs[1], 0));
    assert!(first.unwrap().applied && second.unwrap().applied);
    let before = jobs[0].state_hash(1).await.unwrap();
    jobs[0]
        .attempt(1)
        .unwrap()
        .push(synthetic::gradients(&spec("any").manifest, 0, 1))
        .await
        .unwrap();
    mischief(&cluster, &jobs).await;
    assert_eq!(jobs[0].state_hash(1).await.unwrap(), before);
    let (first, second) = tokio::join!(training::step(&jobs[0], 1), training::step(&jobs[1], 1));
    assert!(first.unwrap().applied && second.unwrap().applied);
    assert_eq!(jobs[0].state_hash(2).await.unwrap(), expected.hash);
}

#[tokio::test]
async fn a_push_that_does_not_fit_is_refused() {
    changes_nothing("push", async |cluster, jobs| {
        let job = &jobs[0];
        let address = cluster.shards[0].address();
        // Data of rank 1, whose turn it is.
        let begin = || stock::open(stock::begin(&jobs[1], Some(1)));
        let push = async |messages| stock::push(address, messages).await;
        let extent = |slice, offset, numel| stock::extent(slice, offset, &vec![7.0; numel]);
        // The slices are embedding, scalar, frozen, running_mean, bias, one, matrix.
        assert_eq!(
            invalid(push(vec![begin(), extent(1, 0, 2)]).await),
            "extent of slice 1 of tensor \"scalar\""
        );
        assert_eq!(
            invalid(push(vec![begin(), extent(1, 1, 1)]).await),
            "extent of slice 1 of tensor \"scalar\""
        );
        let overflow = extent(1, u64::MAX, 1);
        assert_eq!(
            invalid(push(vec![begin(), overflow]).await),
            "extent of slice 1 of tensor \"scalar\""
        );
        assert_eq!(
            invalid(push(vec![begin(), extent(2, 0, 1)]).await),
            "rank 1 pushed a gradient of tensor \"frozen\", which is not trained; leave it out"
        );
        assert_eq!(
            invalid(push(vec![begin(), extent(3, 0, 1)]).await),
            "rank 1 pushed a gradient of tensor \"running_mean\", which is not trained; leave it out"
        );
        let values = || stock::open(stock::replacement(&jobs[1], 1));
        assert_eq!(
            invalid(push(vec![values(), extent(3, 0, 1)]).await),
            "rank 1, which is not the first rank that holds it, cannot push new values of tensor \
             \"running_mean\"; the ranks that upload parts of slice 3 are: rank 0"
        );
        let values = || stock::open(stock::replacement(job, 1));
        let half = pb::PushRequest { dtype: pb::Dtype::Bf16.into(), ..extent(0, 0, 2) };
        assert_eq!(
            invalid(push(vec![values(), half]).await),
            "dtype of the new values of tensor \"embedding\""
        );
        assert_eq!(invalid(push(vec![begin(), extent(99, 0, 1)]).await), "slice");
        let without_dtype = pb::PushRequest { dtype: 0, ..extent(1, 0, 1) };
        invalid(push(vec![begin(), without_dtype]).await);
        let strange_dtype = pb::PushRequest { dtype: 77, ..extent(1, 0, 1) };
        invalid(push(vec![begin(), strange_dtype]).await);
        let half_an_element = pb::PushRequest { payload: vec![0; 3].into(), ..extent(1, 0, 1) };
        invalid(push(vec![begin(), half_an_element]).await);
        invalid(push(vec![begin(), begin()]).await);
        invalid(push(vec![extent(1, 0, 1)]).await);
        invalid(push(vec![]).await);
        let nobody = pb::PushBegin { rank: 2, ..stock::begin(job, Some(1)) };
        assert_eq!(invalid(push(vec![stock::open(nobody)]).await), "rank");
    })
    .await;
}

#[tokio::test]
async fn a_push_for_another_job_step_or_epoch_is_refused() {
    changes_nothing("where", async |cluster, jobs| {
        let job = &jobs[0];
        let address = cluster.shards[0].address();
        let epoch = job.epoch();
        let push = async |begin| {
            stock::push(address, vec![stock::open(begin), stock::extent(1, 0, &[7.0])]).await
        };
        let second = || stock::begin(&jobs[1], Some(1));
        match push(pb::PushBegin { job: "nobody's".into(), ..second() }).await {
            Err(Error::UnknownJob { job }) => assert_eq!(job, "nobody's"),
            other => panic!("{other:?}"),
        }
        // (For a newer epoch the server waits.)
        for wrong in [epoch - 1, 0] {
            match push(pb::PushBegin { epoch: wrong, ..second() }).await {
                Err(Error::StaleEpoch { epoch: said, current, .. }) => {
                    assert_eq!((said, current), (wrong, epoch))
                }
                other => panic!("{other:?}"),
            }
        }
        for wrong in [0, 3, u64::MAX] {
            let contents = Some(stock::gradients(wrong));
            match push(pb::PushBegin { contents, ..second() }).await {
                Err(Error::StepMismatch { step, current: 1, .. }) => assert_eq!(step, wrong),
                other => panic!("{other:?}"),
            }
        }
        // The message has no contents, or contents of a later version.
        let nothing = push(pb::PushBegin { contents: None, ..second() }).await;
        let sentence = "`begin` has no contents; set gradients, an upload or a replacement";
        assert_eq!(invalid(nothing), sentence);
        // Initial parameters are uploaded again after they are complete, and by the wrong rank.
        let again = push(stock::begin(job, None)).await.unwrap();
        assert_eq!((again.added, again.duplicates), (0, 1));
        invalid(push(stock::begin(&jobs[1], None)).await);
    })
    .await;
}

#[tokio::test]
async fn a_pull_that_does_not_fit_is_refused() {
    changes_nothing("pull", async |cluster, jobs| {
        let job = &jobs[0];
        let address = cluster.shards[0].address();
        let pull = async |request: pb::PullRequest| stock::pull(address, request).await;
        let extent = |slice, offset, length| pb::PullRequest {
            extents: vec![pb::Extent { slice, offset, length }],
            ..stock::read("pull", 1, [])
        };
        invalid(pull(stock::read("pull", 1, [99])).await);
        for (offset, length) in
            [(0, 2), (1, 0), (1, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)]
        {
            assert_eq!(invalid(pull(extent(1, offset, length)).await), "extent of slice 1");
        }
        for dtype in [0, 77, -1] {
            let request = pb::PullRequest { dtype, ..stock::read("pull", 1, [0]) };
            assert_eq!(invalid(pull(request).await), "dtype of a pull");
        }
        // A call whose deadline exceeds the server's limit waits for that limit.
        let mut patient = Request::new(stock::read("pull", 1, [0]));
        patient.set_timeout(Duration::from_secs(86_400));
        stock::pull(address, patient).await.unwrap();
        let stale = pb::PullRequest { epoch: job.epoch() + 1, ..stock::read("pull", 1, [0]) };
        assert!(matches!(pull(stale).await, Err(Error::StaleEpoch { .. })));
        assert!(matches!(
            pull(stock::read("nobody's", 1, [0])).await,
            Err(Error::UnknownJob { .. })
        ));
        assert!(matches!(
            pull(stock::read("pull", 0, [0])).await,
            Err(Error::VersionGone { current: 1, .. })
        ));
        // The request has more extents than are allowed.
        let large = invalid(pull(stock::read("pull", 1, vec![0; 3_000_000])).await);
        assert!(large.starts_with("the request cannot be read: "), "{large}");
    })
    .await;
}

#[tokio::test]
async fn a_too_large_message_is_refused_before_it_is_read() {
    let cluster = Cluster::start_with(1, &["--max-message-bytes", "4096"]);
    let spec = job("large", 1, sgd(1.0), synthetic::kinds(&sgd(1.0)));
    let network = options().transport(Some(Transport::Grpc));
    let client = Client::connect(cluster.address(), network).await.unwrap();
    client.create_job(&spec).await.unwrap();
    let job = client.join("large", 0).await.unwrap();
    // The embedding is one chunk of 132,000 bytes.
    match job.initialise(synthetic::parameters(&spec.manifest)).await {
        Err(Error::Invalid { expected, .. }) => assert!(expected.contains("4096"), "{expected}"),
        other => panic!("{other:?}"),
    }
    job.leave().await.unwrap();
    let options = options().chunk_bytes(4000);
    let client = zeroshard_client::Cluster::connect(cluster.address(), options).await.unwrap();
    let job = client.join("large", 0).await.unwrap();
    job.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    assert!(training::step(&job, 0).await.unwrap().applied);
}

#[tokio::test]
async fn a_commit_that_does_not_fit_is_refused() {
    changes_nothing("commit", async |cluster, jobs| {
        let job = &jobs[0];
        let commit = async |commit| training::commit(job, 1, commit).await;
        for step in [3, u64::MAX] {
            let refused = training::commit(job, step, Commit::default()).await;
            assert!(matches!(refused, Err(Error::StepMismatch { current: 1, .. })));
        }
        let groups = Commit::default().groups(vec![adamw(), adamw()]);
        assert_eq!(invalid(commit(groups).await), "number of parameter groups");
        invalid(commit(Commit::default().groups(vec![sgd(1.0)])).await);
        let mut negative = adamw();
        negative.set_lr(-1.0);
        assert_eq!(
            invalid(commit(Commit::default().groups(vec![negative])).await),
            "lr of adamw of parameter group 0"
        );
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            invalid(commit(Commit::default().loss_scale(bad)).await);
            invalid(commit(Commit::default().max_norm(bad)).await);
        }
        invalid(commit(Commit::default().max_norm(0.0)).await);
        // The call has the rank of another worker, or an unknown lease.
        let address = format!("http://{}", cluster.address());
        let mut stock = CoordinatorServiceClient::connect(address).await.unwrap();
        let request = |rank, lease| {
            let (job_id, epoch) = (job.id(), job.epoch());
            let turn =
                pb::Turn { job: "commit".into(), job_id, lease, epoch, rank, step: 1, attempt: 0 };
            pb::CommitRequest { turn: Some(turn), ..Default::default() }
        };
        for (rank, lease) in [(0, 999_999), (1, 0)] {
            let status = stock.commit(request(rank, lease)).await.unwrap_err();
            assert!(
                matches!(from_status(&status, "coordinator"), Error::LeaseLost { .. }),
                "{status}"
            );
        }
        let status = stock.commit(request(2, 0)).await.unwrap_err();
        assert!(matches!(from_status(&status, "coordinator"), Error::Invalid { .. }), "{status}");
    })
    .await;
}

#[tokio::test]
async fn the_client_refuses_arrays_that_do_not_fit_the_manifest() {
    changes_nothing("client", async |_, jobs| {
        let job = &jobs[0];
        let gradient =
            |tensor, numel| vec![TensorData::new(TensorId::new(tensor), vec![1.0; numel])];
        invalid(job.attempt(1).unwrap().push(gradient(0, 3)).await);
        invalid(job.attempt(1).unwrap().push(gradient(99, 3)).await);
        // "head" is tied to "embedding".
        invalid(job.attempt(1).unwrap().push(gradient(6, 33_000)).await);
        let mut short = [0.0; 3];
        invalid(job.pull(1, vec![Target::new(TensorId::new(0), short.as_mut_slice())]).await);
    })
    .await;
}

#[tokio::test]
async fn a_spec_that_contradicts_itself_or_an_existing_job_is_refused() {
    let cluster = Cluster::start(1);
    let client = connect(cluster.address()).await;
    let address = format!("http://{}", cluster.address());
    let mut stock = CoordinatorServiceClient::connect(address).await.unwrap();
    let mut create = async |spec: Option<pb::JobSpec>| {
        let request = pb::CreateJobRequest { spec, ..Default::default() };
        let answer = stock.create_job(request).await.map(tonic::Response::into_inner);
        answer.map_err(|status| from_status(&status, "coordinator"))
    };
    let good = job("good", 1, adamw(), synthetic::small());
    let pb = || pb::JobSpec::from(&good);
    assert_eq!(invalid(create(None).await), "the request has no `spec`");
    assert_eq!(
        invalid(create(Some(pb::JobSpec { name: String::new(), ..pb() })).await),
        "name of the job"
    );
    assert_eq!(invalid(create(Some(pb::JobSpec { world: 0, ..pb() })).await), "world");
    assert_eq!(invalid(create(Some(pb::JobSpec { replicas: 65, ..pb() })).await), "replicas");
    assert_eq!(
        invalid(create(Some(pb::JobSpec { groups: vec![], ..pb() })).await),
        "number of parameter groups"
    );
    let mut huge = pb();
    huge.tensors[0].shape = vec![u64::MAX, u64::MAX];
    assert_eq!(invalid(create(Some(huge)).await), "shape of tensor \"w\"");
    let mut nameless = pb();
    nameless.groups[0].name = "adamx".to_owned();
    assert_eq!(invalid(create(Some(nameless)).await), "optimizer");
    assert!(client.status().await.unwrap().jobs.is_empty());

    client.create_job(&good).await.unwrap();
    client.create_job(&good).await.unwrap();
    match client.create_job(&JobSpec { world: 2, ..good.clone() }).await {
        Err(Error::JobExists { difference, .. }) => assert_eq!(difference, "world"),
        other => panic!("{other:?}"),
    }
    invalid(client.join("good", 1).await);
    assert!(matches!(client.join("nobody's", 0).await, Err(Error::UnknownJob { .. })));
    assert!(matches!(client.delete_job("nobody's").await, Err(Error::UnknownJob { .. })));
    assert!(matches!(client.state_hash("nobody's").await, Err(Error::UnknownJob { .. })));
}

#[tokio::test]
async fn bytes_other_than_grpc_do_no_harm() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    changes_nothing("noise", async |cluster, _| {
        let noise: Vec<u8> =
            synthetic::values(99, 4096).iter().flat_map(|value| value.to_le_bytes()).collect();
        for process in cluster.shards.iter().chain([&cluster.coordinator]) {
            for address in [process.address(), process.admin()] {
                for bytes in [
                    &noise[..],
                    b"GET / HTTP/1.0\r\n\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nxxxxxxxxx",
                ] {
                    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
                    // The server may still be reading, or may have closed the connection already.
                    let _ = stream.write_all(bytes).await;
                    let _ = stream.shutdown().await;
                    let _ = stream.read_to_end(&mut Vec::new()).await;
                }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn bytes_that_cannot_be_decoded_are_refused_as_invalid() {
    let cluster = Cluster::start(0);
    let channel = endpoint(cluster.address()).unwrap().connect().await.unwrap();
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    // The first field of this message is a text, while that of the expected message is a
    // specification.
    let turn = pb::Turn { job: "no specification".to_owned(), ..Default::default() };
    let path = "/zeroshard.v1.CoordinatorService/CreateJob".parse().unwrap();
    let codec = Codec::<pb::Turn, pb::CreateJobResponse>::default();
    let status = client.unary(Request::new(turn), path, codec).await.unwrap_err();
    let refused = from_status(&status, "coordinator");
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
}
