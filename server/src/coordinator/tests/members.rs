//! Servers, jobs and leases.

use super::*;

fn is_failed(error: &Error) -> bool {
    matches!(error, Error::JobFailed { .. })
}

#[test]
fn a_job_waits_for_servers_then_for_all_of_them_to_open_it() {
    let mut script = Script::with_servers(1);
    let caller = script.create(JobSpec { min_servers: 2, ..spec(1) });
    assert!(script.opens().is_empty());
    script.server(2);
    assert_eq!(script.opens(), [(1, 1), (2, 1)]);
    script.event(Event::Opened { server: 1, job: "job".into(), epoch: 1 });
    assert_eq!(script.answer(caller), None);
    assert!(matches!(script.join(0), Err(Error::Unavailable { .. })));
    script.event(Event::Opened { server: 2, job: "job".into(), epoch: 1 });
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Created { epoch: 1 })));
}

#[test]
fn a_job_that_never_gets_its_servers_says_how_many_are_missing() {
    let mut script = Script::with_servers(1);
    let caller = script.create(JobSpec { min_servers: 3, ..spec(1) });
    script.after(WAIT);
    let Error::Timeout { waiting_for, waited_ms } = script.error(caller) else { panic!("timeout") };
    assert!(waiting_for.contains("1 of 3"), "{waiting_for}");
    assert_eq!(*waited_ms, 60_000);
    assert!(script.cluster.jobs.is_empty());
}

#[test]
fn a_server_that_does_not_open_the_job_is_named_and_the_job_is_closed() {
    let mut script = Script::with_servers(2);
    let caller = script.create(spec(1));
    script.event(Event::Opened { server: 1, job: "job".into(), epoch: 1 });
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(caller) else { panic!("timeout") };
    assert!(waiting_for.contains("server 2 (host:2)") && !waiting_for.contains("server 1"), "{waiting_for}");
    assert_eq!(script.closed(), [1, 2]);
}

#[test]
fn the_same_spec_again_is_answered_like_the_first_time() {
    let mut script = Script::with_servers(1);
    let early = script.create(spec(1));
    let during = script.create(spec(1));
    script.open_all();
    let late = script.create(spec(1));
    for caller in [early, during, late] {
        assert_eq!(script.answer(caller), Some(&Ok(Reply::Created { epoch: 1 })));
    }
    assert_eq!(script.opens().len(), 1);
}

#[test]
fn another_spec_of_the_same_name_is_refused() {
    let mut script = Script::with_servers(1);
    script.create(spec(1));
    let other = script.create(spec(2));
    let expected = Error::JobExists { job: "job".into(), difference: "world".into() };
    assert_eq!(script.error(other), &expected);
}

#[test]
fn a_server_without_room_ends_the_creation_everywhere_and_it_can_be_tried_again() {
    let mut script = Script::with_servers(2);
    let caller = script.create(spec(1));
    script.event(Event::Failed { server: 2, job: "job".into(), epoch: 1, reason: "no memory".into() });
    let Error::JobFailed { reason, .. } = script.error(caller) else { panic!("failed") };
    assert!(reason.contains("server 2 (host:2): no memory"), "{reason}");
    assert_eq!(script.closed(), [1, 2]);
    // The answer to the first OpenJob is late: it opens nothing.
    let again = script.create(spec(1));
    for server in [1, 2] {
        script.event(Event::Opened { server, job: "job".into(), epoch: 1 });
    }
    assert_eq!(script.answer(again), None);
    script.open_all();
    assert_eq!(script.answer(again), Some(&Ok(Reply::Created { epoch: 2 })));
}

#[test]
fn a_job_without_slices_is_ready_at_once() {
    let mut script = Script::with_servers(1);
    let empty = Manifest::new(vec![TensorSpec::new("empty", [0])]).unwrap();
    let caller = script.create(JobSpec { manifest: empty, ..spec(1) });
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Created { epoch: 1 })));
    assert_eq!(script.cluster.describe("job").unwrap().version, Some(0));
}

#[test]
fn epochs_are_never_used_twice() {
    let mut script = Script::with_servers(1);
    script.create(spec(1));
    let caller = script.caller();
    script.event(Event::Delete { caller, job: "job".into() });
    script.create(spec(1));
    script.create(JobSpec { name: "other".into(), ..spec(1) });
    assert_eq!(script.opens(), [(1, 1), (1, 2), (1, 3)]);
}

#[test]
fn a_lost_server_fails_its_jobs_and_everybody_who_waits_is_told() {
    let (mut script, leases) = Script::training(2, 2);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    script.event(Event::ServerLost { server: 2 });
    let Error::JobFailed { reason, .. } = script.error(caller) else { panic!("failed") };
    assert!(reason.contains("server 2 (host:2)") && reason.contains("\"a\""), "{reason}");
    assert!(script.ended.iter().all(|(_, error)| error.as_ref().is_some_and(is_failed)));
    assert_eq!(script.ended.len(), 2);
    assert_eq!(script.closed(), [1]);
    assert!(is_failed(&script.join(0).unwrap_err()));
    assert!(is_failed(&script.cluster.describe("job").unwrap_err()));
    let caller = script.create(spec(2));
    assert!(is_failed(script.error(caller)));
    assert!(!script.cluster.status().jobs[0].failure.is_empty());
}

#[test]
fn a_server_that_holds_nothing_of_a_job_can_go() {
    let (mut script, _) = Script::training(1, 1);
    script.server(2);
    script.event(Event::ServerLost { server: 2 });
    assert!(script.cluster.describe("job").is_ok());
}

#[test]
fn a_restarted_server_replaces_the_one_that_had_its_address() {
    let mut script = Script::with_servers(1);
    script.event(Event::ServerJoined { server: 2, address: "host:1".into() });
    assert_eq!(script.dismissed, [1]);
    assert_eq!(script.servers(), [2]);
    // The old stream's end comes late.
    script.event(Event::ServerLost { server: 1 });
    assert_eq!(script.servers(), [2]);
}

#[test]
fn the_first_membership_has_all_that_a_worker_needs() {
    let (script, leases) = Script::training(2, 2);
    let (lease, first) = &script.told[0];
    assert_eq!((*lease, first.lease, first.epoch, first.world), (leases[0], leases[0].0, 1, 2));
    assert!(first.spec.is_some() && first.placement.is_some() && first.version.is_none());
}

#[test]
fn members_hear_when_the_initial_parameters_are_complete() {
    let (mut script, leases) = Script::training(2, 2);
    let told = script.told.split_off(2);
    let versions: Vec<_> = told.iter().map(|(lease, m)| (*lease, m.version)).collect();
    assert_eq!(versions, [(leases[0], Some(0)), (leases[1], Some(0))]);
    assert!(told.iter().all(|(_, membership)| membership.spec.is_none()));
}

#[test]
fn initial_parameters_that_a_lost_rank_left_half_done_are_uploaded_again() {
    let mut script = Script::with_servers(2);
    script.create(spec(2));
    script.open_all();
    let opened = script.opens();
    let initialised = |(server, epoch): (u32, u64)| Event::Initialised { server, job: "job".into(), epoch };
    let lease = script.join(0).unwrap();
    script.event(initialised(opened[0]));
    script.lose(lease);
    let dropped = |(_, command): &&(u32, Command)| {
        matches!(command, Command::NewEpoch(pb::NewEpoch { initialised: false, .. }))
    };
    assert_eq!(script.commands.iter().filter(dropped).count(), 2);

    script.event(initialised(opened[1]));
    assert_eq!(script.cluster.describe("job").unwrap().version, None);
    script.initialise_all();
    assert_eq!(script.cluster.describe("job").unwrap().version, Some(0));
}

#[test]
fn a_taken_or_impossible_rank_is_refused() {
    let (mut script, _) = Script::training(2, 1);
    assert_eq!(script.join(1), Err(Error::RankTaken { job: "job".into(), rank: 1 }));
    assert!(matches!(script.join(2), Err(Error::Invalid { .. })));
}

#[test]
fn a_lost_rank_aborts_the_open_step_under_a_new_epoch() {
    let (mut script, leases) = Script::training(3, 2);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    script.told.clear();
    script.lose(leases[1]);
    let cause = "rank 1 was lost".to_owned();
    let expected = Error::StepAborted { job: "job".into(), step: 0, epoch: 2, cause };
    assert_eq!(script.error(caller), &expected);
    assert_eq!(script.new_epochs(), [(1, 2), (2, 2)]);
    let told: Vec<_> = script.told.iter().map(|(lease, m)| (*lease, m.epoch)).collect();
    assert_eq!(told, [(leases[0], 2), (leases[2], 2)]);
}

#[test]
fn a_lost_rank_is_taken_over_at_the_current_epoch() {
    let (mut script, leases) = Script::training(2, 1);
    script.lose(leases[1]);
    let lease = script.join(1).unwrap();
    assert_eq!(script.new_epochs(), [(1, 2)]);
    assert_eq!(script.told.last().map(|(told, m)| (*told, m.epoch)), Some((lease, 2)));
    // The lost worker's stream ends once more: its lease holds nothing.
    script.lose(leases[1]);
    assert_eq!(script.new_epochs(), [(1, 2)]);
}

#[test]
fn a_worker_that_leaves_disturbs_nobody() {
    let (mut script, leases) = Script::training(2, 1);
    script.told.clear();
    for _ in 0..2 {
        let caller = script.caller();
        script.event(Event::Leave { caller, job: "job".into(), lease: leases[1] });
        assert_eq!(script.answer(caller), Some(&Ok(Reply::Left)));
    }
    assert_eq!(script.ended, [(leases[1], None)]);
    script.lose(leases[1]);
    assert!(script.told.is_empty() && script.new_epochs().is_empty());
}

fn peer(rank: u32) -> Worker {
    Worker { rank, address: Some(format!("worker-{rank}:7")) }
}

/// Who was told of which ranks as peers, and nothing more of it.
fn peers(script: &mut Script) -> Vec<(Lease, Vec<u32>)> {
    let ranks = |membership: pb::Membership| membership.peers.iter().map(|peer| peer.rank).collect();
    script.told.drain(..).map(|(lease, membership)| (lease, ranks(membership))).collect()
}

#[test]
fn members_hear_of_peers_that_come_and_go() {
    let mut script = Script::with_servers(1);
    script.create(spec(4));
    script.open_all();
    let quiet = script.join(1).unwrap();
    let last = script.join_as(peer(3)).unwrap();
    assert_eq!(peers(&mut script), [(quiet, vec![]), (last, vec![3]), (quiet, vec![3])]);
    let first = script.join_as(peer(0)).unwrap();
    let address = |told: &(Lease, pb::Membership)| told.1.peers[0].address.clone();
    assert_eq!(address(&script.told[0]), "worker-0:7");
    let (specs, others): (Vec<_>, Vec<_>) = script.told.iter().partition(|(_, told)| told.spec.is_some());
    assert_eq!((specs.len(), others.len()), (1, 2), "the spec is in the first membership only");
    assert_eq!(peers(&mut script), [first, quiet, last].map(|lease| (lease, vec![0, 3])));

    let caller = script.caller();
    script.event(Event::Leave { caller, job: "job".into(), lease: last });
    assert_eq!(peers(&mut script), [first, quiet].map(|lease| (lease, vec![0])));
    script.lose(first);
    assert_eq!(peers(&mut script), [(quiet, vec![])]);
    let again = script.join_as(peer(0)).unwrap();
    assert_eq!(peers(&mut script), [again, quiet].map(|lease| (lease, vec![0])));
}

#[test]
fn who_gives_no_address_is_nobodys_peer_and_disturbs_nobody() {
    let mut script = Script::with_servers(1);
    script.create(spec(2));
    script.open_all();
    let lease = script.join_as(peer(0)).unwrap();
    script.told.clear();
    let quiet = script.join(1).unwrap();
    assert_eq!(peers(&mut script), [(quiet, vec![0])]);
    let caller = script.caller();
    script.event(Event::Leave { caller, job: "job".into(), lease: quiet });
    assert!(script.told.is_empty());
    // A rank that is taken has no effect on who its peers are.
    assert!(script.join_as(peer(0)).is_err());
    assert!(script.told.is_empty());
    script.lose(lease);
}

#[test]
fn a_deleted_job_is_gone_and_everybody_who_waits_is_told() {
    let (mut script, leases) = Script::training(2, 2);
    let waiting = script.commit(commit(leases[0], 1, 0, 0));
    let caller = script.caller();
    script.event(Event::Delete { caller, job: "job".into() });
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Deleted)));
    assert_eq!(script.error(waiting), &Error::JobFailed { job: "job".into(), reason: "deleted".into() });
    assert_eq!(script.closed(), [1, 2]);
    assert_eq!(script.ended.len(), 2);
    assert_eq!(script.join(0), Err(Error::UnknownJob { job: "job".into() }));
}

#[test]
fn stopping_answers_everybody() {
    let (mut script, leases) = Script::training(2, 1);
    script.commit(commit(leases[0], 1, 0, 0));
    script.create(JobSpec { name: "other".into(), min_servers: 2, ..spec(1) });
    let actions = script.cluster.stop();
    let answers = actions.iter().filter(|a| matches!(a, Action::Answer(_, Err(Error::Unavailable { .. }))));
    assert_eq!(answers.count(), 2);
    assert_eq!(actions.iter().filter(|a| matches!(a, Action::End(_, Some(_)))).count(), 2);
}
