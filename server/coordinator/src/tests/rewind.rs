//! Rewinds of running jobs.
//!
//! promise: durability

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges of batches")]

use std::ops::Range;

use zeroshard_model::OnLoss;

use super::{
    recovery::Before,
    saves::{found, found_on, policy},
    *,
};
use crate::{
    job::restore::RETRY,
    vocabulary::{calls::Rewind, job_report::JobReport},
};

impl Script {
    fn rewind(&mut self, from: u64, to: Option<Checkpoint>, skips: Vec<Range<u64>>) -> Caller {
        let (caller, to) = (self.caller(), to.expect("a checkpoint"));
        let completed = self.cluster.common().saves.number_completed();
        let rewind = Rewind { job: job(), from, to, completed, skips, wait: WAIT };
        self.event(Event::Rewind { caller, rewind });
        caller
    }

    fn line(&self) -> &Line {
        &self.cluster.jobs()["job"].line
    }
}

/// A job of two ranks that has made five steps, and has saved version 2.
fn after_five_steps() -> (Script, Vec<Lease>) {
    let (mut script, leases) = Script::training_of(policy(2, 2), 2);
    (0..5).for_each(|step| script.step_all(&leases, step));
    script.found = found(2);
    script.commands.clear();
    (script, leases)
}

#[test]
fn ranks_continue_from_the_checkpoint_on_a_new_line() {
    let (mut script, leases) = after_five_steps();
    let before = script.epoch();
    let waiting = script.commit(commit(leases[0], before, 0, 5));
    let rewound = script.rewind(0, found(2), vec![7..9]);
    assert!(matches!(script.error(waiting), Error::Unavailable { .. }));
    assert_eq!(script.answer(rewound), None, "its servers read the checkpoint");
    let opened = script.commands.iter().filter_map(|(_, command)| match command {
        Command::Open(open) => Some((open.checkpoint.clone(), open.line.number)),
        _ => None,
    });
    assert_eq!(opened.collect::<Vec<_>>(), [(found(2), 1), (found(2), 1)]);
    script.open_all();
    assert_eq!(script.answer(rewound), Some(&Ok(Reply::Rewound { line: 1 })));
    assert_eq!(script.version(), Some(2));
    let told = script.told(leases[1]).expect("a new epoch");
    assert_eq!((told.line.number, told.line.skips()), (1, &[7..9][..]));
    let late = script.commit(commit(leases[0], before, 0, 5));
    assert_eq!(script.error(late), &Error::RolledBack { job: "job".into(), version: 2 });
    script.step_all(&leases, 2);
}

#[test]
fn a_repeated_call_rewinds_once() {
    let (mut script, leases) = after_five_steps();
    script.rewind(0, found(2), Vec::new());
    let meanwhile = script.rewind(0, found(2), Vec::new());
    assert!(matches!(script.error(meanwhile), Error::Unavailable { .. }));
    script.open_all();
    script.step_all(&leases, 2);
    let again = script.rewind(0, found(2), Vec::new());
    assert_eq!(script.answer(again), Some(&Ok(Reply::Rewound { line: 1 })));
    assert_eq!(script.version(), Some(3), "it goes on");
    let elsewhere = script.rewind(0, found(1), Vec::new());
    let refused = script.error(elsewhere).to_string();
    assert!(refused.contains("is on line 1"), "{refused}");
}

#[test]
fn a_return_after_a_loss_is_not_taken_for_a_rewind_with_other_batches() {
    let (mut script, leases) = after_five_steps();
    script.rewind(0, found(2), vec![7..9]);
    script.open_all();
    script.step_all(&leases, 2);
    let again = script.rewind(0, found(2), vec![7..9]);
    assert_eq!(script.answer(again), Some(&Ok(Reply::Rewound { line: 1 })));
    let other = script.rewind(0, found(2), vec![7..10]);
    assert!(matches!(script.error(other), Error::Refused { .. }));
}

#[test]
fn a_job_is_not_interrupted_while_a_save_may_remove_the_checkpoint() {
    let (mut script, leases) = Script::training_of(policy(2, 100), 2);
    (0..4).for_each(|step| script.step_all(&leases, step));
    let caller = script.save(None);
    let before = script.cluster.common().saves.number_completed();
    script.write_all();
    let [save] = script.completions.iter().map(|of| of.plan.save).collect::<Vec<_>>()[..] else {
        panic!("one save");
    };
    let meanwhile = script.rewind(0, found(2), Vec::new());
    assert!(matches!(script.error(meanwhile), Error::Unavailable { .. }));
    script.completed(save, Ok(1));
    assert!(script.answer(caller).is_some());
    // The checkpoint was looked up before the save was complete.
    let (late, to) = (script.caller(), found(2).unwrap());
    let (job, skips) = (job(), Vec::new());
    let rewind = Rewind { job, from: 0, to, completed: before, skips, wait: WAIT };
    script.event(Event::Rewind { caller: late, rewind });
    assert!(matches!(script.error(late), Error::Unavailable { .. }));
    assert_eq!(script.version(), Some(4), "it goes on");
}

#[test]
fn a_job_that_fails_with_its_servers_is_rewound_although_a_server_cannot_read_at_first() {
    let mut spec = policy(2, 2);
    spec.checkpoints.as_mut().unwrap().on_loss = OnLoss::Fail;
    let (mut script, leases) = Script::training_of(spec, 2);
    (0..3).for_each(|step| script.step_all(&leases, step));
    script.found = found(2);
    script.commands.clear();
    let caller = script.rewind(0, found(2), Vec::new());
    let (reason, transient) = ("the store is not reachable".to_owned(), true);
    let epoch = script.cluster.jobs()["job"].epoch;
    script.said(1, ServerEvent::Failed { job: job(), epoch, reason, transient });
    assert_eq!((script.failure(), script.answer(caller)), (None, None));
    script.commands.clear();
    script.after(RETRY);
    script.open_all();
    assert!(matches!(script.answer(caller), Some(Ok(Reply::Rewound { .. }))));
    assert_eq!(script.version(), Some(2));
}

#[test]
fn a_job_is_not_rewound_to_its_current_version() {
    let (mut script, _) = after_five_steps();
    for version in [5, 6] {
        let refused = script.rewind(0, found(version), Vec::new());
        assert!(matches!(script.error(refused), Error::Refused { .. }));
    }
    assert_eq!(script.version(), Some(5));
}

#[test]
fn versions_of_a_new_line_are_saved_as_such() {
    let (mut script, leases) = after_five_steps();
    script.rewind(0, found(2), Vec::new());
    script.open_all();
    script.commands.clear();
    (2..4).for_each(|step| script.step_all(&leases, step));
    let plan = script.commands.iter().find_map(|(_, command)| match command {
        Command::Write { plan, .. } => Some(plan.clone()),
        _ => None,
    });
    assert_eq!(plan.expect("version 4 is due").version, found_on(4, 1).unwrap().version);
}

#[test]
fn a_server_that_does_not_know_lines_ends_the_save() {
    let (mut script, leases) = after_five_steps();
    script.rewind(0, found(2), Vec::new());
    script.open_all();
    (2..4).for_each(|step| script.step_all(&leases, step));
    let caller = script.save(None);
    let (server, save, _) = script.writes()[0];
    let files = Files::default();
    script.said(server, ServerEvent::Written { job: job(), save, line: 0, files });
    assert!(matches!(script.error(caller), Error::Internal { .. }));
}

#[test]
fn the_next_coordinator_continues_on_the_line() {
    let before = Before::new();
    let line = Arc::new(Line::new(3, [5..6]).unwrap());
    let report = || JobReport { line: line.clone(), ..before.report() };
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(1, 1, vec![before.report()]);
    script.returns(2, 1, vec![report()]);
    assert_eq!(script.line(), &*line);
}

#[test]
fn a_caller_that_has_waited_long_enough_is_told_what_for() {
    let (mut script, _) = after_five_steps();
    let caller = script.rewind(0, found(2), Vec::new());
    script.after(WAIT);
    let error = script.error(caller).to_string();
    assert!(error.contains("to return to a checkpoint"), "{error}");
}
