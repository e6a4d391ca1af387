//! Jobs that take over from others.

use proptest::prelude::*;
use zeroshard_model::{JobVersion, Policy, RunningAverage};

use super::*;
use crate::{
    placement::fork::{SliceCopy, Source},
    vocabulary::commands::OpenJob,
};

const SUCCESSOR: u64 = 0x7008;
const IDLE: Duration = Duration::from_secs(20);

fn named(name: &str, world: u32) -> JobSpec {
    JobSpec { name: name.into(), ..spec(world) }
}

/// A fork from the job at `version`.
fn from(version: u64) -> Option<Fork> {
    let from = JobVersion { job: "job".into(), job_id: JOB, version };
    Some(Fork { from, fresh_state: false })
}

impl Script {
    /// A trained job on two servers, and the creation of its successor.
    fn succeeded() -> (Self, Vec<Lease>, Caller) {
        let idle_timeout = Some(IDLE);
        let (mut script, leases) = Self::training_of(JobSpec { idle_timeout, ..spec(1) }, 2);
        let caller = script.create_from(SUCCESSOR, named("next", 1), from(0));
        (script, leases, caller)
    }

    /// The fork, and the copies of it that each server was told to make for the successor.
    fn forks(&self) -> Vec<(Fork, Vec<SliceCopy>)> {
        let fork = |(_, command): &(u64, Command)| match command {
            Command::Open(OpenJob { spec, placement, server, source, .. }) => {
                let source = source.as_ref()?;
                let copies = source.copies(spec, placement, *server);
                Some((source.fork.as_ref().clone(), copies))
            }
            _ => None,
        };
        self.commands.iter().filter_map(fork).collect()
    }

    fn next_opened(&mut self, server: u64) {
        self.said(server, self.opened(JobRef { name: "next".into(), id: SUCCESSOR }));
    }

    fn cannot_copy(&mut self, server: u64) {
        let job = JobRef { name: "next".into(), id: SUCCESSOR };
        let (epoch, reason) = (self.cluster.jobs()["next"].epoch, "it cannot copy".to_owned());
        self.said(server, ServerEvent::Failed { job, epoch, reason, transient: true });
    }

    fn step(&mut self, lease: Lease) {
        let (epoch, step) = (self.epoch(), self.version().expect("initialised"));
        self.ready_all(step);
        let committed = self.commit(commit(lease, epoch, 0, step));
        assert_eq!(self.report(committed).version, step + 1);
    }
}

#[test]
fn servers_are_told_what_to_copy_and_creation_ends_with_the_copy() {
    let (mut script, _, caller) = Script::succeeded();
    let forks = script.forks();
    assert_eq!(forks.len(), 2);
    let mut slices = Vec::new();
    for (fork, copies) in &forks {
        assert_eq!(Some(fork), from(0).as_ref());
        for copy in copies {
            assert_eq!((copy.slice, copy.offset, copy.source_offset), (copy.source, 0, 0));
            assert_eq!(copy.state, copy.slice != 1, "frozen");
            slices.push((copy.slice, copy.length));
        }
    }
    slices.sort_unstable();
    assert_eq!(slices, [(0, 3), (1, 2), (2, 4)]);
    script.next_opened(1);
    assert_eq!(script.answer(caller), None);
    script.next_opened(2);
    let created = Ok(Reply::Created { epoch: 2, job_id: SUCCESSOR });
    assert_eq!(script.answer(caller), Some(&created));
    // The same again, also when the predecessor has gone.
    script.delete(JOB);
    let again = script.create_from(9, named("next", 1), from(0));
    assert_eq!(script.answer(again), Some(&created));
    let other = script.create_from(9, named("next", 1), from(1));
    assert!(matches!(script.error(other), Error::JobExists { .. }));
    let none = script.create_as(9, named("next", 1));
    assert!(matches!(script.error(none), Error::JobExists { .. }));
}

#[test]
fn a_predecessor_that_cannot_be_is_refused() {
    let (mut script, leases) = Script::training(1, 1);
    script.step(leases[0]);
    let mut refused = |fork: Option<Fork>| {
        let caller = script.create_from(SUCCESSOR, named("next", 1), fork);
        assert!(!script.cluster.jobs().contains_key("next"));
        script.error(caller).clone()
    };
    assert!(matches!(refused(from(0)), Error::VersionGone { version: 0, current: 1, .. }));
    assert!(matches!(refused(from(2)), Error::Invalid { .. }));
    let like = |name: &str, id| {
        let from = JobVersion { job: name.into(), job_id: id, version: 1 };
        Some(Fork { from, fresh_state: false })
    };
    assert!(matches!(refused(like("other", JOB)), Error::UnknownJob { .. }));
    assert!(matches!(refused(like("job", 1)), Error::JobReplaced { .. }));
    let mut script = Script::opened_job(spec(1), 1);
    let caller = script.create_from(SUCCESSOR, named("next", 1), from(0));
    assert!(matches!(script.error(caller), Error::Refused { .. }), "it has no version");
}

#[test]
fn a_predecessor_that_steps_before_its_successor_is_placed_ends_the_creation() {
    let (mut script, leases) = Script::training(1, 2);
    let spec = JobSpec { min_servers: 3, ..named("next", 1) };
    let caller = script.create_from(SUCCESSOR, spec, from(0));
    script.step(leases[0]);
    script.server(3);
    assert!(matches!(script.error(caller), Error::VersionGone { version: 0, current: 1, .. }));
    assert!(script.forks().is_empty() && !script.cluster.jobs().contains_key("next"));
}

#[test]
fn a_copy_that_fails_is_explained_by_what_became_of_the_predecessor() {
    let (mut script, leases, caller) = Script::succeeded();
    script.step(leases[0]);
    assert_eq!(script.answer(caller), None, "the servers may have it already");
    script.cannot_copy(2);
    assert!(matches!(script.error(caller), Error::VersionGone { version: 0, current: 1, .. }));
    assert_eq!(script.closed(), [1, 2]);
    // With a predecessor that is as it was, the reason is the server's.
    let (mut script, _, caller) = Script::succeeded();
    script.cannot_copy(2);
    let Error::JobFailed { job, reason } = script.error(caller) else { panic!("failed") };
    assert!(job == "next" && reason.contains("host:2: it cannot copy"), "{reason}");
}

#[test]
fn the_end_of_a_predecessor_ends_the_creation_and_not_a_job_that_is_there() {
    let (mut script, _, caller) = Script::succeeded();
    script.delete(JOB);
    let Error::JobFailed { job, reason } = script.error(caller) else { panic!("failed") };
    assert_eq!((job.as_str(), reason.as_str()), ("job", "deleted"));
    assert!(script.cluster.jobs().is_empty());
    let (mut script, _, _) = Script::succeeded();
    script.next_opened(1);
    script.next_opened(2);
    script.delete(JOB);
    assert!(script.cluster.jobs().contains_key("next"));
}

#[test]
fn a_server_that_is_lost_during_the_copy_ends_the_creation() {
    let (mut script, _, caller) = Script::succeeded();
    script.next_opened(1);
    script.lose_server(2);
    assert!(matches!(script.error(caller), Error::JobFailed { .. }));
    assert!(!script.cluster.jobs().contains_key("next"));
    // One that holds only the predecessor.
    let (mut script, _) = Script::training(1, 1);
    script.server(2);
    let caller = script.create_from(SUCCESSOR, named("next", 1), from(0));
    script.lose_server(1);
    assert!(matches!(script.error(caller), Error::JobFailed { .. }));
    assert!(!script.cluster.jobs().contains_key("next"));
}

#[test]
fn a_creator_that_goes_away_ends_the_copy() {
    let (mut script, _, caller) = Script::succeeded();
    script.event(Event::Gone { caller, job: "next".into(), rank: None });
    assert!(!script.cluster.jobs().contains_key("next"));
    assert_eq!(script.closed(), [1, 2]);
}

#[test]
fn a_deadline_names_the_copy() {
    let (mut script, _, caller) = Script::succeeded();
    script.next_opened(1);
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(caller) else { panic!("timeout") };
    assert!(
        waiting_for.contains("host:2") && waiting_for.contains("version 0 of job \"job\""),
        "{waiting_for}"
    );
}

#[test]
fn a_predecessor_that_nobody_uses_is_kept_until_the_copy_is_complete() {
    let (mut script, leases, _) = Script::succeeded();
    script.leave(leases[0], true);
    script.after(WAIT / 2);
    assert!(script.cluster.jobs().contains_key("job"));
    script.next_opened(1);
    script.next_opened(2);
    script.event(Event::Tick);
    assert!(!script.cluster.jobs().contains_key("job"));
    assert!(script.cluster.jobs().contains_key("next"));
    // Or until it has ended in vain.
    let (mut script, leases, caller) = Script::succeeded();
    script.leave(leases[0], true);
    script.event(Event::Gone { caller, job: "next".into(), rank: None });
    script.event(Event::Tick);
    assert!(script.cluster.jobs().is_empty());
}

/// The parts of one tensor that are copied.
fn copies(before: (TensorSpec, &str), after: (TensorSpec, &str)) -> Vec<SliceCopy> {
    let job = |(tensor, optimizer): (TensorSpec, &str)| {
        let optimizer = serde_json::from_str(optimizer).unwrap();
        JobSpec::new("job", Manifest::new(vec![tensor]).unwrap(), vec![optimizer])
    };
    let live = [Server { id: 1, incarnation: 1, address: "host:1".into() }];
    let (before, after) = (job(before), job(after));
    let placement = Plan::new(&after, &live, &Zones::new()).unwrap().placement;
    let source = Source {
        fork: from(0).unwrap().into(),
        placement: Plan::new(&before, &live, &Zones::new()).unwrap().placement,
        spec: before.into(),
    };
    source.copies(&after, &placement, 1)
}

const ADAM: &str = r#"{"name":"adam"}"#;
const AMSGRAD: &str = r#"{"name":"adam","amsgrad":true}"#;
const SGD: &str = r#"{"name":"sgd"}"#;

#[test]
fn tensors_of_another_name_or_shape_are_not_carried_over() {
    let tensor = || TensorSpec::new("w", [2, 3]);
    assert_eq!(copies((tensor(), ADAM), (tensor(), ADAM)).len(), 1);
    let renamed = TensorSpec { name: "v".into(), ..tensor() };
    assert!(copies((renamed, ADAM), (tensor(), ADAM)).is_empty());
    assert!(copies((TensorSpec::new("w", [3, 2]), ADAM), (tensor(), ADAM)).is_empty());
}

#[test]
fn state_is_carried_over_where_all_of_it_is_there() {
    let tensor = || TensorSpec::new("w", [2]);
    let frozen = || TensorSpec { frozen: true, ..tensor() };
    let state = |before, after| copies(before, after)[0].state;
    assert!(state((tensor(), ADAM), (tensor(), r#"{"name":"adamw"}"#)));
    assert!(
        state((tensor(), AMSGRAD), (tensor(), ADAM)) && state((tensor(), ADAM), (tensor(), SGD))
    );
    assert!(!state((tensor(), ADAM), (tensor(), AMSGRAD)));
    assert!(
        !state((frozen(), ADAM), (tensor(), ADAM)) && !state((tensor(), ADAM), (frozen(), ADAM))
    );
}

#[test]
fn averages_are_carried_over_where_both_jobs_have_the_same() {
    let spec = |averages: &[&str]| {
        let averages = averages.iter().map(|&name| RunningAverage::exponential(name, 0.9));
        let manifest = Manifest::new(vec![TensorSpec::new("w", [2])]).unwrap();
        let spec = JobSpec::new("job", manifest, vec![serde_json::from_str(ADAM).unwrap()]);
        JobSpec { averages: averages.collect(), ..spec }
    };
    let live = [Server { id: 1, incarnation: 1, address: "host:1".into() }];
    for (before, after, fresh_state, expected) in [
        (&["slow", "fast"][..], &["slow", "fast"][..], false, true),
        (&["slow"], &["slow"], true, false),
        (&["slow"], &["fast"], false, false),
        (&["slow"], &[], false, false),
    ] {
        let (before, after) = (spec(before), spec(after));
        let placement = Plan::new(&after, &live, &Zones::new()).unwrap().placement;
        let fork = Fork { fresh_state, ..from(0).unwrap() };
        let source =
            Source { fork: fork.into(), placement: placement.clone(), spec: before.into() };
        let copy = source.copies(&after, &placement, 1)[0];
        assert_eq!((copy.averages, copy.state), (expected, !fresh_state));
    }
}

proptest! {
    #[test]
    fn copies_cover_a_slice_once_however_its_tensor_was_cut(
        numel in 1u64..14_000_000, whole in any::<[bool; 2]>(),
    ) {
        let tensor = |whole| TensorSpec {
            policy: if whole { Policy::Whole } else { Policy::Elementwise },
            ..TensorSpec::new("w", [numel])
        };
        let [before, after] = whole.map(tensor);
        let manifests = [&before, &after].map(|t| Manifest::new(vec![t.clone()]).unwrap());
        let mut next = 0;
        for copy in copies((before, ADAM), (after, ADAM)) {
            let (from, to) =
                (manifests[0].slices()[copy.source], manifests[1].slices()[copy.slice]);
            prop_assert_eq!(to.offset + copy.offset, next);
            prop_assert_eq!(from.offset + copy.source_offset, next);
            prop_assert!(copy.length > 0 && copy.offset + copy.length <= to.numel);
            prop_assert!(copy.source_offset + copy.length <= from.numel);
            next += copy.length;
        }
        prop_assert_eq!(next as u64, numel);
    }
}

#[test]
fn a_deletion_is_confirmed_after_the_jobs_that_were_being_created_from_the_job_are_closed() {
    let (mut script, ..) = Script::succeeded();
    script.commands.clear();
    script.delete(JOB);
    let is_close_of =
        |command: &Command, id| matches!(command, Command::Close(job) if job.id == id);
    let of_server = script.commands.iter().filter(|(server, _)| *server == 1);
    let of_server: Vec<&Command> = of_server.map(|(_, command)| command).collect();
    let closed = of_server.iter().position(|command| is_close_of(command, SUCCESSOR));
    let confirm = of_server.iter().position(|command| matches!(command, Command::Confirm { .. }));
    assert!(closed.is_some() && closed < confirm, "{of_server:?}");
}

#[test]
fn an_idle_job_is_kept_while_another_is_created_from_it() {
    let (mut script, leases) =
        Script::training_of(JobSpec { idle_timeout: Some(IDLE), ..spec(1) }, 2);
    script.lose(0, leases[0]);
    let due = script.now + IDLE;
    assert_eq!(script.cluster.next_deadline(), Some(due));
    script.create_from(SUCCESSOR, named("next", 1), from(0));
    assert!(script.cluster.next_deadline() > Some(due));
}
