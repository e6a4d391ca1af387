//! Saves on servers without room for second copies of the slices that are being saved.
//!
//! promise: atomic-steps

use zeroshard_client::{Commit, CreateJob, Error};
use zeroshard_model::{CheckpointPolicy, JobSpec, OnMemoryShortage, Restore, RestoreVersion};
use zeroshard_tests::{Cluster, run, synthetic};

use crate::{
    adamw,
    checkpoints::{directory, policy, saved, step_all, url},
    connect, job, start,
};

#[tokio::test]
async fn a_job_trains_through_saves_without_room_for_all_of_its_slices() {
    const STEPS: u64 = 12;
    let directory = directory();
    // Some slices of the job fit, and others do not.
    let cluster = Cluster::start_with(2, &["--snapshot-bytes", "400000"]);
    let client = connect(cluster.address()).await;
    let mut undisturbed = Vec::new();
    for (name, on_memory_shortage) in [
        ("undisturbed", None),
        ("wait", Some(OnMemoryShortage::Wait)),
        ("give-up", Some(OnMemoryShortage::GiveUp)),
    ] {
        let checkpoints = on_memory_shortage.map(|on_memory_shortage| CheckpointPolicy {
            on_memory_shortage,
            ..policy(directory.path(), 1)
        });
        let spec = job(name, 2, adamw(), synthetic::kinds_and_large(&adamw()));
        let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec.clone() }).await;
        let mut hashes = Vec::new();
        for step in 0..STEPS {
            step_all(&jobs, step).await;
            if on_memory_shortage.is_none() {
                hashes.push(jobs[0].state_hash(step + 1).await.unwrap());
            }
        }
        match on_memory_shortage {
            None => undisturbed = hashes,
            Some(_) => {
                let last = jobs[0].state_hash(STEPS).await.unwrap();
                assert_eq!(Some(&last), undisturbed.last(), "{name}");
                // The policy may have begun a save of the last version, which nothing disturbs.
                jobs[0].save(STEPS).await.unwrap();
            }
        }
        if on_memory_shortage == Some(OnMemoryShortage::Wait) {
            let failed = "zeroshard_checkpoints_total{outcome=\"failed\"} 0\n";
            assert!(cluster.coordinator.get("/metrics").contains(failed));
            assert!(saved(directory.path(), name).len() > 2);
        }
        // Whatever was saved is complete.
        for version in saved(directory.path(), name) {
            let spec = JobSpec { name: format!("{name}-{version}"), ..spec.clone() };
            let mut create = CreateJob::new(spec.clone());
            let version = RestoreVersion::Exactly(version);
            let (url, job) = (url(directory.path()), name.to_owned());
            create.restore = Some(Restore { url, job, version, line: None });
            client.create_job(create).await.unwrap();
            let hash = client.state_hash(&spec.name).await.unwrap();
            let RestoreVersion::Exactly(version) = version else { unreachable!() };
            assert_eq!(hash, undisturbed[version as usize - 1], "{name} {version}");
            client.delete_job(&spec.name).await.unwrap();
        }
    }
}

// Another thread keeps the lease of the rank while zsctl runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_without_room_waits_for_the_save_or_the_save_is_given_up_with_an_error() {
    let directory = directory();
    let cluster = Cluster::start_with(1, &["--snapshot-bytes", "100"]);
    let client = connect(cluster.address()).await;
    for on_memory_shortage in [OnMemoryShortage::Wait, OnMemoryShortage::GiveUp] {
        let name = format!("{on_memory_shortage:?}");
        let checkpoints =
            CheckpointPolicy { on_memory_shortage, ..policy(directory.path(), 1 << 40) };
        let spec = job(&name, 1, adamw(), synthetic::small());
        let spec = JobSpec { checkpoints: Some(checkpoints), ..spec };
        let rank = start(cluster.address(), &spec).await.remove(0);
        let attempt = rank.attempt(0).unwrap();
        attempt.push(synthetic::gradients(&spec.manifest, 0, 0)).await.unwrap();
        // The gradients are complete, so the step may be decided at any moment.
        let place = url(directory.path());
        let save = ["checkpoint", "save", &name, "--address", cluster.address(), "--url", &place];
        let output = run("zsctl", &save);
        match on_memory_shortage {
            OnMemoryShortage::Wait => {
                assert!(output.status.success(), "{output:?}");
                assert_eq!(saved(directory.path(), &name), [0]);
            }
            OnMemoryShortage::GiveUp => {
                let error = String::from_utf8(output.stderr).unwrap();
                assert!(!output.status.success());
                assert!(error.contains("100 bytes on this server (--snapshot-bytes)"), "{error}");
                let refused = client.save_checkpoint(&name, None).await;
                assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
                assert!(saved(directory.path(), &name).is_empty());
            }
        }
        attempt.commit(Commit::default()).await.unwrap();
        rank.save(1).await.expect("no step needs room");
    }
}
