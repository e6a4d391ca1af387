//! Servers, and the life of a job.

use super::*;

fn is_failed(error: &Error) -> bool {
    matches!(error, Error::JobFailed { .. })
}

#[test]
fn a_job_waits_for_servers_and_then_for_all_of_them_to_open_it() {
    let mut script = Script::with_servers(1);
    let caller = script.create(JobSpec { min_servers: 2, ..spec(1) });
    assert!(script.opens().is_empty());
    script.server(2);
    assert_eq!(script.opens(), [(1, 1), (2, 1)]);
    script.said(1, script.opened(job()));
    assert_eq!(script.answer(caller), None);
    assert!(matches!(script.join(0), Err(Error::Unavailable { .. })));
    script.said(2, script.opened(job()));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Created { epoch: 1, job_id: JOB })));
}

#[test]
fn a_job_without_enough_servers_reports_the_missing_number() {
    let mut script = Script::with_servers(1);
    let caller = script.create(JobSpec { min_servers: 3, ..spec(1) });
    script.after(WAIT);
    let Error::Timeout { waiting_for, waited_ms } = script.error(caller) else { panic!("timeout") };
    assert!(waiting_for.contains("1 of 3"), "{waiting_for}");
    assert_eq!(*waited_ms, 60_000);
    assert!(script.cluster.jobs().is_empty());
}

#[test]
fn a_server_that_does_not_open_the_job_is_named_and_the_job_is_closed() {
    let mut script = Script::with_servers(2);
    let caller = script.create(spec(1));
    script.said(1, script.opened(job()));
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(caller) else { panic!("timeout") };
    assert!(
        waiting_for.contains("shard server host:2") && !waiting_for.contains("host:1"),
        "{waiting_for}"
    );
    assert_eq!(script.closed(), [1, 2]);
}

#[test]
fn creating_a_job_with_the_same_spec_again_succeeds() {
    let mut script = Script::with_servers(1);
    let early = script.create(spec(1));
    let during = script.create(spec(1));
    script.open_all();
    let late = script.create(spec(1));
    for caller in [early, during, late] {
        assert_eq!(script.answer(caller), Some(&Ok(Reply::Created { epoch: 1, job_id: JOB })));
    }
    assert_eq!(script.opens().len(), 1);
}

#[test]
fn a_different_spec_with_the_same_name_is_refused() {
    let mut script = Script::with_servers(1);
    script.create(spec(1));
    let other = script.create(spec(2));
    let expected = Error::JobExists { job: "job".into(), difference: "world".into() };
    assert_eq!(script.error(other), &expected);
}

#[test]
fn a_server_without_memory_ends_the_creation_and_it_can_be_retried() {
    let mut script = Script::with_servers(2);
    let caller = script.create(spec(1));
    script.failed(2, "no memory");
    let Error::JobFailed { reason, .. } = script.error(caller) else { panic!("failed") };
    assert!(reason.contains("shard server host:2: no memory"), "{reason}");
    assert_eq!(script.closed(), [1, 2]);
    // The answer to the first OpenJob is late and opens nothing.
    let again = script.create_as(8, spec(1));
    script.open_all();
    assert_eq!(script.answer(again), None);
    for server in [1, 2] {
        script.said(server, script.opened(JobRef { id: 8, ..job() }));
    }
    assert_eq!(script.answer(again), Some(&Ok(Reply::Created { epoch: 2, job_id: 8 })));
}

#[test]
fn a_job_without_slices_is_ready_at_once() {
    let mut script = Script::with_servers(1);
    let empty = Manifest::new(vec![TensorSpec::new("empty", [0])]).unwrap();
    let caller = script.create(JobSpec { manifest: empty, ..spec(1) });
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Created { epoch: 1, job_id: JOB })));
    assert_eq!(script.version(), Some(0));
}

#[test]
fn epochs_are_never_used_twice() {
    let mut script = Script::with_servers(1);
    script.create(spec(1));
    script.delete(0);
    script.create(spec(1));
    script.create(JobSpec { name: "other".into(), ..spec(1) });
    assert_eq!(script.opens(), [(1, 1), (1, 2), (1, 3)]);
}

#[test]
fn a_lost_server_fails_its_jobs_and_all_waiting_calls_are_answered() {
    let (mut script, leases) = Script::training(2, 2);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    script.lose_server(2);
    let Error::JobFailed { reason, .. } = script.error(caller) else { panic!("failed") };
    assert!(reason.contains("shard server host:2") && reason.contains("\"a\""), "{reason}");
    assert!(script.ended.iter().all(|(_, error)| error.as_ref().is_some_and(is_failed)));
    assert_eq!(script.ended.len(), 2);
    assert_eq!(script.closed(), [1]);
    assert!(is_failed(&script.join(0).unwrap_err()));
    assert!(is_failed(&script.describe("job").unwrap_err()));
    let caller = script.create(spec(2));
    assert!(is_failed(script.error(caller)));
    assert!(script.failure().is_some());
}

#[test]
fn a_server_without_slices_of_a_job_can_leave() {
    let (mut script, _) = Script::training(1, 1);
    script.server(2);
    script.lose_server(2);
    assert!(script.describe("job").is_ok());
}

#[test]
fn a_deleted_job_is_removed_and_all_waiting_calls_are_answered() {
    let (mut script, leases) = Script::training(2, 2);
    let waiting = script.commit(commit(leases[0], 1, 0, 0));
    let caller = script.delete(0);
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Deleted)));
    assert_eq!(
        script.error(waiting),
        &Error::JobFailed { job: "job".into(), reason: "deleted".into() }
    );
    assert_eq!(script.closed(), [1, 2]);
    assert_eq!(script.ended.len(), 2);
    assert_eq!(script.join(0), Err(Error::UnknownJob { job: "job".into() }));
}
