//! Workers cannot reach a server that the coordinator reaches.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, FaultProxy, Process, Training, run, synthetic};

use crate::{adamw, connect, job, replicas::train, start, until};

const STEPS: u64 = 6;

fn spec(name: &str, replicas: u32) -> JobSpec {
    let tensors = synthetic::kinds_and_large(&adamw());
    JobSpec { min_servers: 3, replicas, ..job(name, 1, adamw(), tensors) }
}

/// What `zsctl why` prints about a job.
fn why(coordinator: &Process, job: &str) -> String {
    let output = run("zsctl", &["--address", coordinator.address(), "why", job]);
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_with_replicas_continues_without_a_server_that_workers_cannot_reach() {
    let (coordinator, mut proxies, mut shards) = (Cluster::coordinator(), Vec::new(), Vec::new());
    for _ in 0..3 {
        // Workers and other servers go through the proxy, and the coordinator does not.
        let proxy = FaultProxy::start().await.unwrap();
        let shard = Cluster::shard(coordinator.address(), &["--advertise", proxy.address()]);
        proxy.forward_to(shard.address());
        proxies.push(proxy);
        shards.push(shard);
    }
    let cluster = Cluster { coordinator, shards };
    let calm = Training { steps: STEPS, ..Training::new(spec("calm", 1)) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;

    let replicated = start(cluster.address(), &spec("replicated", 2)).await.remove(0);
    let single = start(cluster.address(), &spec("single", 1)).await.remove(0);
    let described = connect(cluster.address()).await.describe_job("replicated").await.unwrap();
    let placement = described.placement;
    let server = &placement.servers()[placement.primary(0)];
    let proxy = proxies.iter().find(|proxy| proxy.address() == server.address).unwrap();
    let done = [(); 2].map(|()| AtomicU64::new(0));
    for (job, done) in [(&replicated, &done[0]), (&single, &done[1])] {
        train(job, 0..2, done).await;
    }
    let disturbed = async {
        // Packets are lost: connections stay open and nothing arrives.
        proxy.stall(true);
        let began = Instant::now();
        for job in ["replicated", "single"] {
            let link = format!("{}, which cannot be reached by rank 0", proxy.address());
            until("why names the link", || why(&cluster.coordinator, job).contains(&link)).await;
            eprintln!("why names the link of {job:?} after {:?}", began.elapsed());
        }
        until("the job with replicas goes on", || done[0].load(Ordering::Relaxed) > 2).await;
        eprintln!("the next step came after {:?}", began.elapsed());
        assert_eq!(done[1].load(Ordering::Relaxed), 1, "one copy of its slices is out of reach");
        proxy.stall(false);
    };
    tokio::join!(
        disturbed,
        train(&replicated, 2..STEPS, &done[0]),
        train(&single, 2..STEPS, &done[1])
    );
    for job in [replicated, single] {
        assert_eq!(job.state_hash(STEPS).await.unwrap(), expected);
    }
}
