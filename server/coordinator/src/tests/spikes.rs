//! The policy of a job on spikes.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges of batches")]

use zeroshard_model::{SpikeAction, SpikePolicy};

use super::{
    recovery::Before,
    saves::{found, policy},
    *,
};
use crate::vocabulary::{events::Target, job_report::JobReport};

/// A job of two ranks that is saved every second step, with a policy on spikes whose median is over
/// three steps.
fn spec_with(action: SpikeAction) -> JobSpec {
    let spikes = SpikePolicy { window: 3, limit: 2, ..SpikePolicy::new(action) };
    JobSpec { spikes: Some(spikes), ..policy(2, 2) }
}

/// Such a job after five steps.
fn trained(action: SpikeAction) -> (Script, Vec<Lease>) {
    let (mut script, leases) = Script::training_of(spec_with(action), 2);
    (0..5).for_each(|step| script.step_all(&leases, step));
    script.commands.clear();
    (script, leases)
}

/// Both ranks commit `step`, and all servers are ready.
fn try_step(script: &mut Script, leases: &[Lease], step: u64) -> Vec<Caller> {
    let epoch = script.epoch();
    let commits = (0..).zip(leases).map(|(rank, &lease)| commit(lease, epoch, rank, step));
    let callers = commits.collect::<Vec<_>>().into_iter().map(|commit| script.commit(commit));
    let callers = callers.collect();
    script.ready_all(step);
    callers
}

fn target(version: u64, skips: &[std::ops::Range<u64>]) -> Result<Target> {
    Ok(Target { to: found(version).unwrap(), skips: skips.to_vec() })
}

impl Script {
    fn search_ends(&mut self, found: Result<Target>) {
        let search = Box::new(self.searches.pop().expect("a search"));
        self.event(Event::Searched { search, found });
    }

    fn recent(&self) -> &RecentSteps {
        &self.cluster.jobs()["job"].recent
    }
}

#[test]
fn a_spike_is_skipped_and_named() {
    let (mut script, leases) = trained(SpikeAction::Skip);
    script.spike = Some((1e4, 1));
    let callers = try_step(&mut script, &leases, 5);
    let report = script.report(callers[0]);
    assert!(!report.applied);
    let why = report.spike.expect("a spike");
    let named = "the largest gradient is that of tensor \"b\" (norm 8.6603e3), to which rank 1 \
                 contributed most (norm 1.7321e4)";
    assert!(why.contains("10000.0 times the median") && why.contains(named), "{why}");
    assert!(script.decisions().iter().all(|(_, decision)| decision.update.is_none()));
    script.spike = None;
    let callers = try_step(&mut script, &leases, 6);
    let report = script.report(callers[0]);
    assert!(report.applied && report.spike.is_none(), "the median has not moved");
    assert_eq!(script.recent().spikes, [5]);
}

#[test]
fn no_step_is_judged_before_the_window_is_full() {
    let (mut script, leases) = Script::training_of(spec_with(SpikeAction::Skip), 2);
    (0..2).for_each(|step| script.step_all(&leases, step));
    script.spike = Some((1e4, 1));
    let callers = try_step(&mut script, &leases, 2);
    assert!(script.report(callers[0]).applied);
}

#[test]
fn the_limit_of_spikes_stops_the_job() {
    let (mut script, leases) = trained(SpikeAction::Skip);
    script.spike = Some((1e4, 1));
    for step in [5, 6] {
        let callers = try_step(&mut script, &leases, step);
        assert!(!script.report(callers[0]).applied);
    }
    let callers = try_step(&mut script, &leases, 7);
    let Error::JobFailed { reason, .. } = script.error(callers[0]) else { panic!("it stops") };
    assert!(reason.contains("It follows 2 spikes within 1000 batches"), "{reason}");
    assert!(reason.contains("rank 1"), "{reason}");
}

#[test]
fn a_policy_can_stop_the_job_at_once() {
    let (mut script, leases) = trained(SpikeAction::Stop);
    script.spike = Some((1e4, 0));
    let callers = try_step(&mut script, &leases, 5);
    let Error::JobFailed { reason, .. } = script.error(callers[1]) else { panic!("it stops") };
    assert!(reason.contains("stopped it at step 5, because its gradient norm"), "{reason}");
}

#[test]
fn a_spike_returns_the_job_and_skips_batches() {
    let (mut script, leases) = trained(SpikeAction::Rewind { steps: 2 });
    script.found = found(4);
    script.found_recent = RecentSteps { norms: vec![1.0; 3], ..script.recent().clone() };
    script.spike = Some((1e4, 1));
    let callers = try_step(&mut script, &leases, 5);
    assert_eq!(script.answer(callers[0]), None, "the step is not decided");
    assert_eq!((script.searches[0].until, script.searches[0].skip.clone()), (4, 4..6));
    script.ready_all(5);
    assert_eq!(script.searches.len(), 1, "one search at a time");
    script.search_ends(target(4, &[4..6]));
    assert!(matches!(script.error(callers[0]), Error::Unavailable { .. }), "they call again");
    script.open_all();
    let told = script.told(leases[1]).expect("a new epoch");
    assert_eq!((told.line.number, told.line.skips()), (1, &[4..6][..]));
    assert_eq!((script.version(), &script.recent().norms[..]), (Some(4), &[1.0; 3][..]));
    assert_eq!(script.recent().spikes, [5], "the return is not forgotten");
    // Batch 6 is a spike, too: the second one. The third one stops the job.
    let callers = try_step(&mut script, &leases, 4);
    assert_eq!((script.searches[0].until, script.searches[0].skip.clone()), (3, 3..7));
    script.found = found(2);
    script.search_ends(target(2, &[3..7]));
    script.open_all();
    assert!(script.answer(callers[0]).is_some());
    assert_eq!(script.recent().spikes, [5, 6]);
    let callers = try_step(&mut script, &leases, 2);
    assert!(matches!(script.error(callers[0]), Error::JobFailed { .. }));
}

#[test]
fn a_job_without_a_checkpoint_to_return_to_stops() {
    let (mut script, leases) = trained(SpikeAction::Rewind { steps: 100 });
    script.spike = Some((1e4, 1));
    let callers = try_step(&mut script, &leases, 5);
    assert_eq!((script.searches[0].until, script.searches[0].skip.clone()), (0, 0..6));
    let none = Error::NoCheckpoint {
        url: "file:///x".into(),
        job: "job".into(),
        version: "a version until 0".into(),
    };
    script.search_ends(Err(none));
    let Error::JobFailed { reason, .. } = script.error(callers[0]) else { panic!("it stops") };
    assert!(reason.contains("cannot rewind after the spike at step 5"), "{reason}");
    assert!(reason.ends_with("save more often, or skip such steps"), "{reason}");
}

#[test]
fn a_rank_that_is_lost_during_the_search_makes_the_step_open_again() {
    let (mut script, leases) = trained(SpikeAction::Rewind { steps: 2 });
    script.spike = Some((1e4, 1));
    try_step(&mut script, &leases, 5);
    script.lose(1, leases[1]);
    script.search_ends(target(4, &[4..6]));
    assert_eq!(script.version(), Some(5), "the step is made again");
    script.spike = None;
    let new = script.join(1).expect("free");
    script.step_all(&[leases[0], new], 5);
}

#[test]
fn the_figures_are_in_decisions_checkpoints_and_new_coordinators() {
    let (mut script, leases) = trained(SpikeAction::Skip);
    script.spike = Some((1e4, 1));
    try_step(&mut script, &leases, 5);
    let recent = script.recent().clone();
    assert_eq!((recent.norms.len(), &recent.spikes[..]), (3, &[5][..]));
    let (_, decision) = script.decisions().pop().unwrap();
    assert_eq!(decision.figures.recent, recent);
    let (mut script, leases) = Script::training_of(spec_with(SpikeAction::Skip), 2);
    (0..3).for_each(|step| script.step_all(&leases, step));
    script.write_all();
    let saved = script.completions.pop().expect("a save of version 2");
    assert_eq!((saved.plan.version.version, saved.recent.norms.len()), (2, 2));
}

#[test]
fn a_new_coordinator_learns_the_figures_with_the_last_decision_or_from_the_opening() {
    let before = Before::new();
    let opened = RecentSteps { norms: vec![3.0], spikes: vec![1], ..RecentSteps::default() };
    let decided = RecentSteps { norms: vec![3.0, 4.0], ..opened.clone() };
    let reports = |server| {
        let mut report = before.decided(server);
        report.recent = opened.clone();
        report.decided.as_mut().unwrap().0.figures.recent = decided.clone();
        report
    };
    assert_eq!(*before.recover([reports(1), reports(2)]).recent(), decided);
    let reports = || JobReport { recent: opened.clone(), ..before.report() };
    assert_eq!(*before.recover([reports(), reports()]).recent(), opened, "no step since");
}
