//! A new coordinator continues jobs as their servers describe them.

use std::{collections::BTreeSet, sync::Arc};

use super::*;
use crate::{
    cluster::startup::RECOVERY,
    vocabulary::{
        calls::{Attach, Rested},
        commands::{Begins, FailedThere},
        decision::Figures,
        job_report::{JobReport, Ranks},
    },
};

/// A job of two servers and two ranks in epoch 3.
pub(super) struct Before {
    pub(super) spec: Arc<JobSpec>,
    pub(super) plan: Plan,
    pub(super) leases: [Lease; 2],
}

impl Before {
    pub(super) fn new() -> Self {
        let server = |id| Server { id, incarnation: 1, address: format!("host:{id}") };
        let spec = JobSpec { min_servers: 2, ..spec(2) };
        let plan = Plan::new(&spec, &[server(1), server(2)], &Zones::new()).unwrap();
        Self { spec: Arc::new(spec), plan, leases: [Lease(70), Lease(71)] }
    }

    /// A server's description, in which every gradient of step 4 is missing.
    pub(super) fn report(&self) -> JobReport {
        JobReport {
            id: JOB,
            term: 7,
            spec: self.spec.clone(),
            plan: self.plan.clone(),
            fork: None,
            restore: None,
            line: Arc::default(),
            recent: RecentSteps::default(),
            empty: BTreeSet::new(),
            copies: 0,
            attempt: Attempt { epoch: 3, step: 4, number: 0 },
            published: true,
            initialised: false,
            ranks: Ranks { leases: (0..).zip(self.leases).collect(), ..Ranks::default() },
            rested: None,
            ready: None,
            restoring: false,
            restored: None,
            decided: None,
        }
    }

    fn reduced(&self, server: u64) -> Reduced {
        let slices = self.plan.trainable.get(&server).into_iter().flatten();
        let sums = slices.map(|&slice| (slice, f64::from(slice) + 1.0)).collect();
        Reduced { sums, overflow: None, absent: Vec::new(), largest: Vec::new(), copies: 0 }
    }

    /// A server that has all gradients of step 4.
    fn ready(&self, server: u64) -> JobReport {
        JobReport { ready: Some(self.reduced(server)), ..self.report() }
    }

    /// A server that has the decision about step 4.
    pub(super) fn decided(&self, server: u64) -> JobReport {
        let report = self.report();
        let figures = Figures {
            scale: 2.0,
            clip_coefficient: 0.5,
            loss: Some(7.0),
            resting: vec![],
            user_data: vec![],
            spike: None,
            recent: RecentSteps::default(),
        };
        let decision =
            Decision { attempt: report.attempt, update: None, figures, replicated: None };
        JobReport {
            attempt: Attempt { epoch: 3, step: 5, number: 0 },
            decided: Some((decision, self.reduced(server))),
            ..report
        }
    }

    /// A new coordinator, with which the servers register one after the other.
    pub(super) fn recover(&self, reports: [JobReport; 2]) -> Script {
        let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
        for (id, report) in (1..).zip(reports) {
            assert!(script.describe("job").is_err(), "not before all servers are there");
            script.returns(id, 1, vec![report]);
        }
        script
    }
}

impl Script {
    pub(super) fn returns(&mut self, id: u64, incarnation: u64, reports: Vec<JobReport>) {
        self.returns_after(id, incarnation, reports, &[]);
    }

    /// A server returns, on which jobs have failed.
    pub(super) fn returns_after(
        &mut self,
        id: u64,
        incarnation: u64,
        reports: Vec<JobReport>,
        failed: &[(u64, &str)],
    ) {
        let server = Server { id, incarnation, address: format!("host:{id}") };
        let stream = self.next();
        self.links.insert(id, Link { server: id, stream });
        let why = |reason: &str| FailedThere { reason: reason.to_owned(), transient: false };
        let failed = failed.iter().map(|&(id, reason)| (id, why(reason))).collect();
        self.event(Event::ServerJoined {
            stream,
            server,
            about: About { failed, ..About::default() },
            reports,
            is_new: true,
        });
    }

    pub(super) fn attach(&mut self, rank: u32, lease: Lease) -> Result<()> {
        self.attach_at(rank, lease, Attempt::first(0, 0))
    }

    /// A worker continues its lease, and knows `attempt`.
    fn attach_at(&mut self, rank: u32, lease: Lease, attempt: Attempt) -> Result<()> {
        self.attach_with(rank, lease, attempt, None)
    }

    pub(super) fn attach_with(
        &mut self,
        rank: u32,
        lease: Lease,
        attempt: Attempt,
        user_data: Option<(u64, Bytes)>,
    ) -> Result<()> {
        let caller = self.caller();
        let attach = Attach { job: job(), rank, address: None, lease, attempt, user_data };
        self.event(Event::Attach { caller, attach });
        self.answers.remove(&caller).expect("it is answered at once").map(drop)
    }

    /// The commands to a server, without those that it receives in every case.
    pub(super) fn told_to(&self, id: u64) -> Vec<Command> {
        let commands = self.commands.iter().filter(|(server, _)| *server == id);
        let commands = commands.map(|(_, command)| command.clone());
        let always =
            |command: &Command| matches!(command, Command::Welcome | Command::Confirm { .. });
        commands.filter(|command| !always(command)).collect()
    }
}

#[test]
fn an_attempt_continues_with_the_gradients_that_have_arrived() {
    let before = Before::new();
    let mut script = before.recover([before.ready(1), before.report()]);
    assert_eq!((script.epoch(), script.version()), (3, Some(4)));
    assert!(script.told_to(1).is_empty() && script.told_to(2).is_empty());
    for (rank, lease) in (0..).zip(before.leases) {
        script.attach(rank, lease).unwrap();
    }
    let vote = |rank: u32| commit(before.leases[rank as usize], 3, rank, 4);
    let callers = [script.commit(vote(0)), script.commit(vote(1))];
    assert_eq!(script.answer(callers[0]), None);
    let attempt = Attempt { epoch: 3, step: 4, number: 0 };
    script.said(2, ServerEvent::Ready { job: job(), attempt, reduced: before.reduced(2) });
    assert_eq!(script.report(callers[0]), script.report(callers[1]));
    // Epochs of the last coordinator are not used again.
    script.lose(0, before.leases[0]);
    assert_eq!(script.epoch(), 4);
}

#[test]
fn a_decision_that_one_server_has_stands_and_is_reported_to_ranks_that_ask_again() {
    let before = Before::new();
    let mut script = before.recover([before.decided(1), before.ready(2)]);
    let decision = before.decided(1).decided.unwrap().0;
    assert_eq!(script.told_to(2), [Command::Decide { job: job(), decision }]);
    assert!(script.told_to(1).is_empty());
    assert_eq!(script.version(), Some(5));
    let caller = script.commit(commit(before.leases[0], 3, 0, 4));
    let report = script.report(caller);
    assert_eq!((report.version, report.loss, report.clip_coefficient), (5, Some(7.0), 0.5));
    // The sums of squares of all slices, which two ranks and the scale 2 divide.
    let sum: f64 = [1, 2].iter().flat_map(|&server| before.reduced(server).sums).map(|s| s.1).sum();
    assert_eq!(report.norm.value, sum.sqrt() / 2.0 / 2.0);
}

#[test]
fn a_server_that_lacks_the_decision_and_its_gradients_is_an_error() {
    let before = Before::new();
    let mut script = before.recover([before.decided(1), before.report()]);
    assert_eq!(script.failure(), None, "the description may be old");
    script.returns(2, 1, vec![before.report()]);
    let reason = script.failure().unwrap();
    assert!(reason.contains("lacks gradients of step 4 that was decided"), "{reason}");
    assert_eq!(script.closed(), [1, 2]);
}

#[test]
fn a_lease_that_only_some_servers_know_ends_because_no_worker_knows_it() {
    let before = Before::new();
    let mut other = before.report();
    other.ranks.leases.insert(1, Lease(99));
    let mut script = before.recover([before.ready(1), other]);
    let ends = Command::NewEpoch { job: job(), epoch: 3, rank: 1, left: false };
    assert_eq!((script.told_to(1), script.told_to(2)), (vec![ends.clone()], vec![ends]));
    script.attach(0, before.leases[0]).unwrap();
    for lease in [before.leases[1], Lease(99)] {
        let lost = Error::LeaseLost { job: "job".into(), rank: 1 };
        assert_eq!(script.attach(1, lease), Err(lost));
    }
    assert!(script.join(1).is_ok());
    // No gradient was pushed with it, so the others count.
    assert_eq!((script.epoch(), script.open().round.reports().len()), (3, 1));
}

#[test]
fn an_epoch_that_only_some_servers_know_is_announced_to_the_others() {
    let before = Before::new();
    let mut newer = before.report();
    newer.attempt.epoch = 9;
    newer.ranks.leases.remove(&1);
    let script = before.recover([before.ready(1), newer.clone()]);
    let next = Command::NewAttempt { job: job(), attempt: newer.attempt, rested: None };
    let ends = Command::NewEpoch { job: job(), epoch: 9, rank: 1, left: false };
    assert_eq!((script.told_to(1), script.told_to(2)), (vec![next, ends], vec![]));
    // The gradients of the old epoch do not count.
    assert_eq!((script.epoch(), script.open().members.len()), (9, 1));
    assert!(script.open().round.reports().is_empty());
}

#[test]
fn a_rank_that_one_server_knows_as_done_or_left_is_not_lost() {
    let before = Before::new();
    let mut done = before.report();
    done.ranks.leases.remove(&1);
    done.ranks.done.insert(1);
    let script = before.recover([before.ready(1), done]);
    assert_eq!(script.told_to(1), [Command::RankDone { job: job(), rank: 1 }]);
    assert_eq!(
        (script.epoch(), script.open().departed.done().len(), script.told_to(2)),
        (3, 1, vec![])
    );
    assert_eq!(script.open().round.reports().len(), 1);

    let mut left = before.report();
    left.attempt.epoch = 4;
    left.ranks.leases.remove(&1);
    left.ranks.left.insert(1);
    let mut script = before.recover([left, before.ready(2)]);
    let ends = Command::NewEpoch { job: job(), epoch: 4, rank: 1, left: true };
    assert_eq!(script.told_to(2).last(), Some(&ends));
    let caller = script.commit(commit(before.leases[0], 4, 0, 4));
    assert_eq!(script.error(caller), &Error::RankLeft { job: "job".into(), rank: 1, step: 4 });
}

#[test]
fn a_rest_that_begins_or_ends_with_the_coordinator_is_answered() {
    let before = Before::new();
    let resting = |ranks: &[u32]| {
        let mut report = before.report();
        report.ranks.resting = ranks.iter().map(|&rank| (rank, (4, false))).collect();
        report
    };
    // It begins: one server was told.
    let mut script = before.recover([resting(&[1]), resting(&[])]);
    let begins = Some(Begins { since: 4, excluded: false });
    assert_eq!(script.told_to(2), [Command::RankRests { job: job(), rank: 1, begins }]);
    assert_eq!((script.epoch(), script.told_to(1)), (3, vec![]));
    let first = script.rest(turn(before.leases[1], 3, 1, 4), false);
    assert_eq!(script.answer(first), None);
    let last = script.rest(turn(before.leases[0], 3, 0, 4), false);
    let rested = Rested { attempt: Attempt { epoch: 3, step: 4, number: 1 }, last: 1 };
    for caller in [first, last] {
        assert_eq!(script.answer(caller), Some(&Ok(Reply::Rested(rested))));
    }
    // It ends: one server was told of the end, or of a part of it, or both were told of all.
    let mut ended = resting(&[]);
    (ended.attempt, ended.rested) = (rested.attempt, Some(1));
    let both = resting(&[0, 1]);
    for report in [[ended.clone(), both.clone()], [resting(&[]), both], [ended.clone(), ended]] {
        let mut script = before.recover(report);
        for rank in [0, 1] {
            let caller = script.rest(turn(before.leases[rank as usize], 3, rank, 4), false);
            assert_eq!(script.answer(caller), Some(&Ok(Reply::Rested(rested))));
        }
        assert_eq!((script.epoch(), script.open().uneven_inputs.len()), (3, 0));
    }
}

#[test]
fn a_worker_that_knows_a_later_attempt_than_the_servers_moves_to_a_new_epoch_at_once() {
    let before = Before::new();
    let at = |epoch, step, number| Attempt { epoch, step, number };
    for (theirs, epoch) in [(at(3, 4, 0), 3), (at(3, 5, 0), 3), (at(3, 4, 1), 4), (at(8, 4, 0), 9)]
    {
        let mut script = before.recover([before.ready(1), before.ready(2)]);
        let waiting = script.commit(commit(before.leases[0], 3, 0, 4));
        script.attach_at(1, before.leases[1], theirs).unwrap();
        assert_eq!(script.epoch(), epoch, "{theirs:?}");
        let aborted = matches!(script.answer(waiting), Some(Err(Error::StepAborted { .. })));
        assert_eq!(aborted, epoch > 3);
    }
    let mut script = before.recover([before.report(), before.report()]);
    let absurd = script.attach_at(1, before.leases[1], at(u64::MAX, 4, 0)).unwrap_err();
    assert!(matches!(absurd, Error::Invalid { .. }), "{absurd}");
}

/// Another coordinator may have made steps with that server.
#[test]
fn a_worker_that_knows_a_later_attempt_waits_for_a_server_that_is_not_connected() {
    let before = Before::new();
    for (later, epoch) in [(Attempt::first(8, 6), 9), (Attempt::first(3, 5), 3)] {
        let mut script = before.recover([before.report(), before.report()]);
        script.lose_link(script.links[&2]);
        let refused = script.attach_at(1, before.leases[1], later).unwrap_err();
        assert!(matches!(refused, Error::Unavailable { .. }), "{refused}");
        script.attach_at(0, before.leases[0], Attempt::first(3, 4)).unwrap();
        script.returns(2, 1, vec![before.report()]);
        script.attach_at(1, before.leases[1], later).unwrap();
        assert_eq!(script.epoch(), epoch);
    }
}

#[test]
fn an_attempt_and_a_version_that_only_some_servers_know_are_announced_to_the_others() {
    let before = Before::new();
    let mut later = before.report();
    later.attempt.number = 2;
    let script = before.recover([before.ready(1), later.clone()]);
    let attempt = later.attempt;
    assert_eq!(script.told_to(1), [Command::NewAttempt { job: job(), attempt, rested: None }]);
    assert!(script.told_to(2).is_empty() && script.open().round.reports().is_empty());

    let at_upload = |published, initialised| JobReport {
        attempt: Attempt { epoch: 3, step: 0, number: 0 },
        published,
        initialised,
        ..before.report()
    };
    let publish = Command::Publish { job: job(), epoch: 3 };
    let script = before.recover([at_upload(true, false), at_upload(false, true)]);
    assert_eq!((script.told_to(1), script.told_to(2)), (vec![], vec![publish.clone()]));
    let script = before.recover([at_upload(false, true), at_upload(false, true)]);
    assert_eq!(script.told_to(1), [publish]);
    assert_eq!(script.version(), Some(0));
    let script = before.recover([at_upload(false, true), at_upload(false, false)]);
    assert_eq!(
        (script.version(), script.open().version.uninitialised()),
        (None, &BTreeSet::from([2]))
    );
}

#[test]
fn ranks_that_have_left_are_done_or_rest_are_known() {
    let before = Before::new();
    let report = |change: &dyn Fn(&mut Ranks)| {
        let mut report = before.report();
        change(&mut report.ranks);
        report
    };
    let left = report(&|ranks| {
        ranks.leases.remove(&1);
        ranks.left.insert(1);
    });
    let mut script = before.recover([left.clone(), left]);
    let caller = script.commit(commit(before.leases[0], 3, 0, 4));
    assert_eq!(script.error(caller), &Error::RankLeft { job: "job".into(), rank: 1, step: 4 });

    let rests = report(&|ranks| ranks.resting = [(1, (2, true))].into());
    let mut script = before.recover([rests.clone(), rests.clone()]);
    assert!(script.new_epochs().is_empty());
    // Its call, which it repeats, is from the step in which it began to rest.
    let caller = script.rest(turn(before.leases[1], 3, 1, 2), true);
    assert_eq!(script.answer(caller), None);
    let last = script.rest(turn(before.leases[0], 3, 0, 4), true);
    assert!(matches!(script.answer(last), Some(Ok(Reply::Rested(_)))));
    assert!(matches!(script.answer(caller), Some(Ok(Reply::Rested(_)))));
}

#[test]
fn ranks_that_do_not_attach_in_time_are_lost() {
    let before = Before::new();
    let mut script = before.recover([before.report(), before.report()]);
    script.attach(0, before.leases[0]).unwrap();
    script.after(RECOVERY);
    assert_eq!((script.epoch(), script.open().members.len()), (4, 1));
    let error = script.attach(1, before.leases[1]).unwrap_err();
    assert_eq!(error, Error::LeaseLost { job: "job".into(), rank: 1 });
    // A rank whose stream has not ended does not attach twice.
    let error = script.attach(0, before.leases[0]).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

#[test]
fn what_a_server_says_while_others_are_missing_counts() {
    let before = Before::new();
    let starting = || Script { cluster: Cluster::starting(), ..Script::default() };
    let attempt = before.report().attempt;
    let mut script = starting();
    script.returns(1, 1, vec![before.report()]);
    script.said(1, ServerEvent::Ready { job: job(), attempt, reduced: before.reduced(1) });
    script.returns(2, 1, vec![before.ready(2)]);
    assert!(script.open().is_reduced());

    let upload = JobReport {
        attempt: Attempt { epoch: 3, step: 0, number: 0 },
        published: false,
        ..before.report()
    };
    let mut script = starting();
    script.returns(1, 1, vec![upload.clone()]);
    script.said(1, ServerEvent::Initialised { job: job(), epoch: 3 });
    script.returns(2, 1, vec![JobReport { initialised: true, ..upload }]);
    assert_eq!(script.version(), Some(0));

    let mut script = starting();
    script.returns(1, 1, vec![before.report()]);
    script.failed(1, "out of memory");
    assert_eq!(script.failure(), Some("shard server host:1: out of memory"));
}

#[test]
fn a_server_without_trained_slices_catches_up() {
    let mut before = Before::new();
    // As if server 2 only held the frozen tensor.
    let slices = before.plan.trainable.remove(&2);
    before.plan.trainable.entry(1).or_default().extend(slices.into_iter().flatten());
    before.plan.trainable.entry(1).or_default().sort_unstable();
    let mut decided = before.decided(1);
    decided.decided.as_mut().unwrap().0.attempt.number = 2;
    let decision = decided.decided.as_ref().unwrap().0.clone();
    let script = before.recover([decided, before.report()]);
    let attempt = decision.attempt;
    let next = Command::NewAttempt { job: job(), attempt, rested: None };
    let expected = [next, Command::Decide { job: job(), decision }];
    assert_eq!(script.told_to(2), expected);
    assert_eq!(script.version(), Some(5));
}

#[test]
fn a_member_waits_when_another_worker_has_created_its_job_again_before_the_servers_return() {
    let before = Before::new();
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    // The worker was started again together with the coordinator.
    let creator = script.create_as(JOB + 1, before.spec.as_ref().clone());
    assert_eq!(script.answer(creator), None);
    let early = script.commit(commit(before.leases[1], 3, 1, 4));
    assert!(matches!(script.error(early), Error::Unavailable { .. }), "{:?}", script.error(early));
    let attached = script.attach_at(1, before.leases[1], Attempt::first(3, 4));
    assert!(matches!(attached, Err(Error::Unavailable { .. })), "{attached:?}");
    for (server, report) in (1..).zip([before.report(), before.report()]) {
        script.returns(server, 1, vec![report]);
    }
    assert!(matches!(script.error(creator), Error::Unavailable { .. }));
    script.attach_at(1, before.leases[1], Attempt::first(3, 4)).unwrap();
}

#[test]
fn a_member_waits_for_servers_that_are_slow_to_return() {
    let before = Before::new();
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.after(RECOVERY - Duration::from_secs(1));
    let waiting = script.attach(0, before.leases[0]);
    assert!(matches!(waiting, Err(Error::Unavailable { .. })), "{waiting:?}");
    script.after(Duration::from_secs(1));
    let unknown = script.attach(0, before.leases[0]);
    assert!(matches!(unknown, Err(Error::UnknownJob { .. })), "{unknown:?}");
}
