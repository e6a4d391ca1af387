//! Jobs that return to a checkpoint: the servers that they wait for, tries that fail, and what ends
//! meanwhile.

use zeroshard_model::{Departure, Fork, JobVersion};

use super::{
    recovery::Before,
    saves::{URL, found, policy},
    *,
};
use crate::{
    cluster::startup::RECOVERY,
    job::restore::RETRY,
    state::interrupted::{RESTORE_LIMIT, SERVERS_LIMIT},
    vocabulary::job_report::JobReport,
};

/// A job with this policy after two steps, which are saved, on servers 1, 2, ...
fn saved_job(spec: JobSpec, servers: u64) -> (Script, Vec<Lease>) {
    let (mut script, leases) = Script::training_of(spec, servers);
    (0..2).for_each(|step| script.step_all(&leases, step));
    script.found = found(2);
    script.commands.clear();
    (script, leases)
}

fn opened_on(script: &Script) -> Vec<u64> {
    script.opens().iter().map(|(server, _)| *server).collect()
}

#[test]
fn a_job_with_replicas_waits_for_as_many_servers_to_be_restored() {
    let spec = JobSpec { replicas: 2, min_servers: 2, ..policy(1, 1) };
    let (mut script, leases) = saved_job(spec, 2);
    script.lose_server(1);
    script.lose_server(2);
    script.server(3);
    script.after(RESTORE_LIMIT / 2);
    assert_eq!((script.opens(), script.failure()), (vec![], None));
    script.server(4);
    assert_eq!(opened_on(&script), [3, 4]);
    script.open_all();
    script.step_all(&leases, 2);
}

#[test]
fn servers_that_are_restarted_together_share_the_slices_of_a_restored_job() {
    let (mut script, leases) = saved_job(policy(1, 1), 3);
    (1..4).for_each(|server| script.lose_server(server));
    script.after(3 * SERVERS_LIMIT);
    script.server(11);
    script.after(SERVERS_LIMIT / 2);
    let caller = script.create(policy(1, 1));
    script.server(12);
    assert_eq!(script.opens(), []);
    script.server(13);
    assert_eq!(opened_on(&script), [11, 12, 13]);
    script.open_all();
    assert!(matches!(script.answer(caller), Some(Ok(Reply::Created { .. }))));
    script.step_all(&leases, 2);
}

#[test]
fn a_creator_learns_which_servers_a_restored_job_waits_for() {
    let (mut script, _) = saved_job(policy(1, 1), 2);
    (1..3).for_each(|server| script.lose_server(server));
    let none = script.create(policy(1, 1));
    script.after(WAIT);
    script.server(11);
    let Error::Timeout { waiting_for, .. } = script.error(none) else { panic!() };
    assert!(waiting_for.ends_with("shard servers: 0 of 2 are connected"), "{waiting_for}");
}

#[test]
fn a_restoration_is_tried_again_when_the_storage_fails() {
    let (mut script, leases) = saved_job(policy(1, 1), 1);
    let failure = || Error::Storage {
        action: "list".to_owned(),
        url: URL.to_owned(),
        cause: "the store does not respond".to_owned(),
    };
    script.storage_errors = vec![failure(), failure()];
    script.lose_server(1);
    script.server(2);
    assert_eq!((script.opens(), script.failure()), (vec![], None));
    let caller = script.create(policy(1, 1));
    script.after(RETRY);
    script.after(RETRY);
    assert_eq!(opened_on(&script), [2]);
    assert_eq!(script.answer(caller), None);
    script.open_all();
    script.step_all(&leases, 2);
    // A damaged checkpoint will not be whole later.
    let cause = "a hash is wrong".to_owned();
    script.storage_errors = vec![Error::CheckpointDamaged { file: "manifest.json".into(), cause }];
    script.lose_server(2);
    script.server(3);
    assert!(script.failure().expect("it has failed").contains("a hash is wrong"));
}

#[test]
fn a_restoration_is_tried_again_when_a_server_cannot_read_the_checkpoint_now() {
    let (mut script, leases) = saved_job(policy(1, 1), 1);
    script.lose_server(1);
    script.server(2);
    let first = script.opens()[0].1;
    script.failed_in(2, first, "the store does not respond", true);
    assert_eq!(script.failure(), None);
    script.after(RETRY);
    let [_, (2, second)] = script.opens()[..] else { panic!("{:?}", script.opens()) };
    assert!(second > first);
    // The report was on its way when the server was told to try again.
    script.failed_in(2, first, "it was late", false);
    assert_eq!(script.failure(), None);
    script.open_all();
    script.failed_in(2, first, "it was very late", false);
    script.step_all(&leases, 2);
    script.failed_in(2, second, "the disk is broken", false);
    assert!(script.failure().expect("it has failed").contains("the disk is broken"));
}

#[test]
fn a_restoration_that_always_fails_ends_with_the_last_reason() {
    let (mut script, _) = saved_job(policy(1, 1), 1);
    script.lose_server(1);
    script.server(2);
    script.failed_in(2, script.opens()[0].1, "out of memory", true);
    script.after(RESTORE_LIMIT);
    let reason = script.failure().expect("the time is over");
    assert!(reason.contains("within 3600s") && reason.contains("out of memory"), "{reason}");
}

#[test]
fn a_job_is_not_restored_while_a_later_checkpoint_is_being_completed() {
    let (mut script, leases) = Script::training_of(policy(1, 2), 1);
    (0..2).for_each(|step| script.step_all(&leases, step));
    script.write_all();
    let [completion] = &script.completions[..] else { panic!("the manifest is being written") };
    let save = completion.plan.save;
    script.commands.clear();
    script.lose_server(1);
    script.server(2);
    script.after(SERVERS_LIMIT);
    assert_eq!(script.opens(), [], "it would return to an earlier checkpoint");
    script.found = found(2);
    script.completed(save, Ok(1));
    assert_eq!(opened_on(&script), [2]);
    script.open_all();
    script.step_all(&leases, 2);
}

/// A job of one rank with this specification, which was created from another one.
fn successor_of(spec: JobSpec, servers: u64) -> (Script, Lease, Fork) {
    let mut script = Script::with_servers(servers);
    script.create_as(8, JobSpec { name: "before".into(), ..super::spec(1) });
    let before = JobRef { name: "before".into(), id: 8 };
    let servers: Vec<u64> = script.opens().iter().map(|(server, _)| *server).collect();
    servers.iter().for_each(|&server| script.said(server, script.opened(before.clone())));
    let epoch = script.cluster.jobs()["before"].epoch;
    for &server in &servers {
        script.said(server, ServerEvent::Initialised { job: before.clone(), epoch });
    }
    script.commands.clear();
    let from = JobVersion { job: "before".into(), job_id: 8, version: 0 };
    let fork = Fork { from, fresh_state: false };
    script.create_from(JOB, spec, Some(fork.clone()));
    script.open_all();
    let lease = script.join(0).unwrap();
    script.initialise_all();
    (script, lease, fork)
}

#[test]
fn a_new_backup_knows_the_predecessor_of_its_job() {
    let spec = JobSpec { replicas: 2, min_servers: 2, ..super::spec(1) };
    let (mut script, _, fork) = successor_of(spec, 2);
    script.commands.clear();
    script.lose_server(1);
    script.server(3);
    let opens = script.commands.iter().filter_map(|(server, command)| match command {
        Command::Open(open) => Some((*server, open.source.clone(), open.fork.clone())),
        _ => None,
    });
    // Otherwise its description differs from that of the primary.
    assert_eq!(opens.collect::<Vec<_>>(), [(3, None, Some(fork.into()))]);
}

#[test]
fn a_job_is_restored_without_its_predecessor() {
    let (mut script, lease, fork) = successor_of(policy(1, 1), 2);
    script.step_all(&[lease], 0);
    script.found = found(1);
    script.commands.clear();
    script.lose_server(1);
    // It is deleted while its successor is being restored.
    let (caller, before) = (script.caller(), JobRef { name: "before".into(), id: 8 });
    script.event(Event::Delete { caller, job: before, wait: WAIT });
    script.after(SERVERS_LIMIT);
    let Some(Command::Open(open)) = script.told_to(2).pop() else { panic!("server 2 opens it") };
    assert_eq!((open.source, open.fork.as_deref()), (None, Some(&fork)));
    script.open_all();
    script.step_all(&[lease], 1);
    let again = script.create_from(JOB, policy(1, 1), Some(fork));
    assert!(matches!(script.answer(again), Some(Ok(Reply::Created { .. }))));
}

#[test]
fn a_rank_that_ends_while_its_job_is_restored_counts_once() {
    let absent = JobSpec { departure: Departure::Absent, ..policy(2, 2) };
    let (mut script, leases) = saved_job(absent, 1);
    script.lose_server(1);
    script.leave(leases[1], true);
    script.server(2);
    script.open_all();
    assert!(
        script.open().departed.done().len() == 0,
        "the checkpoint is of a step in which it took part"
    );
    let lease = script.join(1).expect("it is free");
    script.step_all(&[leases[0], lease], 2);

    let (mut script, leases) = saved_job(policy(2, 2), 1);
    script.lose_server(1);
    script.leave(leases[1], false);
    script.server(2);
    script.open_all();
    let caller = script.commit(commit(leases[0], script.epoch(), 0, 2));
    assert!(matches!(script.error(caller), Error::RankLeft { rank: 1, .. }));
}

#[test]
fn a_rank_that_had_data_at_the_version_of_the_checkpoint_is_not_done_any_more() {
    let absent = JobSpec { departure: Departure::Absent, ..policy(2, 2) };
    let (mut script, leases) = saved_job(absent, 1);
    // Rank 1 takes part in step 2, and has no data for step 3.
    script.step_all(&leases, 2);
    script.leave(leases[1], true);
    script.step_all(&leases[..1], 3);
    script.lose_server(1);
    script.server(2);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    assert!(script.open().departed.done().len() == 0);
    let lease = script.join(1).expect("a worker makes step 2 again");
    script.step_all(&[leases[0], lease], 2);
    script.leave(lease, true);
    script.step_all(&leases[..1], 3);
    // At version 3 it is done.
    script.found = found(3);
    script.commands.clear();
    script.lose_server(2);
    script.server(3);
    script.open_all();
    script.step_all(&leases[..1], 3);
}

#[test]
fn a_restoration_begins_in_an_epoch_that_no_worker_knows() {
    let before = Before::new();
    let before = Before { spec: JobSpec { min_servers: 2, ..policy(2, 2) }.into(), ..before };
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.found = found(2);
    script.returns(1, 1, vec![before.report()]);
    script.event(Event::Refused(before.plan.placement.servers()[1].clone()));
    // A server that knows a later epoch comes when the job is about to be restored.
    let attempt = Attempt { epoch: 2000, ..before.report().attempt };
    script.returns(3, 1, vec![JobReport { attempt, ..before.report() }]);
    script.after(RECOVERY);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    // The workers know epochs that no server has described.
    for known in [3, 9, 2000, 2009] {
        let turn = turn(before.leases[0], known, 0, 4);
        script.attach(0, before.leases[0]).ok();
        let late = script.commit(Commit { turn, ..commit(before.leases[0], known, 0, 4) });
        assert_eq!(script.error(late), &Error::RolledBack { job: "job".into(), version: 2 });
    }
}

#[test]
fn a_restoration_begins_again_when_a_worker_knows_a_later_epoch() {
    let (mut script, leases) = saved_job(policy(1, 1), 1);
    script.lose_server(1);
    script.server(2);
    let first = script.opens()[0].1;
    let knows = |epoch| Attempt { epoch, step: 2, number: 0 };
    script.attach_with(0, leases[0], knows(first - 1), None).unwrap_err();
    assert_eq!(script.opens().len(), 1);
    script.attach_with(0, leases[0], knows(first + 3), None).unwrap_err();
    let [_, (2, second)] = script.opens()[..] else { panic!("{:?}", script.opens()) };
    assert!(second > first + 3);
    // No worker can know such an epoch.
    script.attach_with(0, leases[0], knows(u64::MAX), None).unwrap_err();
    script.open_all();
    assert_eq!(script.epoch(), second);
}

#[test]
fn a_worker_behind_one_that_was_joining_gets_the_rank_of_a_restored_job() {
    let (mut script, leases) = saved_job(policy(2, 2), 2);
    script.lose(1, leases[1]);
    script.silent = true;
    let (_, joining) = script.start_join(1, None);
    let (waiting, _) = script.start_join(1, None);
    script.lose_server(1);
    // The process of the first one has ended.
    script.lose(1, joining);
    script.silent = false;
    script.after(SERVERS_LIMIT);
    script.open_all();
    assert_eq!(script.answer(waiting), Some(&Ok(Reply::Joined)));
}
