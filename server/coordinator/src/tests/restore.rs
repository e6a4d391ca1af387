//! Jobs that start from a checkpoint, and jobs that return to one.

use std::sync::Arc;

use zeroshard_model::{Departure, OnLoss, Restore, RestoreVersion};

use super::{
    recovery::Before,
    saves::{URL, found, policy},
    *,
};
use crate::{
    cluster::startup::RECOVERY, state::interrupted::SERVERS_LIMIT,
    vocabulary::job_report::JobReport,
};

#[test]
fn a_job_that_starts_from_a_checkpoint_has_its_version_and_needs_no_upload() {
    let mut script = Script::with_servers(2);
    script.found = found(7);
    let version = RestoreVersion::LatestIfAny;
    let restore = Restore { url: URL.into(), job: "job".into(), version, line: None };
    let create = |script: &mut Script, restore: Option<Restore>| {
        let caller = script.caller();
        let create = Box::new(Create { spec: spec(1), fork: None, restore, quota: None });
        script.event(Event::Create { caller, job_id: JOB, create, wait: WAIT });
        caller
    };
    create(&mut script, Some(restore.clone()));
    let checkpoints = script.commands.iter().filter_map(|(_, command)| match command {
        Command::Open(open) => open.checkpoint.clone(),
        _ => None,
    });
    assert_eq!(checkpoints.map(|found| found.version.version).collect::<Vec<_>>(), [7, 7]);
    script.open_all();
    assert_eq!(script.version(), Some(7));
    let lease = script.join(0).unwrap();
    script.step_all(&[lease], 7);
    // The latest checkpoint stands for any.
    let again = create(&mut script, Some(restore.clone()));
    assert!(matches!(script.answer(again), Some(Ok(Reply::Created { .. }))));
    for other in [None, Some(Restore { version: RestoreVersion::Exactly(3), ..restore })] {
        let other = create(&mut script, other);
        assert!(matches!(script.error(other), Error::JobExists { .. }));
    }
}

#[test]
fn after_the_loss_of_a_server_ranks_continue_from_the_last_checkpoint_with_their_leases() {
    let (mut script, leases) = Script::training_of(policy(2, 2), 3);
    (0..5).for_each(|step| script.step_all(&leases, step));
    let before = script.epoch();
    let waiting = script.commit(commit(leases[0], before, 0, 5));
    script.found = found(4);
    script.commands.clear();
    script.lose_server(2);
    assert_eq!(script.opens(), [], "it may be started again");
    script.after(SERVERS_LIMIT);
    assert!(matches!(script.error(waiting), Error::Unavailable { .. }));
    // The servers that are left drop their slices when they open the job again, and not before: a
    // new coordinator learns of the job from them.
    assert_eq!(script.closed(), [0; 0]);
    let opened: Vec<u64> = script.opens().iter().map(|(server, _)| *server).collect();
    assert_eq!(&opened, &[1, 3]);
    // What the servers have said about the earlier epoch.
    for server in opened {
        script.said(server, ServerEvent::Opened { job: job(), epoch: before });
    }
    let meanwhile = script.commit(commit(leases[1], before, 1, 5));
    assert!(matches!(script.error(meanwhile), Error::Unavailable { .. }));
    script.open_all();
    assert_eq!(script.closed(), [2]);
    assert_eq!(script.version(), Some(4));
    assert!(script.epoch() > before);
    let told = script.told(leases[0]).expect("a new epoch");
    assert_eq!((told.version, told.epoch), (Some(4), script.epoch()));
    assert!(told.placement.is_some());
    let late = script.commit(commit(leases[1], before, 1, 5));
    assert_eq!(script.error(late), &Error::RolledBack { job: "job".into(), version: 4 });
    script.step_all(&leases, 4);
    script.step_all(&leases, 5);
}

#[test]
fn ranks_that_are_lost_while_a_job_is_restored_are_replaced_in_a_new_epoch() {
    let (mut script, leases) = Script::training_of(policy(2, 2), 2);
    (0..2).for_each(|step| script.step_all(&leases, step));
    script.found = found(2);
    script.commands.clear();
    script.lose_server(1);
    script.lose(1, leases[1]);
    script.after(SERVERS_LIMIT);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    assert_eq!(script.new_epochs().len(), 1);
    let lease = script.join(1).unwrap();
    script.step_all(&[leases[0], lease], 2);
}

#[test]
fn servers_that_restore_a_job_learn_which_ranks_are_done_or_have_left() {
    let spec = JobSpec { departure: Departure::Absent, ..policy(3, 2) };
    let (mut script, leases) = Script::training_of(spec, 2);
    (0..2).for_each(|step| script.step_all(&leases, step));
    script.leave(leases[1], true);
    script.leave(leases[2], false);
    script.found = found(2);
    script.commands.clear();
    script.lose_server(1);
    script.after(SERVERS_LIMIT);
    let Some((2, Command::Open(open))) = script.commands.last() else { panic!("OpenJob") };
    assert_eq!(open.leases, [(0, leases[0])]);
    assert_eq!((&open.done[..], &open.left[..]), (&[1][..], &[2][..]));
}

#[test]
fn a_job_without_servers_is_restored_when_one_connects() {
    let (mut script, leases) = Script::training_of(policy(1, 1), 1);
    script.step_all(&leases, 0);
    script.found = found(1);
    script.commands.clear();
    script.lose_server(1);
    assert_eq!(script.opens(), []);
    script.server(9);
    script.open_all();
    script.step_all(&leases, 1);
}

#[test]
fn a_job_that_loses_a_server_while_it_is_restored_is_restored_again() {
    let (mut script, leases) = Script::training_of(policy(1, 1), 3);
    script.step_all(&leases, 0);
    script.found = found(1);
    script.commands.clear();
    script.lose_server(1);
    script.after(SERVERS_LIMIT);
    assert_eq!(script.opens().len(), 2);
    script.commands.clear();
    script.lose_server(2);
    script.after(SERVERS_LIMIT);
    assert_eq!(script.opens().len(), 1);
    script.open_all();
    script.step_all(&leases, 1);
}

#[test]
fn a_job_without_the_policy_fails_with_its_server() {
    let mut spec = policy(1, 1);
    spec.checkpoints.as_mut().unwrap().on_loss = OnLoss::Fail;
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_all(&leases, 0);
    script.lose_server(1);
    assert!(script.failure().is_some());
}

#[test]
fn a_creator_that_waits_for_the_restoration_of_a_job_is_answered() {
    let (mut script, leases) = Script::training_of(policy(1, 1), 3);
    script.step_all(&leases, 0);
    script.found = found(1);
    script.silent = true;
    script.lose_server(1);
    let spec = policy(1, 1);
    let answered = script.create(spec.clone());
    // Another server is lost meanwhile.
    script.lose_server(2);
    script.after(WAIT / 2);
    let late = script.create(spec.clone());
    let gone = script.create(spec);
    let event = Event::Gone { caller: gone, job: "job".to_owned(), rank: None };
    script.event(event);
    script.after(WAIT / 2);
    assert!(matches!(script.error(answered), Error::Timeout { .. }));
    script.silent = false;
    script.open_all();
    assert!(matches!(script.answer(late), Some(Ok(Reply::Created { .. }))));
    assert_eq!(script.answer(gone), None);
}

/// A job with checkpoints of two servers, of which a new coordinator learns.
fn before() -> Before {
    let before = Before::new();
    let spec = JobSpec { min_servers: 2, ..policy(2, 2) };
    Before { spec: Arc::new(spec), ..before }
}

/// A new coordinator, with which only server 1 has registered.
fn half_recovered(report: JobReport) -> Script {
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.found = found(2);
    script.returns(1, 1, vec![report]);
    script
}

#[test]
fn a_job_returns_to_its_last_checkpoint_when_the_coordinator_and_a_server_are_lost() {
    let before = before();
    let ends: [fn(&mut Script); 3] = [
        |script| {
            let server = script.probed.remove(0);
            script.event(Event::Refused(server));
        },
        |script| script.returns(2, 9, Vec::new()),
        |script| script.after(RECOVERY),
    ];
    for end in ends {
        let mut script = half_recovered(before.report());
        end(&mut script);
        script.after(RECOVERY); // until no other server is expected
        script.after(SERVERS_LIMIT);
        assert!(script.attach(0, before.leases[0]).is_err(), "it is being restored");
        script.open_all();
        assert_eq!(script.version(), Some(2));
        assert!(script.epoch() > before.report().attempt.epoch);
        for (rank, lease) in (0..).zip(before.leases) {
            script.attach(rank, lease).unwrap();
        }
        let late = script.commit(commit(before.leases[0], 3, 0, 4));
        assert_eq!(script.error(late), &Error::RolledBack { job: "job".into(), version: 2 });
        script.step_all(&before.leases, 2);
    }
}

#[test]
fn a_rank_that_does_not_return_to_a_restored_job_is_lost() {
    let before = before();
    let mut script = half_recovered(before.report());
    script.after(RECOVERY);
    script.after(SERVERS_LIMIT);
    script.open_all();
    script.attach(0, before.leases[0]).unwrap();
    script.after(RECOVERY);
    let lease = script.join(1).unwrap();
    script.step_all(&[before.leases[0], lease], 2);
}

#[test]
fn a_job_without_initial_parameters_is_not_restored() {
    let before = before();
    let mut script = half_recovered(JobReport { published: false, ..before.report() });
    script.after(RECOVERY);
    assert!(script.failure().is_some());
}

#[test]
fn a_new_coordinator_remembers_what_a_server_has_described_before_its_stream_broke() {
    let before = before();
    let mut script = half_recovered(before.report());
    script.lose_link(script.links[&1]);
    // The process of the other server has ended.
    let ended = script.probed.iter().find(|of| of.id == 2).unwrap().clone();
    script.event(Event::Refused(ended));
    script.returns(1, 1, vec![before.report()]);
    script.after(RECOVERY);
    script.after(SERVERS_LIMIT);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    (0..).zip(before.leases).for_each(|(rank, lease)| script.attach(rank, lease).unwrap());
    script.step_all(&before.leases, 2);
}

#[test]
fn a_job_that_only_some_servers_have_restored_is_restored_again() {
    let before = before();
    let attempt = |epoch, step| Attempt { epoch, step, number: 0 };
    let restored = || JobReport { attempt: attempt(5, 2), ..before.report() };
    let server = |id| Server { id, incarnation: 1, address: format!("host:{id}") };
    let plan = Plan::new(&before.spec, &[1, 2, 3].map(server), &Zones::new()).unwrap();
    // On three servers, of which one was lost.
    let elsewhere = JobReport { plan, attempt: attempt(3, 2), ..before.report() };
    for earlier in [before.report(), elsewhere] {
        let mut script = half_recovered(restored());
        script.returns(2, 1, vec![earlier]);
        script.after(RECOVERY);
        script.open_all();
        assert_eq!(script.version(), Some(2));
        assert!(script.epoch() > 5);
        (0..).zip(before.leases).for_each(|(rank, lease)| script.attach(rank, lease).unwrap());
        script.step_all(&before.leases, 2);
    }
    // A server that was reading the checkpoint, or has not been told to.
    let restoring = JobReport { restoring: true, ..restored() };
    for [one, other] in [[vec![restoring], vec![restored()]], [vec![restored()], Vec::new()]] {
        let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
        script.found = found(2);
        script.returns(1, 1, one);
        script.returns(2, 1, other);
        script.after(RECOVERY);
        script.open_all();
        assert_eq!(script.version(), Some(2));
        assert!(script.epoch() > 5);
    }
    let restored = || JobReport { restored: Some((5, 2)), ..restored() };
    let mut script = half_recovered(restored());
    script.returns(2, 1, vec![restored()]);
    assert_eq!((script.version(), script.epoch()), (Some(2), 5));
    // The ranks may not have been told of it.
    script.attach(0, before.leases[0]).unwrap();
    let told = script.told(before.leases[0]).unwrap();
    assert_eq!(told.restored, Some((5, 2)));
}
