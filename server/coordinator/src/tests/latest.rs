//! A new coordinator must find the latest placement of a job with replicas, although a server that
//! was replaced describes an earlier one.

use std::sync::Arc;

use super::{
    recovery::Before,
    saves::{found, policy},
    *,
};
use crate::{
    cluster::startup::{LEARNING, RECOVERY},
    vocabulary::job_report::JobReport,
};

fn server(id: u64) -> Server {
    Server { id, incarnation: 1, address: format!("host:{id}") }
}

/// A job that was on the servers 1 and 2 in epoch 3, and after that on the servers 2 and 3.
struct Moved {
    before: Before,
    /// What server 1 describes, which was replaced.
    earlier: JobReport,
    /// What server 3 describes.
    latest: JobReport,
}

fn moved_job(spec: JobSpec) -> Moved {
    let spec = Arc::new(JobSpec { replicas: 2, min_servers: 2, ..spec });
    let plan = |ids: [u64; 2]| Plan::new(&spec, &ids.map(server), &Zones::new()).unwrap();
    let before = Before { spec: spec.clone(), plan: plan([1, 2]), ..Before::new() };
    let earlier = before.report();
    let attempt = Attempt { epoch: 5, step: 9, number: 0 };
    let latest = JobReport { plan: plan([2, 3]), attempt, ..before.report() };
    Moved { before, earlier, latest }
}

/// A new coordinator, with which server 1 has registered, when server 2 was lost with the last one.
fn without_server_2(moved: &Moved) -> Script {
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(1, 1, vec![moved.earlier.clone()]);
    script.event(Event::Refused(server(2)));
    script
}

#[test]
fn a_server_with_an_earlier_placement_does_not_continue_without_the_servers_of_the_latest() {
    let moved = moved_job(spec(2));
    let mut script = without_server_2(&moved);
    assert!(script.describe("job").is_err(), "another server may describe a later placement");
    script.returns(3, 1, vec![moved.latest.clone()]);
    script.after(LEARNING);
    assert_eq!((script.version(), script.failure()), (Some(9), None));
    assert_eq!(script.open().plan.placement.slices_of(3).count(), 3);
    assert!(script.closed().contains(&1) && !script.closed().contains(&3));
}

#[test]
fn a_description_whose_stream_has_broken_is_not_forgotten_for_an_earlier_one() {
    let moved = moved_job(spec(2));
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(3, 1, vec![moved.latest.clone()]);
    script.lose_link(script.links[&3]);
    script.returns(1, 1, vec![moved.earlier]);
    script.event(Event::Refused(server(2)));
    script.after(LEARNING);
    assert!(script.describe("job").is_err(), "server 3 has all slices, and may return");
    script.returns(3, 1, vec![moved.latest]);
    assert_eq!((script.version(), script.failure()), (Some(9), None));
}

#[test]
fn a_job_goes_on_at_once_when_no_worker_knows_a_later_epoch_than_the_servers() {
    let moved = moved_job(spec(2));
    let mut script = without_server_2(&moved);
    let [first, second] = moved.before.leases;
    let at = |epoch| Attempt { epoch, step: 4, number: 0 };
    assert!(script.attach_with(0, first, at(3), None).is_err(), "the other rank has not asked");
    script.attach_with(1, second, at(3), None).unwrap();
    script.attach_with(0, first, at(3), None).unwrap();
    script.step_all(&[first, second], 4);
    // A worker that has made steps in a later placement knows its epoch.
    let mut script = without_server_2(&moved);
    for (rank, lease, epoch) in [(0, first, 3), (1, second, 5)] {
        assert!(script.attach_with(rank, lease, at(epoch), None).is_err());
    }
    script.returns(3, 1, vec![moved.latest]);
    assert_eq!(script.version(), Some(9), "no worker knows a later epoch than server 3");
}

#[test]
fn a_server_with_later_steps_takes_the_job_over_from_one_that_was_replaced() {
    let moved = moved_job(spec(2));
    let mut script = without_server_2(&moved);
    script.after(LEARNING);
    assert_eq!(script.version(), Some(4), "no server has described a later placement in time");
    script.attach(0, moved.before.leases[0]).unwrap();
    script.returns(3, 1, vec![moved.latest]);
    script.event(Event::Refused(server(2)));
    assert!(script.dismissed.contains(&1), "it describes the job again");
    script.returns(1, 1, vec![moved.earlier]);
    assert!(script.ended.iter().any(|(lease, _)| *lease == moved.before.leases[0]));
    script.after(RECOVERY);
    assert_eq!((script.version(), script.failure()), (Some(9), None));
    assert!(!script.closed().contains(&3) && script.closed().contains(&1));
}

#[test]
fn a_job_returns_to_its_checkpoint_when_all_servers_of_the_latest_placement_are_lost() {
    let moved = moved_job(policy(2, 2));
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.found = found(8);
    script.returns(3, 1, vec![moved.latest]);
    script.returns(1, 1, vec![moved.earlier]);
    script.lose_link(script.links[&3]);
    (2..4).for_each(|id| script.event(Event::Refused(server(id))));
    script.server(4);
    script.after(RECOVERY);
    script.open_all();
    assert_eq!((script.version(), script.failure()), (Some(8), None));
}

#[test]
fn a_server_that_was_replaced_cannot_fail_the_job() {
    let spec = JobSpec { replicas: 2, min_servers: 3, ..spec(1) };
    let (mut script, leases) = Script::training_of(spec, 3);
    let epoch = script.epoch();
    script.failed_in(2, epoch, "out of memory", false);
    // It reports another error before it is told to close the job.
    script.failed_in(2, epoch, "another command has failed", false);
    assert_eq!(script.failure(), None);
    assert!(script.open().plan.placement.servers().iter().all(|server| server.id != 2));
    assert_eq!(script.open().members.rank_of(leases[0]), Some(0));
}
