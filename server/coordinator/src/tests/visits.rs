//! How many jobs an event visits, and what is known of jobs without visiting them.

use super::*;
use crate::cluster::index::Entry;

/// The number of other jobs.
const OTHERS: u64 = 50;

/// A trained job of two ranks on two servers beside `others`, which are open there.
fn beside(others: u64) -> (Script, Vec<Lease>) {
    let (mut script, leases) = Script::training(2, 2);
    for id in 1..=others {
        let name = format!("other-{id}");
        script.create_as(id, JobSpec { name: name.clone(), ..spec(1) });
        for server in [1, 2] {
            let opened = script.opened(JobRef { name: name.clone(), id });
            script.said(server, opened);
        }
    }
    (script, leases)
}

impl Script {
    /// The number of visits during `act`.
    fn visits(&mut self, act: impl FnOnce(&mut Self)) -> u64 {
        let before = self.cluster.visits();
        act(self);
        self.cluster.visits() - before
    }

    /// Checks that what is known of each job is true.
    pub(super) fn check_index(&self) {
        let common = &self.cluster.common;
        let mut assigned = BTreeMap::<u64, u64>::new();
        for (name, job) in self.cluster.jobs() {
            let known = common.index.entry(name).expect("an entry");
            let Entry { placement, holders, deadline, predecessor, interests } = job.entry(common);
            assert_eq!(known.placement, placement, "{name}");
            assert_eq!((&known.holders, known.deadline), (&holders, deadline), "{name}");
            assert_eq!((known.predecessor, known.interests), (predecessor, interests), "{name}");
            for (server, load) in job.phase.loads().into_iter().flatten() {
                let sum = assigned.entry(*server).or_default();
                *sum = sum.saturating_add(load.bytes);
            }
        }
        assigned.retain(|_, bytes| *bytes > 0);
        let known = common.index.assigned().into_iter().map(|(server, load)| (server, load.bytes));
        assert!(known.eq(assigned), "{:?}", common.index.assigned());
    }
}

#[test]
fn an_event_of_a_job_visits_no_other_job() {
    let visits = |others| {
        let (mut script, leases) = beside(others);
        [
            script.visits(|script| script.ready_all(0)),
            script.visits(|script| _ = script.commit(commit(leases[0], 1, 0, 0))),
            script.visits(|script| _ = script.commit(commit(leases[1], 1, 1, 0))),
            script.visits(|script| script.event(Event::Tick)),
            script.visits(|script| script.lose(0, leases[0])),
            script.visits(|script| _ = script.join(0)),
            script.visits(|script| _ = script.delete(JOB)),
        ]
    };
    assert_eq!(visits(OTHERS), visits(0));
    assert!(visits(0).iter().sum::<u64>() > 0);
}

#[test]
fn the_report_of_a_server_visits_no_job() {
    let (mut script, _) = beside(OTHERS);
    assert_eq!(script.visits(|script| script.said(1, ServerEvent::Stats(Stats::default()))), 0);
}

#[test]
fn the_arrival_and_the_loss_of_a_server_visit_the_jobs_that_use_it() {
    let (mut script, _) = beside(OTHERS);
    assert_eq!(script.visits(|script| script.server(3)), 0, "it has no slices");
    assert_eq!(script.visits(|script| script.lose_link(script.links[&3])), 0);
    let lost = script.visits(|script| script.lose_link(script.links[&1]));
    assert_eq!(lost, OTHERS + 1);
}

#[test]
fn a_deadline_visits_the_jobs_that_are_due() {
    let (mut script, leases) = beside(OTHERS);
    script.commit(commit(leases[0], 1, 0, 0));
    script.now += WAIT;
    assert_eq!(script.visits(|script| script.event(Event::Tick)), 1);
}
