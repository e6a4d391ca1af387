//! Workers that take ranks, wait for them, leave, and are lost.
//!
//! promise: exactly-once

use zeroshard_model::Departure;

use super::*;

fn absent(world: u32) -> JobSpec {
    JobSpec { departure: Departure::Absent, ..spec(world) }
}

fn grants(script: &Script) -> Vec<(u64, u32, Lease)> {
    let grant = |(server, command): &(u64, Command)| match command {
        &Command::Grant { rank, lease, .. } => Some((*server, rank, lease)),
        _ => None,
    };
    script.commands.iter().filter_map(grant).collect()
}

fn granted(rank: u32, lease: Lease) -> ServerEvent {
    ServerEvent::Granted { job: job(), rank, lease }
}

#[test]
fn a_join_is_answered_when_every_server_has_accepted_the_lease() {
    let mut script = Script::opened_job(spec(1), 2);
    script.silent = true;
    let (caller, lease) = script.start_join(0, None);
    assert_eq!(grants(&script), [(1, 0, lease), (2, 0, lease)]);
    script.said(1, granted(0, lease));
    assert_eq!(script.answer(caller), None);
    assert!(script.told(lease).is_none());
    // Messages about another lease or rank, or about an earlier job, are ignored.
    script.said(2, granted(0, Lease(99)));
    script.said(2, granted(1, lease));
    script.said(2, ServerEvent::Granted { job: JobRef { id: 8, ..job() }, rank: 0, lease });
    assert_eq!(script.answer(caller), None);
    script.said(2, granted(0, lease));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Joined)));
    assert_eq!(script.told(lease).map(|told| told.lease), Some(lease));
}

#[test]
fn servers_that_do_not_accept_a_lease_are_named_and_the_rank_becomes_free() {
    let mut script = Script::opened_job(spec(1), 2);
    script.silent = true;
    let (caller, lease) = script.start_join(0, Some("worker:1".into()));
    script.said(1, granted(0, lease));
    script.after(WAIT);
    let Error::Timeout { waiting_for, waited_ms: 60_000 } = script.error(caller) else {
        panic!("timeout")
    };
    assert!(
        waiting_for.contains("shard server host:2") && !waiting_for.contains("host:1"),
        "{waiting_for}"
    );
    assert_eq!(script.new_epochs(), [(1, 2), (2, 2)]);
    assert_eq!(script.cluster.next_deadline(), None);
    script.silent = false;
    assert!(script.join(0).is_ok());
}

#[test]
fn a_worker_that_disconnects_during_its_join_frees_the_rank() {
    let mut script = Script::opened_job(spec(1), 1);
    script.silent = true;
    let (_, first) = script.start_join(0, None);
    let (queued, waiting) = script.start_join(0, None);
    let (next, lease) = script.start_join(0, None);
    script.lose(0, waiting);
    script.lose(0, first);
    script.silent = false;
    script.said(1, granted(0, lease));
    assert_eq!(script.answer(next), Some(&Ok(Reply::Joined)));
    assert_eq!(script.answer(queued), None, "its caller has gone");
    assert_eq!(grants(&script).iter().map(|grant| grant.2).collect::<Vec<_>>(), [first, lease]);
}

#[test]
fn a_replacement_waits_for_the_end_of_the_old_lease() {
    let (mut script, leases) = Script::training(2, 1);
    let (caller, lease) = script.start_join(1, None);
    assert_eq!(script.answer(caller), None);
    script.commands.clear();
    script.lose(1, leases[1]);
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Joined)));
    assert!(matches!(
        &script.commands[..],
        [(1, Command::NewEpoch { rank: 1, epoch: 2, .. }), (1, Command::Grant { lease: new, .. })]
            if *new == lease
    ));
    assert_eq!(script.told(lease).map(|told| told.epoch), Some(2));
}

#[test]
fn a_join_for_a_rank_in_use_is_refused_at_the_deadline() {
    let (mut script, _) = Script::training(2, 1);
    let (caller, _) = script.start_join(1, None);
    assert_eq!(script.cluster.next_deadline(), Some(RANK_WAIT));
    script.after(RANK_WAIT);
    assert_eq!(script.error(caller), &Error::RankTaken { job: "job".into(), rank: 1 });
    assert_eq!(script.cluster.next_deadline(), None);
    assert!(matches!(script.join(2), Err(Error::Invalid { .. })));
}

#[test]
fn a_lost_rank_aborts_the_open_step_under_a_new_epoch() {
    let (mut script, leases) = Script::training(3, 2);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    for &lease in &leases {
        script.told(lease);
    }
    script.lose(1, leases[1]);
    let cause = "rank 1 was lost".to_owned();
    let expected = Error::StepAborted { job: "job".into(), step: 0, epoch: 2, cause };
    assert_eq!(script.error(caller), &expected);
    assert_eq!(script.new_epochs(), [(1, 2), (2, 2)]);
    let told = [0, 2].map(|rank: usize| script.told(leases[rank]).map(|told| told.epoch));
    assert_eq!(told, [Some(2), Some(2)]);
    assert!(script.told(leases[1]).is_none());
    // The lost worker's stream ends a second time; its lease is no longer valid.
    script.lose(1, leases[1]);
    assert_eq!(script.epoch(), 2);
}

#[test]
fn incomplete_initial_parameters_are_uploaded_again() {
    for leaves in [false, true] {
        let mut script = Script::opened_job(spec(2), 2);
        let lease = script.join(0).unwrap();
        script.said(1, ServerEvent::Initialised { job: job(), epoch: 1 });
        if leaves {
            script.leave(lease, false);
        } else {
            script.lose(0, lease);
        }
        let dropped = |(_, command): &&(u64, Command)| matches!(command, Command::NewEpoch { .. });
        assert_eq!(script.commands.iter().filter(dropped).count(), 2);
        script.said(2, ServerEvent::Initialised { job: job(), epoch: 1 });
        assert_eq!(script.version(), None);
        script.initialise_all();
        assert_eq!(script.version(), Some(0));
    }
}

#[test]
fn version_0_is_published_once_every_server_has_its_parameters() {
    let mut script = Script::opened_job(spec(1), 2);
    let published = |script: &Script| {
        let publish = |(server, command): &(u64, Command)| match command {
            Command::Publish { job, epoch } => Some((*server, *epoch, job.id)),
            _ => None,
        };
        script.commands.iter().filter_map(publish).collect::<Vec<_>>()
    };
    script.said(1, ServerEvent::Initialised { job: job(), epoch: 1 });
    script.said(1, ServerEvent::Initialised { job: job(), epoch: 1 });
    assert_eq!((script.version(), published(&script)), (None, vec![]));
    script.said(2, ServerEvent::Initialised { job: job(), epoch: 1 });
    assert_eq!((script.version(), published(&script)), (Some(0), vec![(1, 1, JOB), (2, 1, JOB)]));
}

#[test]
fn current_and_later_waits_for_a_departed_rank_end_at_once() {
    let (mut script, leases) = Script::training(3, 1);
    let left = Error::RankLeft { job: "job".into(), rank: 2, step: 0 };
    let calls = [script.commit(commit(leases[0], 1, 0, 0)), script.reduce(leases[0], 1, 0, 1.0)];
    let caller = script.leave(leases[2], false);
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Left)));
    assert_eq!(script.ended, [(leases[2], None)]);
    let later = [
        script.commit(commit(leases[1], 2, 1, 0)),
        script.commit(commit(leases[1], 1, 1, 0)),
        script.discard(turn(leases[1], 2, 1, 0)),
        script.reduce(leases[0], 2, 0, 1.0),
    ];
    for caller in calls.into_iter().chain(later) {
        assert_eq!(script.error(caller), &left);
    }
    // Another worker takes the rank.
    script.join(2).unwrap();
    let caller = script.commit(commit(leases[0], 2, 0, 0));
    assert_eq!(script.answer(caller), None);
}

#[test]
fn a_discard_that_waits_is_told_of_a_rank_that_leaves() {
    let (mut script, leases) = Script::training(2, 1);
    let caller = script.discard(turn(leases[0], 1, 0, 0));
    script.leave(leases[1], false);
    assert!(matches!(script.error(caller), Error::RankLeft { rank: 1, .. }));
}

#[test]
fn a_rank_that_leaves_after_the_decision_does_not_affect_waiting_commits() {
    let (mut script, leases) = Script::training(2, 1);
    script.silent = true;
    script.ready_all(0);
    let callers = [0, 1].map(|rank: u32| script.commit(commit(leases[rank as usize], 1, rank, 0)));
    script.leave(leases[1], false);
    assert_eq!(script.new_epochs(), [(1, 2)]);
    script.stored(1, 1, 0);
    assert_eq!(script.report(callers[0]), script.report(callers[1]));
    // The lease has ended; a second Leave is answered like the first.
    script.silent = false;
    let again = script.leave(leases[1], false);
    assert_eq!(script.answer(again), Some(&Ok(Reply::Left)));
    assert_eq!(script.epoch(), 2);
}

#[test]
fn the_other_ranks_continue_without_a_rank_that_is_done() {
    let (mut script, leases) = Script::training_of(absent(2), 1);
    let waiting = script.commit(Commit { loss: Some(3.0), ..commit(leases[0], 1, 0, 0) });
    script.ready_all(0);
    script.leave(leases[1], true);
    let done =
        |(_, command): &&(u64, Command)| matches!(command, Command::RankDone { rank: 1, .. });
    assert_eq!(script.commands.iter().filter(done).count(), 1);
    assert_eq!(script.report(waiting).loss, Some(3.0));
    assert_eq!(script.epoch(), 1, "the epoch does not move");
    // Discards only need the other ranks.
    let caller = script.discard(turn(leases[0], 1, 0, 1));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Discarded { attempt: 1 })));
    // All ranks are done: the job has ended.
    script.leave(leases[0], true);
    assert_eq!((script.epoch(), script.version(), script.decisions().len()), (1, Some(1), 1));
}

#[test]
fn the_commit_of_a_done_rank_does_not_count() {
    let (mut script, leases) = Script::training_of(absent(3), 1);
    script.ready_all(0);
    let own = script.commit(Commit { loss: Some(100.0), ..commit(leases[2], 1, 2, 0) });
    script.leave(leases[2], true);
    assert!(matches!(script.error(own), Error::LeaseLost { rank: 2, .. }));
    script.commit(Commit { loss: Some(1.0), ..commit(leases[0], 1, 0, 0) });
    let caller = script.commit(Commit { loss: Some(2.0), ..commit(leases[1], 1, 1, 0) });
    assert_eq!(script.report(caller).loss, Some(1.5));
}

#[test]
fn a_worker_that_takes_a_done_rank_starts_a_new_epoch() {
    let (mut script, leases) = Script::training_of(absent(2), 1);
    script.leave(leases[1], true);
    let waiting = script.reduce(leases[0], 1, 0, 1.0);
    let lease = script.join(1).unwrap();
    assert_eq!((script.epoch(), script.new_epochs()), (2, vec![(1, 2)]));
    assert!(matches!(script.error(waiting), Error::StepAborted { epoch: 2, .. }));
    script.ready_all(0);
    let caller = script.commit(commit(leases[0], 2, 0, 0));
    assert_eq!(script.answer(caller), None);
    script.commit(commit(lease, 2, 1, 0));
    assert!(script.report(caller).applied);
}

#[test]
fn without_the_departure_policy_done_is_an_ordinary_leave() {
    let (mut script, leases) = Script::training(2, 1);
    let waiting = script.commit(commit(leases[0], 1, 0, 0));
    script.leave(leases[1], true);
    assert!(matches!(script.error(waiting), Error::RankLeft { rank: 1, .. }));
}

#[test]
fn if_a_rank_is_done_before_version_0_all_ranks_upload_again() {
    let mut script = Script::opened_job(absent(2), 1);
    let leases = [0, 1].map(|rank| script.join(rank).unwrap());
    script.leave(leases[1], true);
    assert_eq!(script.new_epochs(), [(1, 2)]);
    script.initialise_all();
    script.ready_all(0);
    let caller = script.commit(commit(leases[0], 2, 0, 0));
    assert!(script.report(caller).applied);
}
