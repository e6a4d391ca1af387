//! Jobs with replicas: backups, and servers that are lost.
//!
//! promise: durability

use zeroshard_model::{Placement, Restore, RestoreVersion};

use super::*;
use crate::{
    cluster::startup::{LEARNING, RECOVERY},
    vocabulary::job_report::{JobReport, Ranks},
};

const REPLICAS: u32 = 2;

/// A job of one rank whose three slices have two servers each, of three; version 0 is published.
fn training() -> (Script, Lease) {
    let mut script = Script::default();
    (1..4).for_each(|server| script.server(server));
    let spec = JobSpec { replicas: REPLICAS, min_servers: 3, ..spec(1) };
    script.create(spec);
    script.open_all();
    script.initialise_all();
    let lease = script.join(0).unwrap();
    (script, lease)
}

/// A server reports the gradients of the open step.
fn ready(script: &mut Script, server: u64, step: u64, copies: u64) {
    script.ready(server, step, |reduced| reduced.copies = copies);
}

fn ready_all(script: &mut Script, step: u64) {
    for server in script.servers() {
        let told = script.commands.iter().rev().find_map(|(to, command)| match command {
            Command::Copy { number, .. } if *to == server => Some(*number),
            Command::NewPlacement { .. } | Command::Open(_) if *to == server => Some(0),
            _ => None,
        });
        ready(script, server, step, told.unwrap_or(0));
    }
}

/// The versions that the servers were told to serve.
fn served(script: &Script) -> Vec<(u64, u64)> {
    let served = |(server, command): &(u64, Command)| match command {
        Command::ServeVersion { version, .. } => Some((*server, *version)),
        _ => None,
    };
    script.commands.iter().filter_map(served).collect()
}

/// The slices that servers were told to copy, and the versions.
fn copies(script: &Script) -> Vec<(u64, u64, Vec<u32>)> {
    let copy = |(server, command): &(u64, Command)| match command {
        Command::Copy { version, slices, .. } => Some((*server, *version, slices.clone())),
        _ => None,
    };
    script.commands.iter().filter_map(copy).collect()
}

/// Makes the open step.
fn step(script: &mut Script, lease: Lease, step: u64) -> Caller {
    let epoch = script.epoch();
    let committed = script.commit(commit(lease, epoch, 0, step));
    ready_all(script, step);
    assert_eq!(script.report(committed).version, step + 1);
    committed
}

#[test]
fn a_step_waits_for_the_servers_that_are_only_backups() {
    let (mut script, lease) = training();
    let placement = script.open().plan.placement.clone();
    let backups: Vec<u64> =
        script.servers().into_iter().filter(|&server| script.open().awaits(server)).collect();
    assert!(backups.len() > placement.servers().len() - 2, "{placement:?}");
    let committed = script.commit(commit(lease, 1, 0, 0));
    for &server in &backups {
        assert_eq!(script.answer(committed), None);
        ready(&mut script, server, 0, 0);
    }
    assert_eq!(script.report(committed).version, 1);
}

#[test]
fn a_version_is_served_when_all_servers_have_stored_its_decision() {
    let (mut script, lease) = training();
    script.silent = true;
    let committed = script.commit(commit(lease, 1, 0, 0));
    ready_all(&mut script, 0);
    assert_eq!(script.decisions().len(), 3);
    for server in 1..4 {
        assert_eq!((script.answer(committed), served(&script)), (None, Vec::new()));
        script.stored(server, 1, 0);
    }
    assert_eq!(script.report(committed).version, 1);
    assert_eq!(served(&script), [(1, 1), (2, 1), (3, 1)]);
}

#[test]
fn backups_of_a_lost_server_become_primaries_and_its_slices_are_copied() {
    let (mut script, lease) = training();
    step(&mut script, lease, 0);
    let before = script.open().plan.placement.clone();
    let waiting = script.commit(commit(lease, 1, 0, 1));
    script.lose_server(1);
    assert!(matches!(script.error(waiting), Error::StepAborted { step: 1, epoch: 2, .. }));
    let after = script.open().plan.placement.clone();
    assert!(after.servers().iter().all(|server| server.id != 1));
    let ids = |placement: &zeroshard_model::Placement, slice: usize| -> Vec<u64> {
        let owners = placement.owners(slice).iter();
        owners.map(|&owner| placement.servers()[owner as usize].id).collect()
    };
    let mut lacking = 0;
    for slice in 0..3 {
        let kept: Vec<u64> = ids(&before, slice).into_iter().filter(|&id| id != 1).collect();
        assert_eq!(ids(&after, slice)[..kept.len()], kept, "slice {slice}");
        lacking += 2 - kept.len();
    }
    let copied: usize = copies(&script).iter().map(|(_, _, slices)| slices.len()).sum();
    assert_eq!(copied, lacking);
    assert!(copies(&script).iter().all(|&(_, version, _)| version == 1));
    step(&mut script, lease, 1);
    assert_eq!(script.open().degraded_slices(&script.cluster.jobs()["job"].spec), 0);
}

#[test]
fn a_step_waits_while_slices_are_copied_and_for_the_report_after_it() {
    let (mut script, lease) = training();
    step(&mut script, lease, 0);
    script.silent = true;
    script.lose_server(1);
    let (server, number) = script
        .commands
        .iter()
        .rev()
        .find_map(|(server, command)| match command {
            Command::Copy { number, .. } => Some((*server, *number)),
            _ => None,
        })
        .unwrap();
    let committed = script.commit(commit(lease, 2, 0, 1));
    let decided = script.decisions().len();
    // Reports that servers have sent before they were told to copy.
    script.servers().into_iter().for_each(|server| ready(&mut script, server, 1, 0));
    assert_eq!(script.decisions().len(), decided);
    script.said(server, ServerEvent::Copied { job: job(), number });
    assert_eq!(script.decisions().len(), decided);
    script.silent = false;
    ready_all(&mut script, 1);
    assert_eq!(script.report(committed).version, 2);
}

#[test]
fn a_decision_stands_when_a_server_is_lost_that_has_not_stored_it() {
    let (mut script, lease) = training();
    script.silent = true;
    let committed = script.commit(commit(lease, 1, 0, 0));
    ready_all(&mut script, 0);
    script.stored(2, 1, 0);
    script.stored(3, 1, 0);
    assert_eq!(script.answer(committed), None);
    script.lose_server(1);
    assert_eq!(script.report(committed).version, 1);
    assert_eq!(served(&script), [(2, 1), (3, 1)]);
}

#[test]
fn a_job_fails_when_the_last_server_of_a_slice_is_lost() {
    let (mut script, lease) = training();
    step(&mut script, lease, 0);
    script.silent = true;
    script.lose_server(1);
    assert!(script.failure().is_none());
    script.lose_server(2);
    let failure = script.failure().expect("slices were only on both servers").to_owned();
    assert!(failure.contains("host:2") && failure.contains("refuses connections"), "{failure}");
}

#[test]
fn a_server_that_connects_becomes_a_backup_if_there_were_too_few() {
    let (mut script, lease) = training();
    script.lose_server(1);
    script.lose_server(2);
    let spec = script.cluster.jobs()["job"].spec.clone();
    assert_eq!(script.open().plan.placement.replicas(), 1);
    assert_eq!(script.open().degraded_slices(&spec), 3);
    step(&mut script, lease, 0);
    script.server(4);
    assert_eq!(script.opens().last().map(|open| open.0), Some(4));
    script.said(4, script.opened(job()));
    step(&mut script, lease, 1);
    assert_eq!(script.open().plan.placement.replicas(), 2);
    assert_eq!(script.open().degraded_slices(&spec), 0);
    // Now the first server can be lost.
    script.lose_server(3);
    step(&mut script, lease, 2);
}

#[test]
fn a_server_that_cannot_be_a_backup_is_left_out() {
    let (mut script, lease) = training();
    script.lose_server(1);
    script.lose_server(2);
    script.server(4);
    script.failed(4, "out of memory");
    assert_eq!(script.closed().last(), Some(&4));
    step(&mut script, lease, 0);
    // Until another one connects.
    script.server(5);
    assert_eq!(script.opens().last().map(|open| open.0), Some(5));
}

#[test]
fn a_server_without_memory_for_more_slices_keeps_those_that_it_has() {
    let (mut script, lease) = training();
    let spec = script.cluster.jobs()["job"].spec.clone();
    step(&mut script, lease, 0);
    script.full = [2, 3].into();
    script.lose_server(1);
    assert!(script.failure().is_none() && script.closed().iter().all(|&closed| closed == 1));
    let epoch = script.epoch();
    for number in 1..3 {
        step(&mut script, lease, number);
    }
    assert_eq!(script.epoch(), epoch);
    let lacking = script.open().degraded_slices(&spec);
    assert!(lacking > 0);
    // A server that connects gets exactly the slices for which there was no memory.
    script.server(4);
    script.said(4, script.opened(job()));
    assert_eq!(script.open().degraded_slices(&spec), 0);
    assert_eq!(script.open().plan.placement.slices_of(4).count(), lacking);
    step(&mut script, lease, 3);
}

#[test]
fn slices_for_which_a_server_has_no_memory_are_copied_to_another() {
    for full in 2..5 {
        let mut script = Script::with_servers(4);
        script.create(JobSpec { replicas: REPLICAS, min_servers: 4, ..spec(1) });
        script.open_all();
        script.initialise_all();
        let lease = script.join(0).unwrap();
        step(&mut script, lease, 0);
        script.full = [full].into();
        script.lose_server(1);
        let spec = script.cluster.jobs()["job"].spec.clone();
        assert_eq!(script.open().degraded_slices(&spec), 0, "without memory on {full}");
        step(&mut script, lease, 1);
    }
}

#[test]
fn servers_are_asked_again_for_memory_when_another_one_is_lost() {
    let mut survived = 0;
    for lost in 2..5 {
        let mut script = Script::with_servers(4);
        script.create(JobSpec { replicas: REPLICAS, min_servers: 4, ..spec(1) });
        script.open_all();
        script.initialise_all();
        script.full = [2, 3, 4].into();
        script.lose_server(1);
        let spec = script.cluster.jobs()["job"].spec.clone();
        assert!(script.open().degraded_slices(&spec) > 0);
        script.full.clear();
        script.lose_server(lost);
        if script.failure().is_none() {
            survived += 1;
            assert_eq!(script.open().degraded_slices(&spec), 0, "without {lost}");
        }
    }
    assert!(survived > 0, "one of the servers has no last copy of a slice");
}

#[test]
fn a_silent_server_is_replaced_after_ten_seconds() {
    let (mut script, lease) = training();
    step(&mut script, lease, 0);
    script.lose_link(script.links[&1]);
    script.after(Duration::from_secs(9));
    assert_eq!(script.epoch(), 1);
    script.after(Duration::from_secs(1));
    assert_eq!(script.epoch(), 2);
    step(&mut script, lease, 1);
}

/// A job as a server of its placement describes it to a new coordinator.
fn report(script: &Script, server: u64, lease: Lease, attempt: Attempt) -> JobReport {
    let (job, open) = (&script.cluster.jobs()["job"], script.open());
    JobReport {
        id: JOB,
        term: 7,
        spec: job.spec.clone(),
        plan: Plan::of(&job.spec, open.plan.placement.as_ref().clone()),
        fork: None,
        restore: None,
        line: Arc::default(),
        recent: RecentSteps::default(),
        attempt,
        published: true,
        initialised: false,
        ranks: Ranks { leases: [(0, lease)].into(), ..Ranks::default() },
        rested: None,
        ready: None,
        empty: script.open().replicas.empty_on(server),
        copies: 0,
        restoring: false,
        restored: None,
        decided: None,
    }
}

/// A server describes its job to a new coordinator.
fn returns(script: &mut Script, id: u64, report: &JobReport) {
    script.returns(id, 1, vec![report.clone()]);
}

/// A process of a server does not exist any more.
fn refused(script: &mut Script, id: u64) {
    // It may be told something before all lost servers are given up.
    script.links.entry(id).or_insert(Link { server: id, stream: 0 });
    script.event(Event::Refused(Server { id, incarnation: 1, address: format!("host:{id}") }));
}

#[test]
fn a_new_coordinator_goes_on_without_a_server_that_died_and_ignores_one_that_was_given_up() {
    let (mut before, old_lease) = training();
    step(&mut before, old_lease, 0);
    let stale = report(&before, 1, old_lease, Attempt::first(1, 1));
    before.lose_server(1);
    before.lose(0, old_lease);
    let lease = before.join(0).unwrap();
    let epoch = before.epoch();
    let others = [2, 3].map(|id| report(&before, id, lease, Attempt::first(epoch, 1)));
    let mut script = Script { now: Duration::from_secs(1), ..Script::default() };
    // It has described a job of an earlier placement, with a lease that has ended.
    returns(&mut script, 1, &stale);
    returns(&mut script, 2, &others[0]);
    refused(&mut script, 3);
    assert!(script.failure().is_none());
    assert_eq!(script.open().members.rank_of(lease), Some(0));
    assert!(script.closed().contains(&1), "{:?}", script.closed());
    assert!(script.epoch() > epoch);
    assert!(script.open().plan.placement.primary_slices(2).count() == 3);
}

#[test]
fn a_server_whose_description_is_out_of_date_describes_its_jobs_again() {
    let (mut before, lease) = training();
    let stale = report(&before, 1, lease, Attempt::first(1, 0));
    (0..2).for_each(|number| _ = step(&mut before, lease, number));
    let fresh = [1, 2, 3].map(|id| report(&before, id, lease, Attempt::first(1, 2)));
    let mut script = Script { now: Duration::from_secs(1), ..Script::default() };
    returns(&mut script, 1, &stale);
    returns(&mut script, 2, &fresh[1]);
    returns(&mut script, 3, &fresh[2]);
    assert_eq!(script.failure(), None);
    assert_eq!(script.dismissed, [1]);
    returns(&mut script, 1, &fresh[0]);
    assert_eq!(script.version(), Some(2));
}

#[test]
fn the_replicas_on_a_server_that_may_have_died_do_not_count() {
    let (mut script, lease) = training();
    let degraded =
        |script: &Script| script.open().degraded_slices(&script.cluster.jobs()["job"].spec);
    let report = report(&script, 1, lease, Attempt::first(1, 0));
    assert_eq!(degraded(&script), 0);
    script.lose_link(script.links[&1]);
    assert_eq!(degraded(&script), script.open().plan.placement.slices_of(1).count());
    returns(&mut script, 1, &report);
    assert_eq!(degraded(&script), 0);
}

#[test]
fn a_server_that_never_received_its_slices_is_told_again_by_a_new_coordinator() {
    let (mut before, lease) = training();
    step(&mut before, lease, 0);
    let mut script = Script { now: Duration::from_secs(1), ..Script::default() };
    for id in [1, 2] {
        returns(&mut script, id, &report(&before, id, lease, Attempt::first(1, 1)));
    }
    // The placement lists it, but the last coordinator died before it had the job.
    script.server(3);
    assert!(script.failure().is_none(), "{:?}", script.failure());
    assert_eq!(script.opens().iter().map(|open| open.0).collect::<Vec<_>>(), [3]);
    assert_eq!(copies(&script), [], "it has not opened the job");
    script.open_all();
    let slices = script.open().plan.placement.slices_of(3).count();
    let copied: usize = copies(&script).iter().map(|(_, _, slices)| slices.len()).sum();
    assert!(copies(&script).iter().all(|copy| copy.0 == 3), "{:?}", copies(&script));
    assert_eq!(copied, slices, "it has no content yet");
}

#[test]
fn initial_parameters_that_all_other_servers_have_are_not_uploaded_again() {
    let mut script = Script::default();
    (1..4).for_each(|server| script.server(server));
    script.create(JobSpec { replicas: REPLICAS, min_servers: 3, ..spec(1) });
    script.open_all();
    script.join(0).unwrap();
    let epoch = script.epoch();
    for server in [1, 2] {
        script.said(server, ServerEvent::Initialised { job: job(), epoch });
    }
    assert_eq!(script.version(), None);
    script.lose_server(3);
    assert_eq!(script.version(), Some(0));
    assert_eq!(script.open().degraded_slices(&script.cluster.jobs()["job"].spec), 0);
    assert!(!copies(&script).is_empty());
}

#[test]
fn a_version_0_of_which_ranks_were_told_survives_the_coordinator_and_a_server() {
    let (before, lease) = training();
    let mut script = Script { now: Duration::from_secs(1), ..Script::default() };
    for id in [1, 2] {
        // The command to publish it has not arrived.
        let report = report(&before, id, lease, Attempt::first(1, 0));
        returns(&mut script, id, &JobReport { published: false, initialised: true, ..report });
    }
    refused(&mut script, 3);
    assert_eq!(script.version(), Some(0), "{:?}", script.failure());
    assert_eq!(script.open().plan.placement.slices_of(3).count(), 0);
}

#[test]
fn a_server_that_describes_an_earlier_placement_closes_the_job_before_it_opens_it_again() {
    let mut script = Script::with_servers(2);
    script.create(JobSpec { replicas: REPLICAS, min_servers: 2, ..spec(1) });
    script.open_all();
    script.initialise_all();
    let lease = script.join(0).unwrap();
    let earlier = report(&script, 2, lease, script.first_attempt(0));
    script.lose_server(2);
    script.commands.clear();
    returns(&mut script, 2, &earlier);
    let of_job = |(server, command): &(u64, Command)| match command {
        Command::Close(_) if *server == 2 => Some("close"),
        Command::Open(_) if *server == 2 => Some("open"),
        _ => None,
    };
    let told: Vec<_> = script.commands.iter().filter_map(of_job).collect();
    assert_eq!(told, ["close", "open"]);
}

#[test]
fn a_new_backup_receives_the_last_decision() {
    let mut script = Script::with_servers(2);
    script.create(JobSpec { replicas: REPLICAS, min_servers: 2, ..spec(1) });
    script.open_all();
    script.initialise_all();
    let lease = script.join(0).unwrap();
    step(&mut script, lease, 0);
    script.lose_server(2);
    script.commands.clear();
    script.server(3);
    let open = script.commands.iter().find_map(|(server, command)| match command {
        Command::Open(open) if *server == 3 => Some(open),
        _ => None,
    });
    let decision = open.expect("it becomes a backup").decision.clone();
    assert_eq!(decision.expect("a step was decided").attempt, Attempt::first(1, 0));
}

#[test]
fn a_new_coordinator_goes_on_without_a_server_that_stays_silent() {
    let (mut before, lease) = training();
    step(&mut before, lease, 0);
    let mut script = Script { now: Duration::from_secs(1), ..Script::default() };
    for id in [1, 2] {
        returns(&mut script, id, &report(&before, id, lease, Attempt::first(1, 1)));
    }
    script.after(RECOVERY);
    assert!(script.failure().is_none(), "{:?}", script.failure());
    assert_eq!(script.open().plan.placement.slices_of(3).count(), 0);
    assert_eq!(copies(&script).len(), 2, "the others copy its slices");
}

#[test]
fn a_new_coordinator_without_any_copy_of_a_slice_fails_the_job() {
    let (mut before, lease) = training();
    step(&mut before, lease, 0);
    let mut script = Script { now: Duration::from_secs(1), ..Script::default() };
    returns(&mut script, 1, &report(&before, 1, lease, Attempt::first(1, 1)));
    script.after(RECOVERY);
    let reason = script.failure().expect("two of three servers are silent");
    assert!(reason.contains("host:2") || reason.contains("host:3"), "{reason}");
}

#[test]
fn a_server_that_missed_the_latest_placement_does_not_fail_the_job() {
    let (mut before, lease) = training();
    step(&mut before, lease, 0);
    let stale = report(&before, 3, lease, Attempt::first(1, 1));
    // Server 1 was started again and has copied its slices; server 3 has not been told.
    let placement = &before.open().plan.placement;
    let again = |of: &Server| Server { incarnation: if of.id == 1 { 2 } else { 1 }, ..of.clone() };
    let servers = placement.servers().iter().map(again).collect();
    let owners = (0..placement.slices()).flat_map(|slice| placement.owners(slice)).copied();
    let placement = Placement::new(servers, REPLICAS as usize, owners.collect()).unwrap();
    let latest = JobReport {
        plan: Plan::of(&stale.spec, placement),
        ..report(&before, 1, lease, Attempt::first(2, 1))
    };
    // Now server 2 dies together with the coordinator.
    for is_back in [true, false] {
        let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
        returns(&mut script, 3, &stale);
        refused(&mut script, 1);
        refused(&mut script, 2);
        assert_eq!(script.failure(), None);
        if is_back {
            script.returns(1, 2, vec![latest.clone()]);
            script.after(LEARNING);
            assert_eq!((script.version(), script.failure()), (Some(1), None));
            assert_eq!(script.open().plan.placement.slices_of(2).count(), 0);
        } else {
            script.after(LEARNING);
            assert!(script.failure().expect("no server has all slices").contains("host:2"));
        }
    }
}

#[test]
fn servers_with_different_content_of_a_slice_fail_the_job() {
    let said = |epoch, version, slices: &[(u32, u64)]| ServerEvent::Hashes {
        job: job(),
        epoch,
        version,
        slices: slices.to_vec(),
    };
    let (mut script, lease) = training();
    step(&mut script, lease, 0);
    let epoch = script.epoch();
    script.said(1, said(epoch, 200, &[(0, 5), (1, 6)]));
    script.said(2, said(epoch, 200, &[(1, 6), (2, 7)]));
    // Of an earlier version and an earlier epoch, and of a slice that the job does not have.
    script.said(3, said(epoch, 100, &[(0, 8)]));
    script.said(3, said(epoch - 1, 200, &[(0, 8)]));
    script.said(3, said(epoch, 200, &[(0, 5), (9, 1)]));
    script.said(1, said(epoch, 300, &[(0, 9)]));
    assert_eq!(script.failure(), None);
    script.said(3, said(epoch, 300, &[(0, 8)]));
    let reason = script.failure().expect("the copies of slice 0 differ");
    assert!(
        reason.starts_with(
            "shard server host:3 and shard server host:1 have different content of slice 0 \
             (elements 0 to 2 of tensor \"a\") at version 300"
        ),
        "{reason}"
    );
    // Its latest checkpoint may be wrong as well.
    let version = RestoreVersion::LatestIfAny;
    let restore = Some(Restore { url: "file:///c".into(), job: "job".into(), version, line: None });
    let spec = script.cluster.jobs()["job"].spec.as_ref().clone();
    let create = Box::new(Create { spec, fork: None, restore, quota: None });
    let caller = script.caller();
    script.event(Event::Create { caller, job_id: JOB + 1, create, wait: WAIT });
    assert!(matches!(script.error(caller), Error::JobFailed { .. }));
}
