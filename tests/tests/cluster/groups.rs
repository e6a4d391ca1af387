//! Groups of ranks that add their gradients before they push them.
//!
//! promise: same-bits

use futures_util::future::{join_all, try_join_all};
use zeroshard_client::{Cluster as Client, Commit, Error, Job, Options, Target, TensorData};
use zeroshard_model::{
    DType, DimPlacement, JobSpec, ProcessMesh, Reduction, StridedBox, TensorId, TensorLayout,
    TensorSpec,
};
use zeroshard_tests::{
    Cluster, Process, Training,
    groups::{self, Gradients},
    synthetic, training,
};

use crate::{adamw, connect, job, options, start};

const STEPS: u64 = 3;

fn spec(name: &str, world: u32, group_size: u32) -> JobSpec {
    let tensors = synthetic::kinds_and_large(&adamw());
    JobSpec { group_size, ..job(name, world, adamw(), tensors) }
}

fn commit() -> Commit {
    Commit::default().max_norm(0.5)
}

/// Runs the job in groups. Returns the hash of its state and the norms of its gradients.
async fn train(cluster: &Cluster, spec: &JobSpec) -> (String, Vec<f64>) {
    let jobs = start(cluster.address(), spec).await;
    let mut norms = Vec::new();
    for step in 0..STEPS {
        let reports = groups::step(&jobs, step, &commit()).await.unwrap();
        assert!(reports.iter().all(|report| *report == reports[0]));
        norms.push(reports[0].gradient_norm);
    }
    (jobs[0].state_hash(STEPS).await.unwrap(), norms)
}

#[tokio::test]
async fn a_group_of_all_ranks_has_the_bits_of_ranks_that_push_alone_on_any_number_of_servers() {
    let alone = Cluster::start(1);
    for world in [2, 4] {
        let run = Training { commit: commit(), ..Training::new(spec("alone", world, 1)) };
        let expected = run.run(alone.address()).await.unwrap();
        connect(alone.address()).await.delete_job("alone").await.unwrap();
        let norms: Vec<f64> = expected.reports.iter().map(|report| report.gradient_norm).collect();
        for servers in [1, 3, 7] {
            let spec = JobSpec { min_servers: servers, ..spec("group", world, world) };
            let cluster = Cluster::start(servers as usize);
            let trained = train(&cluster, &spec).await;
            assert!(trained == (expected.hash.clone(), norms.clone()), "{world} {servers}");
        }
    }
}

#[tokio::test]
async fn several_groups_have_the_same_bits_on_any_number_of_servers() {
    let run = Training { commit: commit(), ..Training::new(spec("alone", 4, 1)) };
    let alone = run.run(Cluster::start(1).address()).await.unwrap();
    let mut first = None;
    for (servers, replicas) in [(1, 1), (3, 2), (7, 1)] {
        let spec = JobSpec { min_servers: servers, replicas, ..spec("groups", 4, 2) };
        let trained = train(&Cluster::start(servers as usize), &spec).await;
        let (_, expected) = first.get_or_insert(trained.clone());
        for (norm, report) in expected.iter().zip(&alone.reports) {
            assert!((norm / report.gradient_norm - 1.0).abs() < 1e-6, "{norm} {report:?}");
        }
        assert!(trained == *first.as_ref().unwrap(), "{servers} servers");
    }
}

#[tokio::test]
async fn gradients_are_rounded_to_the_dtype_of_the_exchange_as_without_groups() {
    let cluster = Cluster::start(2);
    let run = Training { options: options().wire(DType::Bf16), ..Training::new(spec("a", 3, 1)) };
    let expected = run.run(cluster.address()).await.unwrap().hash;
    let jobs = start(cluster.address(), &spec("b", 3, 3)).await;
    for step in 0..STEPS {
        let gradients = Gradients { dtype: DType::Bf16, ..Gradients::synthetic(&jobs, step) };
        let attempts = groups::push(&jobs, step, gradients).await.unwrap();
        let commits = attempts.iter().map(|attempt| attempt.commit(Commit::default()));
        try_join_all(commits).await.unwrap();
    }
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
}

/// The servers' counters of gradients that they have received, and of parameters that they have
/// sent.
fn traffic(cluster: &Cluster) -> [u64; 2] {
    [("received", "push"), ("sent", "pull")].map(|(direction, operation)| {
        let name = format!(
            "zeroshard_payload_bytes_total{{direction=\"{direction}\",operation=\"{operation}\"}} "
        );
        let of = |server: &Process| {
            let text = server.get("/metrics");
            let line = text.lines().find(|line| line.starts_with(&name)).expect("a counter");
            line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
        };
        cluster.shards.iter().map(of).sum()
    })
}

#[tokio::test]
async fn the_traffic_of_the_servers_falls_by_the_size_of_the_group() {
    for group_size in [1, 2, 4] {
        let cluster = Cluster::start(2);
        let jobs = start(cluster.address(), &spec("job", 4, group_size)).await;
        let before = traffic(&cluster);
        let mut pulled = 0;
        for group in jobs.chunks(group_size as usize) {
            let parameters = groups::pull(group, 0, 0).await.unwrap();
            pulled += 4 * parameters.iter().map(|(_, values)| values.len() as u64).sum::<u64>();
            let values = training::pull(&group[0], 0).await.unwrap();
            assert!(parameters.iter().all(|(tensor, part)| *part == values[tensor.index()]));
            pulled += 4 * values.iter().map(|values| values.len() as u64).sum::<u64>();
        }
        match group_size {
            1 => drop(join_all(jobs.iter().map(|job| training::step(job, 0))).await),
            _ => drop(groups::step(&jobs, 0, &Commit::default()).await.unwrap()),
        }
        let after = traffic(&cluster);
        let gradient: u64 = synthetic::gradients(&jobs[0].spec().manifest, 0, 0)
            .iter()
            .map(|of| 4 * of.data.len() as u64)
            .sum();
        let expected = [4 * gradient / u64::from(group_size), pulled];
        assert_eq!([after[0] - before[0], after[1] - before[1]], expected, "{group_size}");
    }
}

#[tokio::test]
async fn gradients_that_some_or_all_ranks_of_a_group_lack_count_as_zeros() {
    let cluster = Cluster::start(2);
    let lacks = |rank: u32, tensor: TensorId| match rank {
        0 => [0, 2].contains(&tensor.index()),
        1 => [0, 5, 8].contains(&tensor.index()),
        2 => [5].contains(&tensor.index()),
        _ => [2, 5, 7].contains(&tensor.index()),
    };
    let gradients = |spec: &JobSpec, rank: u32, step: u64| {
        let mut all = synthetic::gradients(&spec.manifest, rank, step);
        all.retain(|data| !lacks(rank, data.tensor));
        all
    };
    let mut hashes = Vec::new();
    for group_size in [1, 4] {
        let spec = spec(&format!("absent{group_size}"), 4, group_size);
        let jobs = start(cluster.address(), &spec).await;
        for step in 0..2 {
            let of_ranks = (0..4).map(|rank| gradients(&spec, rank, step)).collect();
            match group_size {
                1 => {
                    for (job, gradients) in jobs.iter().zip::<Vec<Vec<TensorData>>>(of_ranks) {
                        let attempt = job.attempt(step).unwrap();
                        attempt.push(gradients).await.unwrap();
                        attempt.push_absent(&synthetic::tensor_ids([0, 2, 5, 7, 8])).await.unwrap();
                    }
                }
                _ => {
                    let gradients = Gradients { dtype: DType::F32, of_ranks };
                    groups::push(&jobs, step, gradients).await.unwrap();
                }
            }
            let commit = |job: &Job| job.attempt(step).unwrap();
            let attempts: Vec<_> = jobs.iter().map(commit).collect();
            let commits = attempts.iter().map(|attempt| attempt.commit(Commit::default()));
            try_join_all(commits).await.unwrap();
        }
        hashes.push(jobs[0].state_hash(2).await.unwrap());
    }
    assert_eq!(hashes[0], hashes[1]);
}

#[tokio::test]
async fn an_overflow_in_a_group_names_the_rank_or_the_sum() {
    let cluster = Cluster::start(2);
    let jobs = start(cluster.address(), &spec("overflow", 4, 2)).await;
    for (step, values, expected) in [
        (0, [1.0, 1.0, f32::NAN, f32::INFINITY], Some(2)),
        (1, [1.0, f32::NEG_INFINITY, f32::NAN, 1.0], Some(1)),
        (2, [f32::MAX, f32::MAX, 1.0, 1.0], None),
    ] {
        let mut attempts = Vec::new();
        for group in jobs.chunks(2) {
            let mut gradients = Gradients::synthetic(group, step);
            for (job, of_rank) in group.iter().zip(&mut gradients.of_ranks) {
                let bias = of_rank.iter_mut().find(|data| data.tensor == TensorId::new(5));
                bias.unwrap().data = vec![values[job.rank() as usize]; 65_537].into();
            }
            attempts.extend(groups::push(group, step, gradients).await.unwrap());
        }
        let reports = join_all(attempts.iter().map(|a| a.commit(Commit::default()))).await;
        let report = reports.into_iter().next().unwrap().unwrap();
        let overflow = report.overflow.expect("a gradient has overflowed");
        assert_eq!((overflow.tensor.index(), overflow.rank), (5, expected), "{step}");
    }
}

/// Tensor parallelism over pairs of ranks, with two replicas in a group.
#[tokio::test]
async fn the_ranks_of_a_group_that_hold_the_same_box_add_their_gradients() {
    let average = DimPlacement::Partial(Reduction::Avg);
    let tensor = |name: &str, shape: &[u64], along_tp| TensorSpec {
        layout: Some(TensorLayout { mesh: 0, placements: vec![average, along_tp] }),
        ..TensorSpec::new(name, shape)
    };
    let tensors = vec![
        tensor("columns", &[211, 303], DimPlacement::Shard(1)),
        tensor("rows", &[131, 67], DimPlacement::Shard(0)),
        tensor("norm", &[1_234], DimPlacement::Replicate),
        TensorSpec::new("plain", [5_000]),
    ];
    let mesh = ProcessMesh::dense([4, 2], ["dp", "tp"]).unwrap();
    let cluster = Cluster::start(3);
    let mut hashes = Vec::new();
    for group_size in [1, 2, 4, 8] {
        let name = format!("mesh{group_size}");
        let meshes = vec![mesh.clone().into()];
        let spec = JobSpec { meshes, group_size, ..job(&name, 8, adamw(), tensors.clone()) };
        let boxes = |rank: u32, seed: u64| -> Vec<TensorData> {
            let boxed = |(index, tensor): (usize, &TensorSpec)| {
                let all = synthetic::values(seed + index as u64, tensor.numel() as usize);
                let strided = StridedBox::new(&tensor.shape, spec.local_box(index, rank));
                let runs = strided.runs(0..strided.numel());
                let values: Vec<f32> = runs.flat_map(|(_, run)| all[run].to_vec()).collect();
                TensorData::new(TensorId::new(index), values)
            };
            spec.manifest.tensors().iter().enumerate().map(boxed).collect()
        };
        connect(cluster.address()).await.create_job(&spec).await.unwrap();
        let mut jobs = Vec::new();
        for rank in 0..8 {
            let job = connect(cluster.address()).await.join(&name, rank).await.unwrap();
            job.initialise(boxes(rank, 1)).await.unwrap();
            jobs.push(job);
        }
        for step in 0..2 {
            let seed = |rank: u32| 1000 * (step + 1) + 10 * u64::from(rank / 2);
            let of_ranks = (0..8).map(|rank| boxes(rank, seed(rank))).collect::<Vec<_>>();
            let groups = jobs.chunks(group_size as usize);
            for (group, of_ranks) in groups.zip(of_ranks.chunks(group_size as usize)) {
                let of_ranks = of_ranks.to_vec();
                if let [gradients] = &of_ranks[..] {
                    group[0].attempt(step).unwrap().push(gradients.clone()).await.unwrap();
                } else {
                    let gradients = Gradients { dtype: DType::F32, of_ranks };
                    groups::push(group, step, gradients).await.unwrap();
                }
            }
            let attempts: Vec<_> = jobs.iter().map(|job| job.attempt(step).unwrap()).collect();
            let commits = attempts.iter().map(|attempt| attempt.commit(Commit::default()));
            try_join_all(commits).await.unwrap();
        }
        hashes.push(jobs[0].state_hash(2).await.unwrap());
        for group in jobs.chunks(group_size as usize) {
            for (position, job) in group.iter().enumerate() {
                for (tensor, values) in groups::pull(group, position, 2).await.unwrap() {
                    let mut expected = vec![0_f32; values.len()];
                    job.pull(2, vec![Target::new(tensor, &mut expected[..])]).await.unwrap();
                    assert_eq!(values, expected, "tensor {} of {}", tensor.index(), job.rank());
                }
            }
        }
    }
    assert_eq!(hashes[0], hashes[3], "one group has the bits of ranks that push alone");
    assert_ne!(hashes[0], hashes[2], "two groups add in another order");
}

#[tokio::test]
async fn a_group_that_is_lost_is_started_again_and_the_step_is_repeated_with_the_same_bits() {
    let cluster = Cluster::start(2);
    let (expected, _) = train(&cluster, &spec("calm", 4, 2)).await;
    let mut jobs = start(cluster.address(), &spec("lost", 4, 2)).await;
    groups::step(&jobs, 0, &commit()).await.unwrap();
    // A rank of the first group has pushed its sums; the other has not.
    let first = &jobs[..2];
    groups::push(first, 1, Gradients::synthetic(first, 1)).await.unwrap();
    let second = groups::push(&jobs[2..], 1, Gradients::synthetic(&jobs[2..], 1)).await.unwrap();
    let others = jobs.split_off(2);
    drop(jobs);
    let aborted = second[0].commit(commit()).await;
    assert!(matches!(aborted, Err(Error::StepAborted { .. })), "{aborted:?}");
    let mut jobs = Vec::new();
    for rank in 0..2 {
        jobs.push(connect(cluster.address()).await.join("lost", rank).await.unwrap());
    }
    jobs.extend(others);
    for step in 1..STEPS {
        loop {
            match groups::step(&jobs, step, &commit()).await {
                // The ranks that have been there before have not heard of all that have joined.
                Err(Error::StepAborted { .. }) => {}
                done => break drop(done.unwrap()),
            }
        }
    }
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
}

#[tokio::test]
async fn pushes_and_jobs_that_do_not_fit_groups_are_refused() {
    let cluster = Cluster::start(1);
    let client: Client = connect(cluster.address()).await;
    for group_size in [3, 8, 300] {
        let refused = client.create_job(&spec("uneven", 4, group_size)).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    }
    let jobs = start(cluster.address(), &spec("groups", 2, 2)).await;
    let alone = training::step(&jobs[0], 0).await.unwrap_err().to_string();
    assert!(alone.contains("push_sums"), "{alone}");
    let rest = jobs[0].attempt(0).unwrap().rest(false).await.unwrap_err().to_string();
    assert!(rest.contains("its group needs its gradients"), "{rest}");
    let other = Client::connect(cluster.address(), Options::default()).await.unwrap();
    let different = other.create_job(&spec("groups", 2, 1)).await.unwrap_err().to_string();
    assert!(different.contains("group_size"), "{different}");
}
