//! Tests of the commands of operators (cordon, drain and evict) and of the reasons for which jobs
//! wait.

use super::*;
use crate::{
    cluster::startup::LEARNING,
    vocabulary::calls::{Drained, Stays},
};

/// Creates a job with two replicas on this number of servers, and publishes version 0. No worker
/// has joined, so a drain does not have to wait for the end of a step.
fn replicated(servers: u64) -> Script {
    let mut script = Script::default();
    (1..=servers).for_each(|server| script.server(server));
    script.create(JobSpec { replicas: 2, min_servers: 3, ..spec(1) });
    script.open_all();
    script.initialise_all();
    script
}

/// Drains a server: the first request begins the copies, and the next one releases the server.
fn drain_to_the_end(script: &mut Script, server: u64) -> Drained {
    let first = drain(script, server, false);
    assert!(matches!(&first.stays[..], [Stays { transient: true, .. }]), "{first:?}");
    assert!(placed_on(script).contains(&server), "its slices are copied first");
    assert_eq!(first.degraded, 0);
    script.open_all();
    drain(script, server, false)
}

fn drain(script: &mut Script, server: u64, restore: bool) -> Drained {
    let (caller, server) = (script.caller(), format!("host:{server}"));
    script.event(Event::Drain { caller, server, restore });
    match script.answers.remove(&caller) {
        Some(Ok(Reply::Drained(drained))) => drained,
        other => panic!("{other:?}"),
    }
}

fn cordon(script: &mut Script, server: &str, cordoned: bool) -> Result<Reply> {
    let caller = script.caller();
    script.event(Event::Cordon { caller, server: server.to_owned(), cordoned });
    script.answers.remove(&caller).expect("answered at once")
}

fn placed_on(script: &Script) -> Vec<u64> {
    script.open().plan.placement.servers().iter().map(|server| server.id).collect()
}

/// The reason of the wait, and whether workers or servers are missing.
fn wait(script: &Script) -> Option<(String, bool, bool)> {
    let wait = script.cluster.jobs()["job"].wait(&script.cluster.common)?;
    Some((wait.reason, wait.lacks_workers, wait.lacks_servers))
}

#[test]
fn a_new_job_is_placed_on_servers_that_are_not_cordoned() {
    let mut script = Script::with_servers(3);
    assert!(matches!(cordon(&mut script, "2", true), Ok(Reply::Cordoned(Server { id: 2, .. }))));
    assert!(script.commands.contains(&(2, Command::Cordon { cordoned: true })));
    let creating = script.create(JobSpec { min_servers: 3, ..spec(1) });
    assert_eq!(script.answer(creating), None);
    let (reason, _, lacks_servers) = wait(&script).unwrap();
    assert!(reason.contains("2 of 3") && reason.contains("1 more are cordoned"), "{reason}");
    assert!(lacks_servers);
    cordon(&mut script, "host:2", false).unwrap();
    script.open_all();
    assert!(placed_on(&script).contains(&2));
    assert!(matches!(cordon(&mut script, "host:9", true), Err(Error::Refused { .. })));
}

#[test]
fn a_command_about_a_server_is_repeated_while_a_new_coordinator_may_not_know_it_yet() {
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    let refused = cordon(&mut script, "host:2", true).unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }), "{refused:?}");
    script.after(LEARNING);
    let refused = cordon(&mut script, "host:2", true).unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
}

#[test]
fn a_drained_server_has_no_slices_and_gets_none_when_another_one_is_lost() {
    let mut script = replicated(4);
    assert_eq!(drain_to_the_end(&mut script, 1).stays, []);
    assert!(!placed_on(&script).contains(&1));
    let closed = |(to, command): &(u64, Command)| *to == 1 && matches!(command, Command::Close(_));
    assert!(script.commands.iter().any(closed), "it frees its memory");
    script.open_all();
    script.lose_server(2);
    assert_eq!(script.failure(), None);
    assert!(!placed_on(&script).contains(&1));
}

#[test]
fn a_server_is_drained_only_when_all_slices_have_their_replicas() {
    let mut script = replicated(4);
    // The new backups do not finish their copies.
    script.silent = true;
    script.lose_server(1);
    assert!(script.open().degraded_slices(&script.cluster.jobs()["job"].spec) > 0);
    let (placement, Drained { stays, degraded, .. }) =
        (placed_on(&script), drain(&mut script, 2, false));
    assert!(matches!(&stays[..], [Stays { job, .. }] if job == "job"), "{stays:?}");
    assert!(degraded > 0);
    assert_eq!(placed_on(&script), placement, "nothing has moved");
}

#[test]
fn the_loss_of_another_server_while_slices_are_copied_loses_nothing() {
    let mut script = replicated(3);
    script.silent = true;
    assert_eq!(drain(&mut script, 1, false).degraded, 0);
    script.open_all();
    script.lose_server(2);
    assert_eq!(script.failure(), None);
    let slices = script.open().plan.placement.slices();
    assert!((0..slices).all(|slice| script.open().holders(slice).count() > 0));
}

#[test]
fn a_drain_waits_for_the_end_of_the_open_step() {
    let mut script = replicated(3);
    let lease = script.join(0).unwrap();
    let epoch = script.epoch();
    let waits = drain(&mut script, 1, false).stays.pop().unwrap();
    assert!(waits.transient && waits.reason.contains("the end of step 0"), "{waits:?}");
    assert_eq!(script.epoch(), epoch, "no step is aborted");
    let committed = script.commit(commit(lease, epoch, 0, 0));
    script.ready_all(0);
    assert!(script.report(committed).applied);
    assert!(script.epoch() > epoch, "the placement has changed between the steps");
    let told = script.answer(committed);
    assert!(
        matches!(told, Some(Ok(Reply::Report(_, next))) if *next == script.epoch()),
        "{told:?}"
    );
}

#[test]
fn a_server_is_not_drained_if_the_others_are_too_few_or_too_small() {
    let mut script = replicated(3);
    drain_to_the_end(&mut script, 1);
    let reason = drain(&mut script, 2, false).stays.pop().unwrap();
    assert!(!reason.transient && reason.reason.contains("only 1 are connected"), "{reason:?}");

    let mut script = Script::default();
    let required = spec(1).required_with_replicas().bytes;
    for id in 1..4 {
        let server = Server { id, incarnation: 1, address: format!("host:{id}") };
        // Together, the servers have room for little more than two replicas.
        let bytes = required;
        script.server_with(server, Some(Capacity { bytes, memory: bytes }));
    }
    script.create(JobSpec { replicas: 2, min_servers: 3, ..spec(1) });
    script.open_all();
    script.initialise_all();
    let other = JobSpec { name: "other".to_owned(), min_servers: 3, ..spec(1) };
    script.create_as(JOB + 1, other);
    let reason = drain(&mut script, 1, false).stays;
    let of_job = reason.iter().find(|stays| stays.job == "job").unwrap();
    assert!(!of_job.transient && of_job.reason.contains("bytes free"), "{of_job:?}");
}

#[test]
fn a_job_without_replicas_and_checkpoints_keeps_its_server() {
    let (mut script, leases) = Script::training(1, 2);
    for restore in [false, true] {
        let stays = drain(&mut script, 1, restore).stays;
        assert!(matches!(&stays[..], [Stays { transient: false, .. }]), "{stays:?}");
    }
    assert!(placed_on(&script).contains(&1));
    assert!(script.told(leases[0]).is_none_or(|change| change.restored.is_none()));
}

#[test]
fn an_evicted_rank_loses_its_lease_in_a_new_epoch() {
    let (mut script, leases) = Script::training(2, 1);
    let (epoch, caller) = (script.epoch(), script.caller());
    let waiting = script.commit(commit(leases[0], epoch, 0, 0));
    script.event(Event::Evict { caller, job: "job".into(), rank: 1 });
    let answer = script.answers.remove(&caller);
    assert_eq!(answer, Some(Ok(Reply::Evicted { epoch: script.epoch() })));
    assert!(script.epoch() > epoch);
    let lost = Error::LeaseLost { job: "job".into(), rank: 1 };
    assert!(script.ended.contains(&(leases[1], Some(lost))));
    assert!(matches!(script.error(waiting), Error::StepAborted { .. }));
    let trouble = script.cluster.jobs()["job"].progress.trouble().unwrap();
    assert!(trouble.0.to_string().contains("rank 1 was evicted"), "{trouble:?}");
    script.join(1).unwrap();
    let again = script.caller();
    script.event(Event::Evict { caller: again, job: "job".into(), rank: 7 });
    assert!(matches!(script.error(again), Error::Refused { .. }));
}

#[test]
fn a_wait_names_its_cause_and_is_measured_from_the_last_step() {
    let (mut script, leases) = Script::training(2, 1);
    let (reason, lacks_workers, lacks_servers) = wait(&script).unwrap();
    assert!(reason.contains("have not committed") && !lacks_workers && !lacks_servers, "{reason}");
    script.now += WAIT;
    for rank in 0..2 {
        script.commit(commit(leases[rank as usize], script.epoch(), rank, 0));
    }
    script.ready_all(0);
    assert_eq!(script.cluster.jobs()["job"].progress.since(), script.now);
    script.lose(1, leases[1]);
    let (reason, lacks_workers, _) = wait(&script).unwrap();
    assert!(reason.contains("ranks without a worker (rank 1)") && lacks_workers, "{reason}");
    script.lose_link(script.links[&1]);
    let (reason, _, lacks_servers) = wait(&script).unwrap();
    assert!(reason.contains("host:1, which is not connected") && lacks_servers, "{reason}");
}

#[test]
fn a_job_that_all_ranks_have_left_waits_for_nothing() {
    let (mut script, leases) = Script::training(1, 1);
    script.leave(leases[0], false);
    assert_eq!(wait(&script), None);
}
