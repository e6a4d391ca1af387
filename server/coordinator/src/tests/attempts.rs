//! Discarded attempts at a step.
//!
//! promise: exactly-once

use super::*;

fn at(attempt: u32, turn: Turn) -> Turn {
    Turn { attempt: Attempt { number: attempt, ..turn.attempt }, ..turn }
}

fn new_attempts(script: &Script) -> Vec<(u64, u64, u64, u32)> {
    let new = |(server, command): &(u64, Command)| match command {
        Command::NewAttempt { attempt: Attempt { epoch, step, number }, .. } => {
            Some((*server, *epoch, *step, *number))
        }
        _ => None,
    };
    script.commands.iter().filter_map(new).collect()
}

fn is_disagreement(error: &Error) -> bool {
    matches!(error, Error::Disagreement { what, .. } if what == "whether attempt 0 is committed or discarded")
}

#[test]
fn the_next_attempt_opens_when_every_rank_has_discarded_the_open_one() {
    let (mut script, leases) = Script::training(2, 2);
    script.ready_all(0);
    let first = script.discard(turn(leases[0], 1, 0, 0));
    let twice = script.discard(turn(leases[0], 1, 0, 0));
    assert_eq!((script.answer(first), new_attempts(&script)), (None, vec![]));
    let second = script.discard(turn(leases[1], 1, 1, 0));
    for caller in [first, twice, second] {
        assert_eq!(script.answer(caller), Some(&Ok(Reply::Discarded { attempt: 1 })));
    }
    assert_eq!(new_attempts(&script), [(1, 1, 0, 1), (2, 1, 0, 1)]);
    // A repeated call is answered at once: the next attempt is open.
    let late = script.discard(turn(leases[0], 1, 0, 0));
    assert_eq!(script.answer(late), Some(&Ok(Reply::Discarded { attempt: 1 })));
    assert_eq!(new_attempts(&script).len(), 2);
}

#[test]
fn reports_and_commits_of_a_discarded_attempt_do_not_count() {
    let (mut script, leases) = Script::training(1, 1);
    script.ready_all(0);
    script.discard(turn(leases[0], 1, 0, 0));
    let stale = script.commit(commit(leases[0], 1, 0, 0));
    let expected = Error::StaleAttempt { job: "job".into(), step: 0, attempt: 0, current: 1 };
    assert_eq!(script.error(stale), &expected);
    let stale = script.reduce(leases[0], 1, 0, 1.0);
    assert_eq!(script.error(stale), &expected);
    script.ready_all(0);
    let turn = at(1, turn(leases[0], 1, 0, 0));
    let caller = script.commit(Commit { turn, ..commit(leases[0], 1, 0, 0) });
    assert_eq!(script.answer(caller), None, "both reports were of attempt 0");
    script.ready_at(1, Attempt { epoch: 1, step: 0, number: 1 });
    assert!(script.report(caller).applied);
    assert_eq!(script.decisions()[0].1.attempt.number, 1);
}

#[test]
fn only_the_open_and_the_previous_attempt_can_be_discarded() {
    let (mut script, leases) = Script::training(1, 1);
    for attempt in 0..3 {
        script.discard(at(attempt, turn(leases[0], 1, 0, 0)));
    }
    for attempt in [0, 1, 4, u32::MAX] {
        let caller = script.discard(at(attempt, turn(leases[0], 1, 0, 0)));
        let expected = Error::StaleAttempt { job: "job".into(), step: 0, attempt, current: 3 };
        assert_eq!(script.error(caller), &expected);
    }
    let other_step = script.discard(turn(leases[0], 1, 0, 1));
    assert!(matches!(script.error(other_step), Error::StepMismatch { .. }));
    let other_epoch = script.discard(turn(leases[0], 9, 0, 0));
    assert!(matches!(script.error(other_epoch), Error::StaleEpoch { .. }));
}

#[test]
fn attempts_start_at_0_in_each_step_and_epoch() {
    let (mut script, leases) = Script::training(1, 1);
    script.discard(turn(leases[0], 1, 0, 0));
    script.ready_at(1, Attempt { epoch: 1, step: 0, number: 1 });
    let turn_1 = at(1, turn(leases[0], 1, 0, 0));
    script.commit(Commit { turn: turn_1, ..commit(leases[0], 1, 0, 0) });
    assert_eq!(script.version(), Some(1));
    script.ready_all(1);
    let caller = script.commit(commit(leases[0], 1, 0, 1));
    assert_eq!(script.report(caller).version, 2);
    script.discard(turn(leases[0], 1, 0, 2));
    script.lose(0, leases[0]);
    let lease = script.join(0).unwrap();
    script.ready_all(2);
    let caller = script.commit(commit(lease, 2, 0, 2));
    assert_eq!(script.report(caller).version, 3);
}

#[test]
fn a_request_for_the_norm_ends_with_its_attempt() {
    let (mut script, leases) = Script::training(1, 1);
    let caller = script.reduce(leases[0], 1, 0, 1.0);
    script.discard(turn(leases[0], 1, 0, 0));
    assert!(matches!(script.error(caller), Error::StaleAttempt { attempt: 0, current: 1, .. }));
}

#[test]
fn commits_and_discards_of_one_attempt_are_refused_at_once_and_can_be_retried() {
    let (mut script, leases) = Script::training(3, 1);
    script.ready_all(0);
    let commits = [0, 1].map(|rank: u32| script.commit(commit(leases[rank as usize], 1, rank, 0)));
    let discard = script.discard(turn(leases[2], 1, 2, 0));
    for caller in commits.into_iter().chain([discard]) {
        assert!(is_disagreement(script.error(caller)));
    }
    let discards = [0, 1].map(|rank: u32| script.discard(turn(leases[rank as usize], 1, rank, 0)));
    let commit_2 = script.commit(commit(leases[2], 1, 2, 0));
    for caller in discards.into_iter().chain([commit_2]) {
        assert!(is_disagreement(script.error(caller)));
    }
    let callers =
        [0, 1, 2].map(|rank: u32| script.commit(commit(leases[rank as usize], 1, rank, 0)));
    assert!(callers.iter().all(|&caller| script.report(caller).applied));
}

#[test]
fn a_single_rank_may_switch_between_commit_and_discard() {
    let (mut script, leases) = Script::training(2, 1);
    let committed = script.commit(commit(leases[0], 1, 0, 0));
    let discarded = script.discard(turn(leases[0], 1, 0, 0));
    assert!(is_disagreement(script.error(committed)));
    assert_eq!(script.answer(discarded), None);
    script.discard(turn(leases[1], 1, 1, 0));
    assert_eq!(script.answer(discarded), Some(&Ok(Reply::Discarded { attempt: 1 })));
}

#[test]
fn a_rank_without_a_discard_is_named_at_the_deadline_and_the_request_remains() {
    let (mut script, leases) = Script::training(2, 1);
    let caller = script.discard(turn(leases[0], 1, 0, 0));
    assert_eq!(script.cluster.next_deadline(), Some(WAIT));
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(caller) else { panic!("timeout") };
    for part in ["attempt 0 at step 0 of job \"job\" (epoch 1)", "not discarded it (rank 1)"] {
        assert!(waiting_for.contains(part), "{part} in {waiting_for}");
    }
    let caller = script.discard(turn(leases[1], 1, 1, 0));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Discarded { attempt: 1 })));
}
