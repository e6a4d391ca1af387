//! Saves.
//!
//! promise: durability

use zeroshard_model::{CheckpointPolicy, LineVersion, OnLoss, OnMemoryShortage};

use super::*;
use crate::state::saves::SAVE_LIMIT;

pub(super) const URL: &str = "file:///checkpoints";
const SECOND: Duration = Duration::from_secs(1);

pub(super) fn policy(world: u32, every_steps: u64) -> JobSpec {
    let policy = CheckpointPolicy {
        url: URL.to_owned(),
        every_steps: Some(every_steps),
        every: None,
        keep: 3,
        on_loss: OnLoss::Restore,
        on_memory_shortage: OnMemoryShortage::Wait,
    };
    JobSpec { checkpoints: Some(policy), ..spec(world) }
}

pub(super) fn found(version: u64) -> Option<Checkpoint> {
    found_on(version, 0)
}

pub(super) fn found_on(version: u64, line: u64) -> Option<Checkpoint> {
    let version = LineVersion { version, line };
    Some(Checkpoint { url: URL.to_owned(), job: "job".to_owned(), job_id: 1, version })
}

impl Script {
    pub(super) fn save(&mut self, url: Option<&str>) -> Caller {
        self.save_with(url, false)
    }

    fn save_with(&mut self, url: Option<&str>, unless_saved: bool) -> Caller {
        let caller = self.caller();
        let save = Save { job: job(), url: url.map(str::to_owned), unless_saved, wait: WAIT };
        self.event(Event::Save { caller, save });
        caller
    }

    /// The saves that each server was told to begin: server, number and version.
    pub(super) fn writes(&self) -> Vec<(u64, u64, u64)> {
        let write = |(server, command): &(u64, Command)| match command {
            Command::Write { plan, .. } => Some((*server, plan.save, plan.version.version)),
            _ => None,
        };
        self.commands.iter().filter_map(write).collect()
    }

    fn cancels(&self) -> Vec<(u64, u64)> {
        let cancel = |(server, command): &(u64, Command)| match command {
            Command::CancelSave { save, .. } => Some((*server, *save)),
            _ => None,
        };
        self.commands.iter().filter_map(cancel).collect()
    }

    fn written(&mut self, server: u64, save: u64) {
        let line = self.cluster.jobs()["job"].line.number;
        let files = Files::default();
        self.said(server, ServerEvent::Written { job: job(), save, line, files });
    }

    pub(super) fn write_all(&mut self) {
        for (server, save, _) in self.writes() {
            self.written(server, save);
        }
    }

    pub(super) fn completed(&mut self, save: u64, outcome: Result<u64>) {
        self.event(Event::Completed { job: job(), save, outcome });
    }

    /// All ranks make a step.
    pub(super) fn step_all(&mut self, leases: &[Lease], step: u64) {
        self.step_with(leases, step, |rank, commit| {
            commit.user_data = Bytes::from(format!("rank {rank} step {step}"));
        });
    }

    pub(super) fn step_with(
        &mut self,
        leases: &[Lease],
        step: u64,
        change: impl Fn(u32, &mut Commit),
    ) {
        let epoch = self.epoch();
        for (rank, &lease) in (0..).zip(leases) {
            let mut commit = commit(lease, epoch, rank, step);
            change(rank, &mut commit);
            self.commit(commit);
        }
        self.ready_all(step);
        assert_eq!(self.version(), Some(step + 1));
    }
}

#[test]
fn a_checkpoint_is_complete_when_all_servers_have_written_and_the_manifest_is_there() {
    let (mut script, _) = Script::training(2, 2);
    let caller = script.save(Some(URL));
    let [(1, save, 0), (2, other, 0)] = script.writes()[..] else {
        panic!("{:?}", script.writes())
    };
    assert_eq!(save, other);
    script.written(1, save);
    assert!(script.completions.is_empty());
    script.written(1, save);
    assert!(script.completions.is_empty(), "server 2 has not written");
    script.written(2, save);
    assert_eq!(script.completions.len(), 1);
    assert_eq!(script.answer(caller), None, "there is no manifest");
    script.completed(save, Ok(10));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Saved(Saved { version: 0, bytes: 10 }))));
    assert_eq!(script.open().saves.last(), Some(0));
}

#[test]
fn a_save_fails_with_the_error_of_a_server_and_the_job_continues() {
    let (mut script, leases) = Script::training(1, 2);
    let caller = script.save(Some(URL));
    let save = script.writes()[0].1;
    let cause = Error::Storage {
        action: "write".to_owned(),
        url: URL.to_owned(),
        cause: "the disk is full".to_owned(),
    };
    script.said(2, ServerEvent::SaveFailed { job: job(), save, cause: cause.clone() });
    assert_eq!(script.error(caller), &cause);
    assert_eq!(script.cancels(), [(1, save), (2, save)]);
    script.step_all(&leases, 0);
    // A part that is written too late is removed.
    script.written(1, save);
    assert_eq!(script.cancels().len(), 3);
    assert!(script.completions.is_empty());
    script.save(Some(URL));
    assert_ne!(script.writes()[2].1, save);
}

#[test]
fn a_job_is_saved_by_its_policy_with_the_data_that_the_ranks_sent_with_the_step() {
    let (mut script, leases) = Script::training_of(policy(2, 2), 2);
    script.step_all(&leases, 0);
    assert_eq!(script.writes(), []);
    script.step_all(&leases, 1);
    assert_eq!(script.writes().iter().map(|write| write.2).collect::<Vec<_>>(), [2, 2]);
    // The data of later steps belong to later versions.
    script.step_all(&leases, 2);
    script.write_all();
    let completion = &script.completions[0];
    assert_eq!((completion.plan.version.version, completion.plan.keep), (2, 3));
    let data: Vec<_> = completion.user_data.values().cloned().collect();
    assert_eq!(data, ["rank 0 step 1", "rank 1 step 1"]);
    // Version 4 is due while version 2 is being saved.
    script.step_all(&leases, 3);
    assert_eq!(script.writes().len(), 2);
    script.completed(completion_save(&script), Ok(1));
    script.step_all(&leases, 4);
    script.step_all(&leases, 5);
    assert_eq!(script.writes().len(), 4);
}

pub(super) fn completion_save(script: &Script) -> u64 {
    script.completions.last().expect("a save").plan.save
}

#[test]
fn a_job_is_saved_after_the_time_of_its_policy() {
    let mut spec = policy(1, 1);
    let policy = spec.checkpoints.as_mut().unwrap();
    (policy.every_steps, policy.every) = (None, Some(10 * SECOND));
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_all(&leases, 0);
    script.now += 9 * SECOND;
    script.step_all(&leases, 1);
    assert_eq!(script.writes(), []);
    script.now += SECOND;
    script.step_all(&leases, 2);
    assert_eq!(script.writes().len(), 1);
    script.write_all();
    script.completed(completion_save(&script), Ok(1));
    script.now += 9 * SECOND;
    script.step_all(&leases, 3);
    assert_eq!(script.writes().len(), 1);
    script.now += SECOND;
    script.step_all(&leases, 4);
    assert_eq!(script.writes().len(), 2);
}

#[test]
fn a_save_during_another_save_begins_when_that_has_ended() {
    let (mut script, leases) = Script::training(1, 1);
    let caller = script.save(None);
    assert!(matches!(script.error(caller), Error::Refused { .. }));
    script.save(Some(URL));
    let same = script.save(Some(URL));
    assert_eq!(script.answer(same), None, "it waits for the same save");
    script.step_all(&leases, 0);
    let elsewhere = "file:///elsewhere";
    let late = script.save(Some(elsewhere));
    let gone = script.save(Some(elsewhere));
    script.event(Event::SaverGone { caller: gone, job: "job".to_owned() });
    let refused = script.save(Some(URL));
    assert!(matches!(script.error(refused), Error::Unavailable { .. }));
    script.after(WAIT);
    assert!(matches!(script.error(late), Error::Timeout { .. }));
    let later = script.save(Some(elsewhere));
    script.step_all(&leases, 1);
    script.write_all();
    script.completed(completion_save(&script), Ok(7));
    let (_, save, version) = *script.writes().last().unwrap();
    assert_eq!(version, 2, "the version at its beginning is saved");
    script.written(1, save);
    script.completed(save, Ok(8));
    assert_eq!(
        script.answer(later).cloned(),
        Some(Ok(Reply::Saved(Saved { version: 2, bytes: 8 })))
    );
    assert_eq!(script.answer(gone), None);
}

#[test]
fn a_version_that_is_saved_is_not_saved_again_unless_this_is_requested() {
    let (mut script, leases) = Script::training_of(policy(1, 1), 1);
    script.step_all(&leases, 0);
    script.write_all();
    script.completed(completion_save(&script), Ok(7));
    let again = script.save_with(None, true);
    let saved = Saved { version: 1, bytes: 7 };
    assert_eq!(script.answer(again).cloned(), Some(Ok(Reply::Saved(saved))));
    let elsewhere = script.save_with(Some("file:///elsewhere"), true);
    assert_eq!(script.answer(elsewhere), None);
    assert_eq!(script.writes().len(), 2);
    let (_, save, _) = *script.writes().last().unwrap();
    script.written(1, save);
    script.completed(save, Ok(8));
    script.save(None);
    assert_eq!(script.writes().len(), 3);
}

#[test]
fn a_save_that_takes_too_long_is_given_up() {
    let (mut script, _) = Script::training(1, 1);
    let caller = script.save(Some(URL));
    script.after(WAIT);
    assert!(matches!(script.error(caller), Error::Timeout { .. }));
    assert_eq!(script.cancels(), []);
    script.after(SAVE_LIMIT);
    assert_eq!(script.cancels().len(), 1);
    assert_eq!(script.cluster.next_deadline(), None);
}

#[test]
fn a_save_ends_when_a_server_that_has_not_written_loses_its_control_stream() {
    let (mut script, _) = Script::training(1, 2);
    let caller = script.save(Some(URL));
    script.written(1, script.writes()[0].1);
    // The part that server 1 has written stands.
    script.lose_link(script.links[&1]);
    assert_eq!(script.answer(caller), None);
    script.lose_link(script.links[&2]);
    assert!(matches!(script.error(caller), Error::Unavailable { .. }));
    assert!(script.open().saves.current().is_none());
}

#[test]
fn a_job_that_waits_for_its_restoration_is_deleted_on_all_servers() {
    let (mut script, leases) = Script::training_of(policy(1, 1), 2);
    script.step_all(&leases, 0);
    script.lose_server(1);
    script.silent = true;
    let caller = script.delete(JOB);
    assert_eq!(script.answer(caller), None, "server 2 may not have closed it");
}

#[test]
fn an_unused_job_is_saved_before_it_is_deleted() {
    let idle = 20 * SECOND;
    let spec = JobSpec { idle_timeout: Some(idle), ..policy(1, 100) };
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_all(&leases, 0);
    script.leave(leases[0], true);
    assert_eq!(script.writes().len(), 1);
    assert!(script.cluster.jobs().contains_key("job"));
    script.write_all();
    let save = completion_save(&script);
    let full = Error::Storage { action: "write".into(), url: URL.into(), cause: "full".into() };
    script.completed(save, Err(full));
    assert!(script.cluster.jobs().contains_key("job"), "it is not saved");
    assert_eq!(script.writes().len(), 1, "a failed save is not repeated at once");
    script.after(60 * SECOND);
    assert_eq!(script.writes().len(), 2);
    script.write_all();
    script.completed(completion_save(&script), Ok(1));
    assert!(!script.cluster.jobs().contains_key("job"));
}
