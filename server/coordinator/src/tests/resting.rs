//! Ranks that rest until every rank rests.
//!
//! promise: no-silent-hang

use super::*;

/// The commands about rests to the first server: rank, and whether its rest ends.
fn rests(script: &Script) -> Vec<(u32, bool)> {
    let rest = |(server, command): &(u64, Command)| match *command {
        Command::RankRests { rank, begins, .. } if *server == 1 => Some((rank, begins.is_none())),
        _ => None,
    };
    script.commands.iter().filter_map(rest).collect()
}

/// The step and the number of the attempt after a rest, and the last rank.
fn rested(script: &Script, caller: Caller) -> (u64, u32, u32) {
    match script.answer(caller) {
        Some(Ok(Reply::Rested(rested))) => {
            (rested.attempt.step, rested.attempt.number, rested.last)
        }
        other => panic!("{caller:?} has {other:?}"),
    }
}

#[test]
fn the_other_ranks_make_steps_and_discard_without_a_resting_rank() {
    let (mut script, leases) = Script::training(2, 1);
    let resting = script.rest(turn(leases[1], 1, 1, 0), false);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    script.ready_all(0);
    let report = script.report(caller);
    assert_eq!((report.world, report.resting), (2, vec![1]));
    let caller = script.discard(turn(leases[0], 1, 0, 1));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Discarded { attempt: 1 })));
    assert_eq!((script.answer(resting), rests(&script)), (None, vec![(1, false)]));
}

#[test]
fn when_every_rank_rests_all_take_part_in_a_new_attempt() {
    let (mut script, leases) = Script::training(3, 1);
    let early = script.rest(turn(leases[2], 1, 2, 0), false);
    for rank in [0, 1] {
        script.commit(commit(leases[rank as usize], 1, rank, 0));
    }
    script.ready_all(0);
    let second = script.rest(turn(leases[1], 1, 1, 1), false);
    let third = script.rest(turn(leases[0], 1, 0, 1), false);
    // Of the ranks that made the last step, 0 and 1, rank 1 is the highest.
    for caller in [early, second, third] {
        assert_eq!(rested(&script, caller), (1, 1, 1));
    }
    assert_eq!(rests(&script)[3..], [(0, true), (1, true), (2, true)]);
    let attempt = Attempt { epoch: 1, step: 1, number: 1 };
    let next = Command::NewAttempt { job: job(), attempt, rested: Some(1) };
    assert!(script.commands.contains(&(1, next)));
    // A repeated call is answered at once, and does not rest again.
    let repeated = script.rest(turn(leases[2], 1, 2, 0), false);
    assert_eq!(rested(&script, repeated), (1, 1, 1));
    // All three ranks are needed again.
    let again = |rank: usize| {
        let turn = Turn { attempt, ..turn(leases[rank], 1, rank as u32, 1) };
        Commit { turn, ..commit(leases[rank], 1, rank as u32, 1) }
    };
    script.ready_at(1, attempt);
    let callers: Vec<_> = (0..2).map(|rank| script.commit(again(rank))).collect();
    assert_eq!(script.answer(callers[0]), None);
    let last = script.commit(again(2));
    assert!(script.report(last).resting.is_empty());
}

#[test]
fn excluded_ranks_do_not_count_in_means_and_norms() {
    let update = |excluded: bool| {
        let (mut script, leases) = Script::training(2, 1);
        script.rest(turn(leases[1], 1, 1, 0), excluded);
        script.ready_all(0);
        let reduced = script.reduce(leases[0], 1, 0, 1.0);
        let caller = script.commit(Commit { max_norm: Some(0.5), ..commit(leases[0], 1, 0, 0) });
        let report = script.report(caller);
        assert_eq!(script.reduced(reduced).value, report.norm.value);
        (report.norm.value, report.clip_coefficient, script.update(0).coefficient)
    };
    // The sums of squares are 1 and 3. The servers divide the sum by 2.
    assert_eq!(update(false), (1.0, 0.5, 0.5));
    assert_eq!(update(true), (2.0, 0.25, 0.5));
}

#[test]
fn a_rank_that_is_lost_or_leaves_ends_all_rests_with_an_error_that_names_it() {
    for left in [false, true] {
        let (mut script, leases) = Script::training(3, 1);
        let waiting = script.rest(turn(leases[1], 1, 1, 0), false);
        if left {
            script.leave(leases[0], false);
            let expected = Error::RankLeft { job: "job".into(), rank: 0, step: 0 };
            assert_eq!(script.error(waiting), &expected);
        } else {
            script.lose(0, leases[0]);
            let error = script.error(waiting);
            assert!(matches!(error, Error::StepAborted { cause, .. } if cause.contains("rank 0")));
        }
        assert_eq!(rests(&script), [(1, false), (1, true)]);
    }
}

#[test]
fn a_rest_that_lasts_too_long_names_the_ranks_that_train_and_continues() {
    let (mut script, leases) = Script::training(2, 1);
    let late = script.rest(turn(leases[1], 1, 1, 0), false);
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(late) else { panic!() };
    assert!(waiting_for.contains("ranks that still train (rank 0)"), "{waiting_for}");
    let repeated = script.rest(turn(leases[1], 1, 1, 0), false);
    script.rest(turn(leases[0], 1, 0, 0), false);
    assert_eq!(rested(&script, repeated), (0, 1, 1));
}

#[test]
fn a_rest_at_another_step_than_the_open_one_is_refused() {
    let (mut script, leases) = Script::training(2, 1);
    let caller = script.rest(turn(leases[1], 1, 1, 1), false);
    assert!(matches!(script.error(caller), Error::StepMismatch { step: 1, current: 0, .. }));
}

#[test]
fn calls_of_a_resting_rank_are_refused() {
    let (mut script, leases) = Script::training(2, 1);
    script.rest(turn(leases[0], 1, 0, 0), false);
    let calls = [
        script.commit(commit(leases[0], 1, 0, 0)),
        script.discard(turn(leases[0], 1, 0, 0)),
        script.reduce(leases[0], 1, 0, 1.0),
    ];
    for caller in calls {
        let expected = "rank 0 of job \"job\" has rested since step 0; it takes part again when \
                        every rank rests";
        assert_eq!(script.error(caller).to_string(), expected);
    }
    // They do not count in place of rank 1.
    script.ready_all(0);
    assert_eq!(script.version(), Some(0));
}

#[test]
fn a_repeated_rest_needs_the_lease_of_the_rank() {
    let (mut script, leases) = Script::training(2, 1);
    let early = script.rest(turn(leases[1], 1, 1, 0), false);
    let stranger = script.rest(turn(Lease(999), 1, 1, 0), false);
    assert_eq!(script.error(stranger), &Error::LeaseLost { job: "job".into(), rank: 1 });
    script.rest(turn(leases[0], 1, 0, 0), false);
    assert_eq!(rested(&script, early), (0, 1, 1));
}

#[test]
fn ranks_that_rest_agree_on_the_ranks_of_the_mean() {
    let (mut script, leases) = Script::training(2, 1);
    let early = script.rest(turn(leases[1], 1, 1, 0), true);
    let other = script.rest(turn(leases[0], 1, 0, 0), false);
    let Error::Disagreement { rank: 0, value, other_rank: 1, other_value, .. } =
        script.error(other)
    else {
        panic!()
    };
    assert_eq!((&value[..], &other_value[..]), ("all ranks", "the ranks that do not rest"));
    assert_eq!(script.answer(early), None);
}

#[test]
fn values_that_the_program_writes_while_rank_0_rests_are_an_error() {
    let written = |rank: u32| {
        let (mut script, leases) = Script::training(2, 1);
        script.rest(turn(leases[1 - rank as usize], 1, 1 - rank, 0), false);
        let vote = commit(leases[rank as usize], 1, rank, 0);
        let written = vec![7; 3];
        let caller = script.commit(Commit { written, ..vote });
        script.ready_all(0);
        script.answer(caller).unwrap().clone()
    };
    assert!(written(0).is_ok());
    let text = written(1).unwrap_err().to_string();
    assert!(text.starts_with("the program wrote to tensor "), "{text}");
    let rest = " at step 0 of job \"job\", and rank 0, which sends new values, has no more batches";
    assert!(text.ends_with(rest), "{text}");
}

#[test]
fn a_rank_that_rests_does_not_hide_that_another_has_no_gradient() {
    let big = TensorSpec::new("a", [2 * zeroshard_model::geometry::blocks::SLICE as u64]);
    let spec = JobSpec { manifest: Manifest::new(vec![big]).unwrap(), ..spec(3) };
    let (mut script, leases) = Script::training_of(spec, 1);
    script.rest(turn(leases[0], 1, 0, 0), false);
    script.ready(1, 0, |report| {
        let absent = |slice, rank| Absent { slice, rank, everywhere: false };
        report.sums = vec![(0, 1.0), (1, 1.0)];
        report.absent = vec![absent(0, 0), absent(1, 2)];
    });
    script.commit(commit(leases[1], 1, 1, 0));
    let caller = script.commit(commit(leases[2], 1, 2, 0));
    let absent = Absent { slice: 0, rank: 2, everywhere: false };
    assert_eq!(script.report(caller).absent, [absent]);
}
