//! Data that ranks send for checkpoints after their steps.

use std::{collections::BTreeMap, sync::Arc};

use zeroshard_model::OnLoss;

use super::{
    recovery::Before,
    saves::{URL, completion_save, found, policy},
    *,
};
use crate::{
    cluster::startup::RECOVERY,
    state::interrupted::SERVERS_LIMIT,
    vocabulary::{calls::RankData, job_report::JobReport},
};

/// What two ranks send for a version.
fn data(version: u64) -> BTreeMap<u32, Bytes> {
    (0..2).map(|rank| (rank, Bytes::from(format!("rank {rank} version {version}")))).collect()
}

impl Script {
    /// All ranks make a step, after which they send their data.
    fn step_and_promise(&mut self, leases: &[Lease], step: u64) {
        self.step_with(leases, step, |_, commit| commit.user_data_follows = true);
    }

    fn send_data(&mut self, rank: u32, lease: Lease, version: u64) -> Caller {
        let caller = self.caller();
        let data = data(version).remove(&rank).expect("one of two ranks");
        let data = RankData { job: job(), rank, lease, version, data };
        self.event(Event::UserData { caller, data });
        caller
    }

    /// The data in the checkpoint that was completed last.
    fn saved_data(&self) -> Vec<Bytes> {
        self.completions.last().expect("a save").user_data.values().cloned().collect()
    }
}

#[test]
fn a_checkpoint_is_complete_when_each_rank_has_sent_its_data() {
    let (mut script, leases) = Script::training_of(policy(2, 1), 1);
    script.step_and_promise(&leases, 0);
    let first = script.send_data(0, leases[0], 1);
    assert_eq!(script.answer(first), Some(&Ok(Reply::UserDataStored)));
    script.write_all();
    assert!(script.completions.is_empty(), "rank 1 has not sent its data");
    script.send_data(1, leases[1], 1);
    assert_eq!(script.saved_data(), ["rank 0 version 1", "rank 1 version 1"]);
    script.send_data(1, leases[1], 1);
    assert_eq!(script.completions.len(), 1, "a repeated call completes nothing");
    script.completed(completion_save(&script), Ok(1));
    // Data that arrives before the files are written is not waited for.
    script.step_and_promise(&leases, 1);
    script.send_data(0, leases[0], 2);
    script.send_data(1, leases[1], 2);
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 version 2", "rank 1 version 2"]);
}

#[test]
fn a_requested_save_has_the_data_that_was_sent_before() {
    let (mut script, leases) = Script::training_of(policy(1, 100), 1);
    script.step_and_promise(&leases, 0);
    script.send_data(0, leases[0], 1);
    script.save(None);
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 version 1"]);
}

#[test]
fn the_timeout_of_a_save_names_the_rank_whose_data_is_missing() {
    let (mut script, leases) = Script::training_of(policy(2, 100), 1);
    script.step_and_promise(&leases, 0);
    script.send_data(0, leases[0], 1);
    let caller = script.save(None);
    script.write_all();
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(caller) else { panic!() };
    assert!(waiting_for.starts_with("rank 1 to send its data of version 1"), "{waiting_for}");
}

#[test]
fn a_save_whose_data_can_no_longer_come_does_not_prevent_later_ones() {
    let (mut script, leases) = Script::training_of(policy(2, 1), 1);
    script.step_and_promise(&leases, 0);
    script.write_all();
    let waiting = script.save(None);
    script.send_data(0, leases[0], 1);
    // Rank 1 has not sent its data, and makes another step.
    script.step_and_promise(&leases, 1);
    assert!(matches!(script.error(waiting), Error::UserDataLost { rank: 1, version: 1, .. }));
    script.send_data(0, leases[0], 2);
    script.send_data(1, leases[1], 2);
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 version 2", "rank 1 version 2"]);
}

#[test]
fn a_job_returns_to_its_last_checkpoint_when_a_rank_is_lost_before_it_has_sent_its_data() {
    let (mut script, leases) = Script::training_of(policy(2, 2), 2);
    (0..3).for_each(|step| script.step_all(&leases, step));
    script.step_and_promise(&leases, 3);
    script.send_data(0, leases[0], 4);
    script.found = found(2);
    script.commands.clear();
    // A replacement waits for the rank.
    let (caller, lease) = script.start_join(1, None);
    script.lose(1, leases[1]);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Joined)));
    let late = script.send_data(0, leases[0], 4);
    assert_eq!(script.error(late), &Error::RolledBack { job: "job".into(), version: 2 });
    script.step_and_promise(&[leases[0], lease], 2);
}

#[test]
fn a_job_returns_to_its_last_checkpoint_when_a_rank_leaves_before_it_has_sent_its_data() {
    let (mut script, leases) = Script::training_of(policy(2, 1), 1);
    script.step_all(&leases, 0);
    script.step_and_promise(&leases, 1);
    script.found = found(1);
    script.commands.clear();
    script.leave(leases[1], false);
    script.open_all();
    assert_eq!(script.version(), Some(1));
    let waiting = script.commit(commit(leases[0], script.epoch(), 0, 1));
    assert!(matches!(script.error(waiting), Error::RankLeft { rank: 1, .. }));
}

#[test]
fn a_restored_version_is_saved_elsewhere_with_the_data_of_its_checkpoint() {
    let (mut script, leases) = Script::training_of(policy(2, 2), 2);
    (0..3).for_each(|step| script.step_all(&leases, step));
    (script.found, script.found_data) = (found(2), UserData::restored(data(2), &[]));
    script.commands.clear();
    script.lose_server(1);
    script.after(SERVERS_LIMIT);
    script.open_all();
    script.save(Some("file:///elsewhere"));
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 version 2", "rank 1 version 2"]);
    // The next version has its own.
    script.completed(completion_save(&script), Ok(1));
    script.step_all(&leases, 2);
    script.save(Some("file:///elsewhere"));
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 step 2", "rank 1 step 2"]);
}

#[test]
fn without_the_policy_only_the_save_ends_when_a_rank_is_lost_before_it_has_sent_its_data() {
    let mut spec = policy(2, 1);
    spec.checkpoints.as_mut().unwrap().on_loss = OnLoss::Fail;
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_and_promise(&leases, 0);
    script.write_all();
    let waiting = script.save(None);
    script.lose(1, leases[1]);
    assert!(matches!(script.error(waiting), Error::UserDataLost { rank: 1, version: 1, .. }));
    let lease = script.join(1).unwrap();
    let later = script.save(None);
    assert!(matches!(script.error(later), Error::UserDataLost { rank: 1, version: 1, .. }));
    assert_eq!(script.writes().len(), 1);
    // The next version can be saved.
    script.step_all(&[leases[0], lease], 1);
    assert_eq!(script.writes().len(), 2);
}

#[test]
fn an_unused_job_that_some_ranks_have_not_left_is_deleted_without_a_save_of_lost_data() {
    let mut spec = policy(1, 100);
    spec.idle_timeout = Some(WAIT);
    spec.checkpoints.as_mut().unwrap().on_loss = OnLoss::Fail;
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_and_promise(&leases, 0);
    script.lose(0, leases[0]);
    script.after(WAIT);
    assert_eq!(script.writes(), []);
    assert!(!script.cluster.jobs().contains_key("job"));
}

#[test]
fn a_job_that_all_ranks_have_left_is_not_saved_without_data_that_was_never_sent() {
    let mut spec = policy(1, 100);
    spec.idle_timeout = Some(WAIT);
    spec.checkpoints.as_mut().unwrap().on_loss = OnLoss::Fail;
    let (mut script, leases) = Script::training_of(spec, 1);
    script.step_and_promise(&leases, 0);
    script.leave(leases[0], true);
    assert_eq!(script.writes(), []);
    assert!(!script.cluster.jobs().contains_key("job"));
}

#[test]
fn the_last_steps_are_saved_although_the_coordinator_dies_during_the_last_save() {
    let left = |report: &mut JobReport| {
        report.ranks.left = report.ranks.leases.keys().copied().collect();
        report.ranks.leases.clear();
        let spec = JobSpec { idle_timeout: Some(WAIT), ..report.spec.as_ref().clone() };
        report.spec = Arc::new(spec);
    };
    let (mut script, _) = recovered_as(left);
    assert_eq!(script.version(), Some(5), "its last checkpoint is of version 2");
    script.write_all();
    let completion = script.completions.last().expect("the last save");
    assert_eq!((completion.plan.version.version, &completion.lost_ranks[..]), (5, &[0, 1][..]));
    script.completed(completion_save(&script), Ok(1));
    assert!(!script.cluster.jobs().contains_key("job"));
}

#[test]
fn a_restored_version_is_not_saved_without_the_data_that_the_last_coordinator_had_read() {
    let restored =
        |report: &mut JobReport| (report.decided, report.restored) = (None, Some((3, 5)));
    let (mut script, leases) = recovered_as(restored);
    (0..2).for_each(|rank| script.attach(rank, leases[rank as usize]).unwrap());
    let caller = script.save(Some("file:///elsewhere"));
    assert!(matches!(script.error(caller), Error::UserDataLost { version: 5, .. }));
    script.step_all(&leases, 5);
    script.save(Some("file:///elsewhere"));
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 step 5", "rank 1 step 5"]);
}

#[test]
fn a_restored_version_that_lacks_data_is_not_saved_as_if_there_were_none() {
    let (mut script, leases) = Script::training_of(policy(1, 2), 1);
    (0..2).for_each(|step| script.step_all(&leases, step));
    (script.found, script.found_data) = (found(2), UserData::restored(BTreeMap::new(), &[0]));
    script.lose_server(1);
    script.commands.clear();
    script.server(2);
    script.open_all();
    let caller = script.save(Some("file:///elsewhere"));
    assert!(matches!(script.error(caller), Error::UserDataLost { rank: 0, version: 2, .. }));
}

#[test]
fn data_is_accepted_only_from_the_holder_of_the_rank() {
    let (mut script, leases) = Script::training_of(policy(2, 100), 1);
    script.step_and_promise(&leases, 0);
    let other = script.send_data(0, leases[1], 1);
    assert!(matches!(script.error(other), Error::LeaseLost { rank: 0, .. }));
    // A repeated call may arrive after the next step.
    for rank in 0..2 {
        script.send_data(rank, leases[rank as usize], 1);
    }
    script.step_and_promise(&leases, 1);
    let late = script.send_data(0, leases[0], 1);
    assert_eq!(script.answer(late), Some(&Ok(Reply::UserDataStored)));
    script.send_data(0, leases[0], 2);
    script.send_data(1, leases[1], 2);
    script.save(Some(URL));
    script.write_all();
    assert_eq!(script.saved_data(), ["rank 0 version 2", "rank 1 version 2"]);
}

/// A coordinator that was restarted after step 4, for which both ranks had data. The first ranks
/// have leases.
fn recovered(ranks: u32) -> (Script, [Lease; 2]) {
    recovered_as(|report| report.ranks.leases.retain(|&rank, _| rank < ranks))
}

/// The same, with other descriptions by the servers.
fn recovered_as(change: impl Fn(&mut JobReport)) -> (Script, [Lease; 2]) {
    let mut before = Before::new();
    before.spec = Arc::new(JobSpec { min_servers: 2, ..policy(2, 100) });
    let report = |server| {
        let mut report = before.decided(server);
        let decided = report.decided.as_mut();
        decided.expect("a decision").0.figures.user_data = vec![0, 1];
        change(&mut report);
        report
    };
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.found = found(2);
    (1..3).for_each(|server| script.returns(server, 1, vec![report(server)]));
    (script, before.leases)
}

#[test]
fn ranks_send_their_data_again_to_a_new_coordinator() {
    let (mut script, leases) = recovered(2);
    assert_eq!(script.version(), Some(5));
    let caller = script.save(None);
    script.write_all();
    let data = |rank| data(5).remove(&rank).unwrap();
    let attempt = Attempt::first(3, 5);
    script.attach_with(0, leases[0], attempt, Some((5, data(0)))).unwrap();
    assert!(script.completions.is_empty(), "rank 1 has not attached");
    // It was lost with the coordinator on its way.
    script.attach_with(1, leases[1], attempt, Some((4, data(1)))).unwrap();
    assert!(script.completions.is_empty());
    script.send_data(1, leases[1], 5);
    assert_eq!(script.saved_data(), [data(0), data(1)]);
    script.completed(completion_save(&script), Ok(1));
    assert!(matches!(script.answer(caller), Some(Ok(Reply::Saved(_)))));
}

#[test]
fn a_rank_that_is_lost_with_the_coordinator_takes_its_data_along() {
    let (mut script, leases) = recovered(2);
    script.attach(0, leases[0]).unwrap();
    script.commands.clear();
    script.after(RECOVERY);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    let lease = script.join(1).unwrap();
    script.step_all(&[leases[0], lease], 2);
}

#[test]
fn data_of_ranks_that_have_ended_is_lost_with_the_coordinator() {
    let (mut script, leases) = recovered(1);
    script.after(RECOVERY);
    script.open_all();
    assert_eq!(script.version(), Some(2));
    script.attach(0, leases[0]).unwrap();
    let lease = script.join(1).unwrap();
    script.step_all(&[leases[0], lease], 2);
}
