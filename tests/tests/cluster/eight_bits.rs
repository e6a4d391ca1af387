//! Jobs with 8-bit optimizer state: the same bits everywhere, whatever happens.
//!
//! promise: same-bits

use futures_util::future::join_all;
use zeroshard_client::{Commit, CreateJob, Error, Job, StateSelector, Target, TensorId};
use zeroshard_model::{
    AppliedSteps, DType, JobSpec, Optimizer, StateDType, TensorSpec, successor_name,
};
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, resume, step_all, until_saved},
    connect, job,
    replicas::{replace, train_while_killing},
    start, tiers, until,
};

fn spec(name: &str, optimizer: Optimizer) -> JobSpec {
    let tensors = synthetic::kinds_and_large(&optimizer);
    JobSpec { state_dtype: StateDType::Int8, ..job(name, 2, optimizer, tensors) }
}

/// Optimizers that can have 8-bit state.
fn optimizers() -> Vec<Optimizer> {
    let json = [
        r#"{"name":"adam","weight_decay":0.1}"#,
        r#"{"name":"adamw"}"#,
        r#"{"name":"lion"}"#,
        r#"{"name":"sgd","momentum":0.9}"#,
    ];
    json.iter().map(|json| serde_json::from_str(json).unwrap()).collect()
}

/// The hash after some undisturbed steps on one server.
async fn calm(steps: u64) -> String {
    let cluster = Cluster::start(1);
    let run = Training { steps, ..Training::new(spec("calm", adamw())) };
    run.run(cluster.address()).await.unwrap().hash
}

#[tokio::test]
async fn every_optimizer_gives_the_same_bits_on_any_number_of_servers_and_in_any_chunks() {
    let clusters = [1, 2, 3].map(Cluster::start);
    for optimizer in optimizers() {
        let mut expected: Option<String> = None;
        for (servers, chunk_bytes) in [(1, 1 << 20), (2, 12_345), (3, 4 << 20)] {
            let mut run = Training::new(JobSpec {
                min_servers: servers as u32,
                ..spec(optimizer.name(), optimizer)
            });
            run.commit = Commit::default().max_norm(0.5);
            run.options = run.options.chunk_bytes(chunk_bytes);
            let hash = run.run(clusters[servers - 1].address()).await.unwrap().hash;
            let expected = expected.get_or_insert_with(|| hash.clone());
            assert_eq!(hash, *expected, "{optimizer} on {servers} servers");
        }
        let f32_state = JobSpec { state_dtype: StateDType::F32, ..spec("f32", optimizer) };
        let run = Training { commit: Commit::default().max_norm(0.5), ..Training::new(f32_state) };
        let hash = run.run(clusters[0].address()).await.unwrap().hash;
        assert_ne!(Some(hash), expected, "{optimizer}");
        connect(clusters[0].address()).await.delete_job("f32").await.unwrap();
    }
}

#[tokio::test]
async fn servers_that_are_killed_change_no_bit() {
    const STEPS: u64 = 12;
    let expected = calm(STEPS).await;
    let mut cluster = Cluster::start(3);
    let replicas = JobSpec { replicas: 2, min_servers: 3, ..spec("killed", adamw()) };
    let jobs = start(cluster.address(), &JobSpec { compare_every: 1, ..replicas }).await;
    let hash = train_while_killing(&mut cluster, &jobs, (STEPS, 3), replace).await;
    assert_eq!(hash, expected);
}

#[tokio::test]
async fn a_checkpoint_is_restored_to_the_same_bits_in_another_cluster() {
    let expected = calm(5).await;
    let directory = directory();
    let saved = JobSpec { checkpoints: Some(policy(directory.path(), 3)), ..spec("a", adamw()) };
    let one = Cluster::start(1);
    let jobs = start(one.address(), &saved).await;
    for step in 0..3 {
        step_all(&jobs, step).await;
    }
    until_saved(directory.path(), "a", 3).await;
    let three = Cluster::start(3);
    let other = JobSpec { min_servers: 3, ..spec("b", adamw()) };
    let others = resume(three.address(), &other, directory.path(), "a").await;
    for step in 3..5 {
        step_all(&others, step).await;
    }
    assert_eq!(others[0].state_hash(5).await.unwrap(), expected);
}

#[tokio::test]
async fn a_checkpoint_with_f32_state_is_rounded_once_and_one_with_8_bits_is_exact_in_f32() {
    let directory = directory();
    let cluster = Cluster::start(2);
    let with = |name: &str, state_dtype| JobSpec { state_dtype, ..spec(name, adamw()) };
    for (from, of) in [("f32", StateDType::F32), ("int8", StateDType::Int8)] {
        let checkpoints = Some(policy(directory.path(), 2));
        let jobs = start(cluster.address(), &JobSpec { checkpoints, ..with(from, of) }).await;
        for step in 0..2 {
            step_all(&jobs, step).await;
        }
        until_saved(directory.path(), from, 2).await;
        let mut found = Vec::new();
        for to in StateDType::ALL {
            let other = with(&format!("{from} as {to}"), to);
            let jobs = resume(cluster.address(), &other, directory.path(), from).await;
            found.push(state(&jobs[0], 2).await);
        }
        let before = state(&jobs[0], 2).await;
        assert!(found[0] == before, "f32 state is exact");
        assert_eq!(found[1] == before, of == StateDType::Int8);
    }
}

/// The values of the state tensors of the first tensor.
async fn state(job: &Job, version: u64) -> Vec<Vec<f32>> {
    let numel = job.spec().manifest.tensors()[0].numel() as usize;
    let mut values = Vec::new();
    for name in job.spec().groups[0].state() {
        let mut of_name = vec![f32::NAN; numel];
        let target = Target::new(TensorId::new(0), &mut of_name);
        job.pull_part(version, StateSelector::OptimizerState(name), vec![target]).await.unwrap();
        values.push(of_name);
    }
    values
}

#[tokio::test]
async fn a_job_that_continues_from_another_has_its_state() {
    let mut cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &spec("run", adamw())).await;
    for step in 0..2 {
        step_all(&jobs, step).await;
    }
    for _ in 0..2 {
        cluster.shards.push(Cluster::shard(cluster.coordinator.address(), &[]));
    }
    let successor = JobSpec { min_servers: 3, name: successor_name("run"), ..spec("run", adamw()) };
    let mut create = CreateJob::new(successor);
    create.from = Some(jobs[0].at(2));
    let client = connect(cluster.address()).await;
    client.create_job(create).await.unwrap();
    let others = join_all([0, 1].map(|rank| client.join("run.1", rank))).await;
    let others: Vec<Job> = others.into_iter().map(Result::unwrap).collect();
    let tensors = others[0].spec().manifest.tensors().iter().enumerate();
    let owners = tensors.filter(|(_, tensor)| tensor.alias_of.is_none());
    let owners: Vec<TensorId> = owners.map(|(index, _)| TensorId::new(index)).collect();
    others[0].keep(AppliedSteps::new(0), &owners).await.unwrap();
    until("all ranks know", || others.iter().all(|job| job.version() == Some(0))).await;
    for (step, data) in [(0, 2), (1, 3)] {
        step_all(&jobs, data).await;
        let steps = others.iter().map(|job| async move {
            let gradients = synthetic::gradients(&job.spec().manifest, job.rank(), data);
            job.attempt(step).unwrap().push(gradients).await.unwrap();
            training::commit(job, step, Commit::default()).await.unwrap()
        });
        assert!(join_all(steps).await.iter().all(|report| report.applied));
    }
    assert!(state(&others[0], 2).await == state(&jobs[0], 4).await);
    assert!(
        training::pull(&others[0], 2).await.unwrap() == training::pull(&jobs[0], 4).await.unwrap()
    );
}

#[tokio::test]
async fn state_on_disk_has_the_same_bits_and_is_counted_by_its_bytes() {
    let expected = calm(3).await;
    let disk = tiers::directory();
    let spec = spec("tiers", adamw());
    let trained: usize = (0..spec.manifest.number_of_slices())
        .filter(|&slice| spec.manifest.trains(slice))
        .map(|slice| spec.manifest.slices()[slice].numel)
        .sum();
    let bytes: u64 = spec.required().bytes;
    // Master weights and sums are in memory, and the state is on disk.
    let state = 2 * trained.next_multiple_of(128) as u64 * 129 / 128;
    for memory in [bytes, bytes - state, 0] {
        let cluster = tiers::cluster(1, memory, disk.path());
        let run = Training::new(spec.clone());
        assert_eq!(run.run(cluster.address()).await.unwrap().hash, expected, "{memory} bytes");
        let read = "tier_transferred_bytes_total{direction=\"read\",tier=\"disk\"}";
        assert_eq!(tiers::metric(&cluster.shards[0], read) > 0.0, memory < bytes, "{memory}");
    }
}

#[tokio::test]
async fn a_job_takes_a_quarter_of_the_state_and_the_rest_is_for_others() {
    let numel = 1 << 20;
    let tensors = || vec![TensorSpec { dtype: DType::F32, ..TensorSpec::new("w", [numel]) }];
    let spec =
        |name: &str, state_dtype| JobSpec { state_dtype, ..job(name, 1, adamw(), tensors()) };
    // 8 bytes for master weights and sums, and 2 bytes and two exponents for the state.
    let memory = (numel * 10 + 2 * numel / 128).to_string();
    let cluster = Cluster::start_with(1, &["--host-memory", &memory]);
    let client = connect(cluster.address()).await;
    let refused = client.create_job(&spec("f32", StateDType::F32)).await.unwrap_err();
    assert!(matches!(refused, Error::InsufficientMemory { .. }), "{refused}");
    let jobs = start(cluster.address(), &spec("int8", StateDType::Int8)).await;
    step_all(&jobs, 0).await;
}

#[tokio::test]
async fn an_optimizer_without_8_bit_state_is_refused_when_the_job_is_created() {
    let cluster = Cluster::start(1);
    let client = connect(cluster.address()).await;
    for optimizer in ["lamb", "adafactor", "rmsprop", "nadam"] {
        let optimizer: Optimizer = optimizer.parse().unwrap();
        let refused = client.create_job(&spec("refused", optimizer)).await.unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{refused}");
        assert!(refused.to_string().contains("state_dtype int8"), "{refused}");
    }
}
