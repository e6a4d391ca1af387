//! Saves on a server without room for second copies.

use futures_util::FutureExt;
use zeroshard_kernels::Cpu;
use zeroshard_model::{CheckpointPolicy, JobSpec, Manifest, OnLoss, TensorSpec};
use zeroshard_proto::pb::serve_request::Event as Said;

use super::*;
use crate::shard::transfer_tests::Subject;

/// A job with two slices of two elements at version 0.
async fn training(on_memory_shortage: OnMemoryShortage) -> (Subject, Arc<Job<Cpu>>) {
    let tensors = ["a", "b"].map(|name| TensorSpec::new(name, [2]));
    let manifest = Manifest::new(tensors.to_vec()).unwrap();
    let policy = CheckpointPolicy {
        url: "file:///checkpoints".to_owned(),
        every_steps: None,
        every: None,
        keep: 0,
        on_loss: OnLoss::Fail,
        on_memory_shortage,
    };
    let spec = JobSpec::new("job", manifest, vec!["sgd".parse().unwrap()]);
    let mut subject = Subject::new(JobSpec { checkpoints: Some(policy), ..spec });
    for slice in 0..2 {
        subject.push_to(slice, 0, None, 0, &[1.0, 2.0]).await.unwrap();
    }
    subject.publish().await;
    let job = subject.store.job("job", 0).unwrap();
    (subject, job)
}

/// A snapshot of version 0 on a server with no room at all.
fn snapshot(job: &Arc<Job<Cpu>>) -> Snapshot<Cpu> {
    let (snapshot, taken) = Snapshot::take(job, 0, Budget::new(0));
    taken.unwrap();
    snapshot
}

async fn push(subject: &Subject, slice: u32) {
    subject.push_to(slice, 0, Some(0), 0, &[0.5, 0.5]).await.unwrap();
}

#[tokio::test]
async fn a_save_for_which_a_step_waits_too_long_is_given_up_and_the_step_goes_on() {
    let (mut subject, job) = training(OnMemoryShortage::Wait).await;
    let snapshot = snapshot(&job);
    assert!(snapshot.shortage(Duration::ZERO).now_or_never().is_none(), "no step waits");
    push(&subject, 0).await;
    push(&subject, 1).await;
    assert_eq!(snapshot.holds.waiting.borrow().len(), 2);
    assert!(snapshot.shortage(PATIENCE).now_or_never().is_none(), "it waits");
    let reason = snapshot.shortage(Duration::ZERO).await;
    assert!(matches!(reason, Error::OutOfMemory { bytes: 8, .. }), "{reason:?}");
    assert!(reason.to_string().contains("--snapshot-bytes"), "{reason}");
    snapshot.end_all().await;
    assert!(matches!(subject.told().await, Said::Ready(_)));
}

#[tokio::test]
async fn a_step_that_waits_goes_on_when_its_slices_are_written() {
    let (mut subject, job) = training(OnMemoryShortage::Wait).await;
    let snapshot = snapshot(&job);
    push(&subject, 0).await;
    push(&subject, 1).await;
    let written = async {
        snapshot.done(0);
        snapshot.done(1);
        subject.told().await
    };
    tokio::select! {
        ready = written => assert!(matches!(ready, Said::Ready(_))),
        reason = snapshot.shortage(PATIENCE) => panic!("given up: {reason}"),
        never = snapshot.end_released() => match never {},
    }
    snapshot.end_all().await;
    assert!(snapshot.holds.waiting.borrow().is_empty());
}

#[tokio::test]
async fn a_save_is_given_up_at_once_if_the_policy_says_so() {
    let (mut subject, job) = training(OnMemoryShortage::GiveUp).await;
    let snapshot = snapshot(&job);
    push(&subject, 0).await;
    push(&subject, 1).await;
    let reason = snapshot.shortage(PATIENCE).now_or_never();
    assert!(matches!(reason, Some(Error::OutOfMemory { .. })), "{reason:?}");
    snapshot.end_all().await;
    assert!(matches!(subject.told().await, Said::Ready(_)));
}

#[tokio::test]
async fn slices_for_which_a_step_waits_are_written_first() {
    let (subject, job) = training(OnMemoryShortage::Wait).await;
    let snapshot = snapshot(&job);
    let mut slices = [0, 1];
    snapshot.order(&mut slices);
    assert_eq!(slices, [0, 1]);
    push(&subject, 1).await;
    snapshot.order(&mut slices);
    assert_eq!(slices, [1, 0]);
}

#[tokio::test]
async fn saves_are_given_up_from_the_end_of_the_control_stream_until_the_job_is_described() {
    let (mut subject, job) = training(OnMemoryShortage::Wait).await;
    let directory = tempfile::tempdir().unwrap();
    let gate = SaveGate::default();
    let mut saves = Saves::new(subject.store.clone(), job.clone(), 1, gate.clone());
    let request = |save| pb::WriteCheckpoint {
        job: "job".to_owned(),
        job_id: job.id,
        save,
        version: 0,
        url: format!("file://{}", directory.path().display()),
    };
    gate.close();
    saves.begin(request(1)).await;
    assert!(matches!(subject.told().await, Said::CheckpointFailed(failed) if failed.save == 1));
    saves.end_all();
    saves.begin(request(2)).await;
    assert!(matches!(subject.told().await, Said::Written(written) if written.save == 2));
}
