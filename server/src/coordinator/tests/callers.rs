//! Callers that go away before they are answered.

use super::*;

fn gone(script: &mut Script, caller: Caller, rank: Option<u32>) {
    script.event(Event::Gone { caller, job: "job".into(), rank });
}

#[test]
fn a_job_whose_only_creator_goes_away_is_dissolved_while_it_waits_for_servers() {
    let mut script = Script::with_servers(1);
    let caller = script.create(JobSpec { min_servers: 2, ..spec(1) });
    gone(&mut script, caller, None);
    assert!(script.cluster.jobs.is_empty());
    script.server(2);
    assert!(script.opens().is_empty());
}

#[test]
fn a_job_whose_only_creator_goes_away_is_dissolved_while_servers_open_it() {
    let mut script = Script::with_servers(2);
    let first = script.create(spec(1));
    let second = script.create(spec(1));
    script.said(1, Said::Opened(job()));
    gone(&mut script, first, None);
    assert!(script.closed().is_empty(), "somebody still waits");
    gone(&mut script, second, None);
    assert_eq!(script.closed(), [1, 2]);
    assert!(script.cluster.jobs.is_empty());
    script.said(2, Said::Opened(job()));
    assert!(script.cluster.jobs.is_empty());
}

#[test]
fn a_job_that_is_open_stays_when_its_creator_goes_away() {
    let mut script = Script::with_servers(1);
    let caller = script.create(spec(1));
    script.open_all();
    gone(&mut script, caller, None);
    assert!(script.cluster.describe("job").is_ok());
}

#[test]
fn a_commit_whose_caller_goes_away_counts_and_is_not_waited_for() {
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
