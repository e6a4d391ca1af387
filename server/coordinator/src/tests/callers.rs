//! Callers that disconnect before they are answered.

use super::*;

fn gone(script: &mut Script, caller: Caller, rank: Option<u32>) {
    script.event(Event::Gone { caller, job: "job".into(), rank });
}

#[test]
fn a_waiting_job_is_deleted_when_its_only_creator_disconnects() {
    let mut script = Script::with_servers(1);
    let caller = script.create(JobSpec { min_servers: 2, ..spec(1) });
    gone(&mut script, caller, None);
    assert!(script.cluster.jobs().is_empty());
    script.server(2);
    assert!(script.opens().is_empty());
}

#[test]
fn an_opening_job_is_deleted_when_its_only_creator_disconnects() {
    let mut script = Script::with_servers(2);
    let first = script.create(spec(1));
    let second = script.create(spec(1));
    script.said(1, script.opened(job()));
    gone(&mut script, first, None);
    assert!(script.closed().is_empty(), "somebody still waits");
    gone(&mut script, second, None);
    assert_eq!(script.closed(), [1, 2]);
    assert!(script.cluster.jobs().is_empty());
    script.said(2, script.opened(job()));
    assert!(script.cluster.jobs().is_empty());
}

#[test]
fn an_open_job_remains_when_its_creator_disconnects() {
    let mut script = Script::with_servers(1);
    let caller = script.create(spec(1));
    script.open_all();
    gone(&mut script, caller, None);
    assert!(script.describe("job").is_ok());
}

#[test]
fn a_commit_of_a_disconnected_caller_still_counts() {
    let (mut script, leases) = Script::training(2, 1);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    let norm = script.reduce(leases[0], 1, 0, 1.0);
    gone(&mut script, caller, Some(0));
    gone(&mut script, norm, Some(0));
    assert_eq!(script.cluster.next_deadline(), None);
    script.ready_all(0);
    let other = script.commit(commit(leases[1], 1, 1, 0));
    assert!(script.report(other).applied);
    assert_eq!((script.answer(caller), script.answer(norm)), (None, None));
}
