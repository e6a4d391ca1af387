//! Jobs that continue from another job: the servers copy the state, and workers upload the tensors
//! that they have changed. The deletion of unused jobs.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use zeroshard_client::{CreateJob, Error, Job, Status, TensorData, TensorId};
use zeroshard_model::{AppliedSteps, JobSpec, JobVersion, Optimizer, TensorSpec, successor_name};
use zeroshard_proto::pb::{self, shard_service_client::ShardServiceClient};
use zeroshard_tests::{
    Cluster, FaultProxy, Process,
    synthetic::{self, tensor_ids},
    training,
};

use crate::{adamw, connect, job, options, sgd, start, until, until_calls_wait};

/// A job that continues from `job`.
fn after(job: &Job, version: u64, spec: JobSpec) -> CreateJob {
    let mut create = CreateJob::new(JobSpec { name: successor_name(&job.spec().name), ..spec });
    create.from = Some(job.at(version));
    create
}

/// Creates the job and joins it with every rank.
async fn join(address: &str, create: CreateJob) -> Vec<Job> {
    let (name, world) = (create.spec.name.clone(), create.spec.world);
    connect(address).await.create_job(create).await.unwrap();
    let mut jobs = Vec::new();
    for rank in 0..world {
        jobs.push(connect(address).await.join(&name, rank).await.unwrap());
    }
    jobs
}

/// The tensors that own their storage.
fn owners(spec: &JobSpec) -> Vec<TensorId> {
    let tensors = spec.manifest.tensors().iter().enumerate();
    tensor_ids(tensors.filter(|(_, tensor)| tensor.alias_of.is_none()).map(|(index, _)| index))
}

async fn all_know(jobs: &[Job]) {
    until("all ranks know of version 0", || jobs.iter().all(|job| job.version() == Some(0))).await;
}

async fn step(jobs: &[Job], number: u64, data: u64) {
    let steps = jobs.iter().map(|job| async move {
        let attempt = job.attempt(number).unwrap();
        let gradients = synthetic::gradients(&job.spec().manifest, job.rank(), data);
        attempt.push(gradients).await.unwrap();
        attempt.commit(zeroshard_client::Commit::default()).await.unwrap()
    });
    assert!(join_all(steps).await.iter().all(|report| report.applied));
}

/// Of every slice the digest of its master weights, optimizer state and number of applied steps.
async fn digests(cluster: &Cluster, job: &Job, version: u64) -> BTreeMap<u32, Vec<u8>> {
    let mut digests = BTreeMap::new();
    for shard in &cluster.shards {
        let address = format!("http://{}", shard.address());
        let mut client = ShardServiceClient::connect(address).await.unwrap();
        let request = pb::DigestRequest {
            job: job.spec().name.clone(),
            job_id: job.id(),
            version,
            line: None,
        };
        // A server that was added later holds nothing of an earlier job.
        let Ok(answer) = client.digest(request).await else { continue };
        let slices = answer.into_inner().slices.into_iter();
        digests.extend(slices.map(|slice| (slice.slice, slice.digest.to_vec())));
    }
    digests
}

/// Takes over from a job on `before` servers on `then` servers; both go on alike.
async fn goes_on(optimizer: Optimizer, before: usize, then: usize) {
    let mut cluster = Cluster::start(before);
    let tensors = synthetic::kinds_and_large(&optimizer);
    let spec = JobSpec { min_servers: before as u32, ..job("run", 2, optimizer, tensors) };
    let jobs = start(cluster.address(), &spec).await;
    for number in 0..2 {
        step(&jobs, number, number).await;
    }
    for _ in before..then {
        let shard = Cluster::shard(cluster.address(), &[]);
        cluster.shards.push(shard);
    }
    let pushed = cluster.payload()[1];
    let create = after(&jobs[0], 2, JobSpec { min_servers: then as u32, ..spec });
    let others = join(cluster.address(), create).await;
    assert_eq!(others[0].spec().name, "run.1");
    for job in &others {
        job.keep(AppliedSteps::new(0), &owners(job.spec())).await.unwrap();
        job.keep(AppliedSteps::new(0), &owners(job.spec())).await.unwrap();
    }
    all_know(&others).await;
    assert_eq!(cluster.payload()[1], pushed, "no worker uploads anything");
    let (old, new) = (digests(&cluster, &jobs[0], 2).await, digests(&cluster, &others[0], 0).await);
    assert_eq!(old.len(), jobs[0].spec().manifest.slices().len());
    assert!(old == new);
    step(&jobs, 2, 2).await;
    step(&others, 0, 2).await;
    assert!(
        training::pull(&jobs[1], 3).await.unwrap() == training::pull(&others[1], 1).await.unwrap()
    );
    assert!(digests(&cluster, &jobs[0], 3).await == digests(&cluster, &others[0], 1).await);
}

#[tokio::test]
async fn a_job_goes_on_from_another_on_the_same_server() {
    goes_on(adamw(), 1, 1).await;
    goes_on("asgd".parse().unwrap(), 1, 1).await;
}

#[tokio::test]
async fn a_job_goes_on_from_another_on_the_same_three_servers() {
    goes_on(adamw(), 3, 3).await;
}

#[tokio::test]
async fn a_job_goes_on_from_another_with_another_placement() {
    goes_on(adamw(), 1, 3).await;
    goes_on(sgd(0.5), 1, 2).await;
    goes_on("nadam".parse().unwrap(), 1, 3).await;
}

#[tokio::test]
async fn a_tensor_that_is_cut_otherwise_is_carried_over_too() {
    let cluster = Cluster::start(1);
    let json = r#"{"name":"adamw","amsgrad":true}"#;
    let spec = job("cut", 1, adamw(), synthetic::kinds_and_large(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    step(&jobs, 0, 0).await;
    let _second = Cluster::shard(cluster.address(), &[]);
    let mut tensors = spec.manifest.tensors().to_vec();
    tensors.iter_mut().for_each(|tensor| tensor.policy = zeroshard_model::Policy::Whole);
    let whole = JobSpec { min_servers: 2, ..job("cut", 1, adamw(), tensors.clone()) };
    let others = join(cluster.address(), after(&jobs[0], 1, whole)).await;
    others[0].keep(AppliedSteps::new(0), &owners(others[0].spec())).await.unwrap();
    others[0].initialised().await.unwrap();
    assert!(
        training::pull(&jobs[0], 1).await.unwrap() == training::pull(&others[0], 0).await.unwrap()
    );
    assert_eq!(others[0].applied_steps(0).await.unwrap(), jobs[0].applied_steps(1).await.unwrap());
    // An optimizer that needs more state than there is begins afresh.
    let more = job("cut", 1, serde_json::from_str(json).unwrap(), tensors);
    let more = join(cluster.address(), after(&others[0], 0, more)).await;
    more[0].keep(AppliedSteps::new(0), &owners(more[0].spec())).await.unwrap();
    more[0].initialised().await.unwrap();
    assert!(more[0].applied_steps(0).await.unwrap().iter().all(|applied| applied.count == 0));
    assert!(
        training::pull(&more[0], 0).await.unwrap() == training::pull(&others[0], 0).await.unwrap()
    );
}

fn filled(tensor: usize, numel: usize, value: f32) -> Vec<TensorData> {
    vec![TensorData::new(TensorId::new(tensor), vec![value; numel])]
}

#[tokio::test]
async fn an_upload_overrides_what_was_carried_over_and_new_tensors_need_one() {
    let cluster = Cluster::start(2);
    let spec = job("run", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    step(&jobs, 0, 0).await;
    let mut tensors = synthetic::small();
    tensors.push(TensorSpec::new("new", [5]));
    let create = after(&jobs[0], 1, job("run", 1, adamw(), tensors));
    let next = join(cluster.address(), create).await.remove(0);
    let refused = next.keep(AppliedSteps::new(0), &tensor_ids([0, 2])).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    let refused = next.initialise_state("exp_avg", AppliedSteps::new(7), filled(1, 3, 1.0)).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    next.initialise(filled(1, 3, 0.25)).await.unwrap();
    next.initialise_at(AppliedSteps::new(9), filled(2, 5, 0.5)).await.unwrap();
    next.keep(AppliedSteps::new(0), &tensor_ids([0])).await.unwrap();
    next.initialised().await.unwrap();
    let values = training::pull(&next, 0).await.unwrap();
    assert!(values[0] == training::pull(&jobs[0], 1).await.unwrap()[0]);
    assert_eq!(values[1..], [vec![0.25; 3], vec![0.5; 5]]);
    assert_eq!(next.applied_steps(0).await.unwrap(), [1, 1, 9].map(AppliedSteps::new));
}

#[tokio::test]
async fn fresh_state_is_that_of_a_new_run_unless_it_is_uploaded() {
    let cluster = Cluster::start(2);
    let spec = job("run", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    step(&jobs, 0, 0).await;
    let mut create = after(&jobs[0], 1, spec);
    create.fresh_state = true;
    let next = join(cluster.address(), create).await.remove(0);
    next.initialise_state("exp_avg", AppliedSteps::new(4), filled(1, 3, 1.0)).await.unwrap();
    next.keep(AppliedSteps::new(4), &tensor_ids([1])).await.unwrap();
    next.keep(AppliedSteps::new(0), &tensor_ids([0])).await.unwrap();
    next.initialised().await.unwrap();
    assert_eq!(next.applied_steps(0).await.unwrap(), [0, 4].map(AppliedSteps::new));
    assert!(training::pull(&jobs[0], 1).await.unwrap() == training::pull(&next, 0).await.unwrap());
}

#[tokio::test]
async fn a_rank_that_is_lost_before_version_0_takes_its_uploads_along_and_nothing_else() {
    let cluster = Cluster::start(1);
    let spec = job("run", 2, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    step(&jobs, 0, 0).await;
    let mut next = join(cluster.address(), after(&jobs[0], 1, spec)).await;
    next[0].initialise(filled(1, 3, 0.25)).await.unwrap();
    let epoch = next[0].epoch();
    drop(next.pop());
    until("rank 0 knows", || next[0].epoch() > epoch).await;
    // An upload has replaced the copied content.
    let refused = next[0].keep(AppliedSteps::new(0), &tensor_ids([1])).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    next[0].initialise(filled(1, 3, 0.5)).await.unwrap();
    next[0].keep(AppliedSteps::new(0), &tensor_ids([0])).await.unwrap();
    next[0].initialised().await.unwrap();
    let values = training::pull(&next[0], 0).await.unwrap();
    assert!(values[0] == training::pull(&jobs[0], 1).await.unwrap()[0]);
    assert_eq!(values[1], [0.5; 3]);
    assert_eq!(next[0].applied_steps(0).await.unwrap(), [1, 1].map(AppliedSteps::new));
}

#[tokio::test]
async fn a_predecessor_that_is_not_there_or_has_stepped_is_refused() {
    let cluster = Cluster::start(1);
    let client = connect(cluster.address()).await;
    let spec = job("run", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    step(&jobs, 0, 0).await;
    let gone = client.create_job(after(&jobs[0], 0, spec.clone())).await;
    assert!(matches!(gone, Err(Error::VersionGone { version: 0, current: 1, .. })), "{gone:?}");
    let mut other = after(&jobs[0], 1, spec.clone());
    other.from = Some(JobVersion { job_id: 1, ..jobs[0].at(1) });
    let replaced = client.create_job(other).await;
    assert!(matches!(replaced, Err(Error::JobReplaced { .. })), "{replaced:?}");
    client.delete_job("run").await.unwrap();
    let unknown = client.create_job(after(&jobs[0], 1, spec)).await;
    assert!(matches!(unknown, Err(Error::UnknownJob { .. })), "{unknown:?}");
}

#[tokio::test]
async fn a_job_that_was_created_stays_when_its_predecessor_is_deleted_and_its_creator_repeats() {
    let cluster = Cluster::start(1);
    let client = connect(cluster.address()).await;
    let spec = job("run", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    step(&jobs, 0, 0).await;
    let expected = digests(&cluster, &jobs[0], 1).await;
    let create = after(&jobs[0], 1, spec);
    client.create_job(create.clone()).await.unwrap();
    client.delete_job("run").await.unwrap();
    let next = join(cluster.address(), create).await.remove(0);
    next.keep(AppliedSteps::new(0), &tensor_ids([0, 1])).await.unwrap();
    next.initialised().await.unwrap();
    assert_eq!(digests(&cluster, &next, 0).await, expected);
}

/// A trained job on a server that other servers cannot reach, and an empty one.
async fn out_of_reach() -> (Cluster, FaultProxy, Job, CreateJob) {
    let proxy = FaultProxy::start().await.unwrap();
    let coordinator = Cluster::coordinator();
    let first = Cluster::shard(coordinator.address(), &["--advertise", proxy.address()]);
    proxy.forward_to(first.address());
    let mut cluster = Cluster { coordinator, shards: vec![first] };
    let spec = job("run", 1, adamw(), synthetic::kinds(&adamw()));
    let job = start(cluster.address(), &spec).await.remove(0);
    training::step(&job, 0).await.unwrap();
    training::pull(&job, 1).await.unwrap();
    let second: Process = Cluster::shard(cluster.address(), &[]);
    cluster.shards.push(second);
    until_status(&cluster, "two servers are connected", |status| status.servers.len() == 2).await;
    proxy.stall(true);
    let create = after(&job, 1, JobSpec { min_servers: 2, ..spec });
    (cluster, proxy, job, create)
}

/// Returns when `condition` holds for the status of the cluster.
pub(crate) async fn until_status(
    cluster: &Cluster,
    what: &str,
    condition: impl Fn(&Status) -> bool,
) {
    let client = connect(cluster.address()).await;
    let deadline = std::time::Instant::now() + options().timeout;
    while !condition(&client.status().await.unwrap()) {
        assert!(std::time::Instant::now() < deadline, "waited in vain until {what}");
    }
}

async fn names(cluster: &Cluster) -> Vec<String> {
    let status = connect(cluster.address()).await.status().await.unwrap();
    status.jobs.into_iter().map(|job| job.name).collect()
}

#[tokio::test]
async fn a_server_that_is_killed_during_the_copy_ends_the_creation() {
    for killed in [0, 1] {
        let (mut cluster, proxy, _job, create) = out_of_reach().await;
        let client = connect(cluster.address()).await;
        let before = proxy.connections();
        let creating = tokio::spawn(async move { client.create_job(create).await });
        until("the second server dials the first to copy", || proxy.connections() > before).await;
        cluster.shards[killed].kill();
        let failed = creating.await.unwrap();
        assert!(matches!(failed, Err(Error::JobFailed { .. })), "{failed:?}");
        assert_eq!(names(&cluster).await, ["run"]);
    }
}

#[tokio::test]
async fn a_step_during_the_copy_ends_the_creation_and_a_creator_that_goes_away_ends_the_copy() {
    let (cluster, proxy, job, create) = out_of_reach().await;
    let client = connect(cluster.address()).await;
    let creating = {
        let (client, create) = (client.clone(), create.clone());
        tokio::spawn(async move { client.create_job(create).await })
    };
    until_calls_wait(&cluster.coordinator, "CoordinatorService/CreateJob", 1).await;
    creating.abort();
    until_calls_wait(&cluster.coordinator, "CoordinatorService/CreateJob", 0).await;
    assert_eq!(names(&cluster).await, ["run"]);
    // The job is as it was.
    let creating = tokio::spawn(async move { client.create_job(create).await });
    until_calls_wait(&cluster.coordinator, "CoordinatorService/CreateJob", 1).await;
    let committed = async {
        let step = training::step(&job, 1);
        proxy.stall(false);
        step.await.unwrap();
    };
    let (created, ()) = tokio::join!(creating, committed);
    match created.unwrap() {
        Ok(()) => {} // the copy was faster
        Err(Error::VersionGone { version: 1, current: 2, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_copy_goes_on_after_a_connection_broke() {
    let (cluster, proxy, job, create) = out_of_reach().await;
    let expected = digests(&cluster, &job, 1).await;
    proxy.cut_after(300_000);
    proxy.stall(false);
    let next = join(cluster.address(), create).await.remove(0);
    assert_eq!(proxy.cuts(), 1);
    next.keep(AppliedSteps::new(0), &owners(next.spec())).await.unwrap();
    next.initialised().await.unwrap();
    assert_eq!(digests(&cluster, &next, 0).await, expected);
}

fn idle(name: &str) -> JobSpec {
    let idle_timeout = Some(Duration::from_secs(1));
    JobSpec { idle_timeout, ..job(name, 2, adamw(), synthetic::small()) }
}

#[tokio::test]
async fn a_job_is_deleted_when_its_last_rank_has_left() {
    let cluster = Cluster::start(2);
    let spec = JobSpec { idle_timeout: Some(Duration::from_secs(3600)), ..idle("left") };
    let jobs = start(cluster.address(), &spec).await;
    jobs[0].leave().await.unwrap();
    assert_eq!(names(&cluster).await, ["left"]);
    jobs[1].leave_done().await.unwrap();
    assert!(names(&cluster).await.is_empty());
}

#[tokio::test]
async fn a_job_is_deleted_when_its_ranks_have_died_or_never_come() {
    let cluster = Cluster::start(2);
    let client = connect(cluster.address()).await;
    let jobs = start(cluster.address(), &idle("died")).await;
    client.create_job(&idle("alone")).await.unwrap();
    client.create_job(&JobSpec { idle_timeout: None, ..idle("kept") }).await.unwrap();
    drop(jobs);
    let deadline = std::time::Instant::now() + crate::options().timeout;
    while names(&cluster).await != ["kept"] {
        assert!(std::time::Instant::now() < deadline, "{:?}", names(&cluster).await);
    }
}
