//! Decisions that servers store, and reports that wait for them.
//!
//! promise: atomic-steps

use super::*;

/// A decided step of two ranks on two servers that no server has stored, with the calls of the
/// ranks.
fn decided() -> (Script, Vec<Lease>, [Caller; 2]) {
    let (mut script, leases) = Script::training(2, 2);
    script.silent = true;
    script.ready_all(0);
    let callers = [0, 1].map(|rank: u32| script.commit(commit(leases[rank as usize], 1, rank, 0)));
    (script, leases, callers)
}

#[test]
fn a_step_is_reported_when_every_server_has_stored_the_decision() {
    let (mut script, leases, callers) = decided();
    assert_eq!(script.decisions().len(), 2);
    assert_eq!(script.version(), Some(1));
    script.stored(1, 1, 0);
    script.stored(1, 1, 0);
    // Messages about another epoch, step or job are ignored.
    script.stored(2, 7, 0);
    script.stored(2, 1, 1);
    script.said(2, ServerEvent::Stored { job: JobRef { id: 8, ..job() }, epoch: 1, step: 0 });
    let again = script.commit(commit(leases[0], 1, 0, 0));
    assert_eq!(callers.map(|caller| script.answer(caller)), [None, None]);
    script.stored(2, 1, 0);
    assert_eq!(script.report(callers[0]), script.report(callers[1]));
    assert_eq!(script.report(again).version, 1);
}

#[test]
fn servers_that_have_not_stored_the_decision_are_named_at_the_deadline() {
    let (mut script, leases, callers) = decided();
    script.stored(1, 1, 0);
    assert_eq!(script.cluster.next_deadline(), Some(WAIT));
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(callers[0]) else { panic!("timeout") };
    assert!(
        waiting_for.contains("shard server host:2 to store the decision about step 0"),
        "{waiting_for}"
    );
    assert!(!waiting_for.contains("host:1"), "{waiting_for}");
    script.stored(2, 1, 0);
    let again = script.commit(commit(leases[0], 1, 0, 0));
    assert!(script.report(again).applied);
}

#[test]
fn a_committed_step_is_never_reported_as_aborted_after_a_timeout_and_an_epoch_change() {
    for stored_late in [false, true] {
        let (mut script, leases) = Script::training(2, 1);
        script.silent = stored_late;
        script.ready_all(0);
        let late = script.commit(commit(leases[0], 1, 0, 0));
        script.after(WAIT);
        assert!(matches!(script.error(late), Error::Timeout { .. }));
        script.commit(commit(leases[1], 1, 1, 0));
        // The step is decided. The rank that missed the decision does not know it yet, and its
        // lease is lost as well.
        script.lose(1, leases[1]);
        script.lose(0, leases[0]);
        assert_eq!(script.epoch(), 3);
        let again = script.commit(commit(leases[0], 1, 0, 0));
        if stored_late {
            assert_eq!(script.answer(again), None);
            script.stored(1, 1, 0);
        }
        assert_eq!(script.report(again).version, 1);
        let norm = script.reduce(leases[0], 1, 0, 1.0);
        assert_eq!(script.reduced(norm), script.report(again).norm);
        // The identity of the job and the range of the rank are checked in any case.
        let other = Turn { job: JobRef { id: 8, ..job() }, ..turn(leases[0], 1, 0, 0) };
        let replaced = script.commit(Commit { turn: other, ..commit(leases[0], 1, 0, 0) });
        assert_eq!(script.error(replaced), &Error::JobReplaced { job: "job".into() });
        let nobody = script.commit(commit(leases[0], 1, 2, 0));
        assert!(matches!(script.error(nobody), Error::Invalid { .. }));
    }
}

#[test]
fn an_epoch_change_while_servers_store_the_decision_does_not_undo_it() {
    let (mut script, leases, callers) = decided();
    script.stored(1, 1, 0);
    script.lose(1, leases[1]);
    assert_eq!(script.answer(callers[0]), None);
    script.stored(2, 1, 0);
    assert!(script.report(callers[0]).applied);
    assert_eq!(script.version(), Some(1));
}

#[test]
fn a_step_is_not_decided_before_the_previous_decision_is_stored() {
    let mut script = Script::with_servers(1);
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    script.create(JobSpec { manifest: Manifest::new(vec![frozen]).unwrap(), ..spec(1) });
    script.open_all();
    let lease = script.join(0).unwrap();
    script.initialise_all();
    script.silent = true;
    let first = script.commit(commit(lease, 1, 0, 0));
    let second = script.commit(commit(lease, 1, 0, 1));
    assert_eq!(script.decisions().len(), 1);
    script.stored(1, 1, 0);
    assert_eq!((script.report(first).version, script.decisions().len()), (1, 2));
    script.stored(1, 1, 1);
    assert_eq!(script.report(second).version, 2);
}

#[test]
fn a_server_that_is_lost_before_it_has_stored_the_decision_fails_the_job() {
    let (mut script, _, callers) = decided();
    script.stored(1, 1, 0);
    script.lose_server(2);
    for caller in callers {
        assert!(matches!(script.error(caller), Error::JobFailed { .. }));
    }
}
