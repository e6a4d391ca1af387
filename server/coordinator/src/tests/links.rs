//! Ranks report that they cannot reach servers.

use std::time::Duration;

use zeroshard_model::Placement;

use super::*;
use crate::vocabulary::calls::LinkReport;

const PATIENCE: Duration = Duration::from_secs(4);

/// A job on three servers.
fn training(world: u32, replicas: u32) -> (Script, Vec<Lease>) {
    Script::training_of(JobSpec { replicas, min_servers: 3, ..spec(world) }, 3)
}

impl Script {
    /// A rank reports a server.
    fn report_link(&mut self, rank: u32, lease: Lease, server: u64) {
        let turn = turn(lease, self.epoch(), rank, 0);
        let (caller, cause) = (self.caller(), "no answer".to_owned());
        let report = LinkReport { turn, server, incarnation: 1, cause };
        self.event(Event::Link { caller, report });
        self.answers.remove(&caller).expect("it is answered at once").unwrap();
    }

    /// These ranks report the server every second for this time.
    fn report_for(&mut self, seconds: u64, ranks: &[(u32, Lease)], server: u64) {
        for _ in 0..=seconds {
            ranks.iter().for_each(|&(rank, lease)| self.report_link(rank, lease, server));
            self.now += Duration::from_secs(1);
            self.event(Event::Tick);
        }
    }

    fn wait(&self) -> String {
        let job = &self.cluster.jobs()["job"];
        job.wait(&self.cluster.common).map(|wait| wait.reason).unwrap_or_default()
    }

    /// Returns whether the server has slices of the job.
    fn has_slices(&self, server: u64) -> bool {
        self.open().plan.placement.servers().iter().any(|of| of.id == server)
    }
}

fn primary(placement: &Placement) -> u64 {
    placement.servers()[placement.primary(0)].id
}

#[test]
fn a_job_continues_without_a_server_that_its_ranks_cannot_reach_until_it_is_uncordoned() {
    let (mut script, leases) = training(1, 2);
    let server = primary(&script.open().plan.placement);
    script.report_link(0, leases[0], server);
    let wait = script.wait();
    assert!(wait.contains(&format!("host:{server}")) && wait.contains("no answer"), "{wait}");
    assert!(script.has_slices(server), "one report is not enough");
    let epoch = script.epoch();
    script.report_for(PATIENCE.as_secs(), &[(0, leases[0])], server);
    assert!(!script.has_slices(server) && script.epoch() > epoch);
    assert_eq!(script.failure(), None);
    script.open_all();
    assert!(!script.wait().contains("reached"), "{}", script.wait());
    assert!(script.cluster.common.servers.is_connected(server), "other jobs keep it");
    // Another server is lost. Its slices need a second replica.
    let other = script.open().plan.placement.servers()[0].id;
    script.lose_server(other);
    assert!(!script.has_slices(server), "it is still out of reach");
    let caller = script.caller();
    let name = format!("host:{server}");
    script.event(Event::Cordon { caller, server: name, cordoned: false });
    assert!(script.has_slices(server));
}

#[test]
fn a_report_that_is_not_repeated_has_no_effect() {
    let (mut script, leases) = training(1, 2);
    let server = primary(&script.open().plan.placement);
    script.report_link(0, leases[0], server);
    script.now += Duration::from_secs(60);
    script.event(Event::Tick);
    assert!(script.has_slices(server) && !script.wait().contains("reached"));
}

#[test]
fn the_reports_of_an_earlier_worker_of_the_rank_do_not_count() {
    let (mut script, leases) = training(1, 2);
    let server = primary(&script.open().plan.placement);
    script.report_for(2, &[(0, leases[0])], server);
    script.lose(0, leases[0]);
    let lease = script.join(0).unwrap();
    script.report_for(2, &[(0, lease)], server);
    assert!(script.has_slices(server), "the new worker has reported it for three seconds");
}

#[test]
fn a_bad_rank_cannot_take_one_server_after_another() {
    let (mut script, leases) = training(1, 2);
    script.server(4);
    let first = primary(&script.open().plan.placement);
    script.report_for(6, &[(0, leases[0])], first);
    script.open_all();
    assert!(!script.has_slices(first));
    let second = primary(&script.open().plan.placement);
    script.report_for(10, &[(0, leases[0])], second);
    assert!(script.has_slices(second), "within a minute of the first");
}

#[test]
fn a_rank_that_alone_cannot_reach_a_server_counts_as_lost() {
    let (mut script, leases) = training(3, 2);
    let server = primary(&script.open().plan.placement);
    let epoch = script.epoch();
    for (rank, &lease) in (0..2).zip(&leases) {
        script.commit(commit(lease, epoch, rank, 0));
    }
    script.report_for(10, &[(2, leases[2])], server);
    assert_eq!(script.open().members.len(), 3, "the link may work again");
    script.report_for(3, &[(2, leases[2])], server);
    script.now += Duration::from_secs(2);
    script.event(Event::Tick);
    assert!(script.has_slices(server));
    assert!(script.open().members.get(2).is_none());
    assert!(script.ended.iter().any(|(lease, _)| *lease == leases[2]), "{:?}", script.ended);
}

#[test]
fn half_of_the_ranks_decide_against_a_server() {
    let (mut script, leases) = training(3, 2);
    let server = primary(&script.open().plan.placement);
    script.report_for(6, &[(0, leases[0]), (2, leases[2])], server);
    assert!(!script.has_slices(server));
    assert_eq!(script.open().members.len(), 3);
}

#[test]
fn a_job_without_replicas_shows_the_link_and_keeps_its_server() {
    let (mut script, leases) = training(1, 1);
    let server = primary(&script.open().plan.placement);
    script.report_for(20, &[(0, leases[0])], server);
    assert!(script.has_slices(server) && script.failure().is_none());
    assert!(script.wait().contains(&format!("host:{server}")), "{}", script.wait());
}
