//! Unused jobs.

use zeroshard_model::Departure;

use super::{saves::policy, *};

const IDLE: Duration = Duration::from_secs(20);
const SECOND: Duration = Duration::from_secs(1);

fn disposable(world: u32) -> JobSpec {
    JobSpec { idle_timeout: Some(IDLE), ..spec(world) }
}

fn exists(script: &Script) -> bool {
    script.cluster.jobs().contains_key("job")
}

#[test]
fn a_job_is_deleted_when_its_last_rank_leaves() {
    let (mut script, leases) = Script::training_of(disposable(2), 2);
    script.leave(leases[0], false);
    script.after(10 * IDLE);
    assert!(exists(&script), "rank 1 has it");
    script.leave(leases[1], true);
    assert!(!exists(&script));
    assert_eq!(script.closed(), [1, 2]);
    assert_eq!(script.cluster.next_deadline(), None);
}

#[test]
fn no_timer_fires_while_an_unused_job_is_saved() {
    let spec = JobSpec { idle_timeout: Some(IDLE), ..policy(1, 100) };
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_all(&leases, 0);
    script.leave(leases[0], false);
    assert_eq!(script.writes().len(), 1);
    assert!(script.cluster.next_deadline() > Some(script.now));
}

#[test]
fn done_ranks_count_as_having_left() {
    let spec = JobSpec { departure: Departure::Absent, ..disposable(2) };
    let (mut script, leases) = Script::training_of(spec, 1);
    script.leave(leases[0], true);
    script.leave(leases[1], true);
    assert!(!exists(&script));
}

#[test]
fn a_job_without_ranks_is_deleted_after_its_idle_timeout() {
    let (mut script, leases) = Script::training_of(disposable(2), 1);
    script.leave(leases[0], false);
    script.lose(1, leases[1]);
    assert_eq!(script.cluster.next_deadline(), Some(IDLE));
    script.after(IDLE - SECOND);
    assert!(exists(&script));
    script.after(SECOND);
    assert!(!exists(&script));
    assert_eq!(script.closed(), [1]);
}

#[test]
fn a_job_is_kept_if_a_rank_returns_before_the_idle_timeout() {
    let (mut script, leases) = Script::training_of(disposable(1), 1);
    script.lose(0, leases[0]);
    script.after(IDLE - SECOND);
    let lease = script.join(0).unwrap();
    script.after(10 * IDLE);
    assert!(exists(&script));
    script.lose(0, lease);
    assert_eq!(script.cluster.next_deadline(), Some(script.now + IDLE));
}

#[test]
fn a_job_that_no_rank_has_joined_is_deleted_after_its_idle_timeout() {
    let mut script = Script::with_servers(1);
    script.create(disposable(2));
    script.now += 3 * SECOND;
    script.open_all();
    assert_eq!(script.cluster.next_deadline(), Some(3 * SECOND + IDLE));
    // One of two ranks has joined and left; the other may still join.
    let lease = script.join(0).unwrap();
    script.leave(lease, false);
    script.after(IDLE - SECOND);
    assert!(exists(&script));
    script.after(SECOND);
    assert!(!exists(&script));
}

#[test]
fn a_failed_job_is_forgotten_after_its_idle_timeout() {
    let (mut script, _) = Script::training_of(disposable(2), 1);
    script.after(SECOND);
    script.lose_server(1);
    assert!(exists(&script));
    script.after(IDLE);
    assert!(!exists(&script));
}

#[test]
fn a_job_without_an_idle_timeout_is_kept() {
    let (mut script, leases) = Script::training(1, 1);
    script.leave(leases[0], true);
    assert_eq!(script.cluster.next_deadline(), None);
    script.after(100 * IDLE);
    assert!(exists(&script));
}

#[test]
fn a_job_without_an_idle_timeout_of_its_own_has_that_of_the_coordinator() {
    let (mut script, leases) = Script::training(1, 1);
    script.cluster.common.limits.timeout = Some(IDLE);
    script.leave(leases[0], true);
    assert!(exists(&script), "every rank has left it, and it is kept for the next run");
    assert_eq!(script.cluster.next_deadline(), Some(IDLE));
    script.after(IDLE);
    assert!(!exists(&script));
}
