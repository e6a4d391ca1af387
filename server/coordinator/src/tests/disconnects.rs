//! A server has received only the first part of the commands, because its control stream has broken
//! or the coordinator has died.
//!
//! promise: no-silent-hang, durability

use std::{collections::BTreeSet, sync::Arc};

use zeroshard_model::Departure;

use super::*;
use crate::{
    cluster::startup::RECOVERY,
    vocabulary::job_report::{JobReport, Ranks},
};

/// The commands and reports of a server, in order.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a log of a few entries")]
enum Entry {
    Told(Command),
    Initialised,
    Ready(Reduced),
}

/// A server that carries out commands as the shard does.
#[derive(Debug, Clone)]
struct Shard(JobReport);

impl Shard {
    fn apply(&mut self, entry: &Entry) {
        let Self(report) = self;
        match entry {
            Entry::Initialised => report.initialised = true,
            Entry::Ready(reduced) => report.ready = Some(reduced.clone()),
            Entry::Told(command) => match command.clone() {
                Command::Publish { epoch, .. } => {
                    assert!(report.initialised && report.attempt.epoch == epoch);
                    (report.published, report.initialised) = (true, false);
                }
                Command::Grant { rank, lease, .. } => {
                    report.ranks.left.remove(&rank);
                    report.ranks.leases.insert(rank, lease);
                }
                Command::NewEpoch { epoch, rank, left, .. } => {
                    report.ranks.leases.remove(&rank);
                    report.ranks.done.remove(&rank);
                    report.ranks.left.remove(&rank);
                    report.ranks.left.extend(left.then_some(rank));
                    self.open(Attempt { epoch, number: 0, ..self.0.attempt }, None);
                }
                Command::NewAttempt { attempt, rested, .. } => self.open(attempt, rested),
                Command::RankDone { rank, .. } => {
                    report.ranks.leases.remove(&rank);
                    report.ranks.left.remove(&rank);
                    report.ranks.resting.remove(&rank);
                    report.ranks.done.insert(rank);
                }
                Command::RankRests { rank, begins, .. } => {
                    report.ranks.resting.remove(&rank);
                    let rest = begins.map(|begins| (rank, (begins.since, begins.excluded)));
                    report.ranks.resting.extend(rest);
                }
                Command::Decide { decision, .. } => {
                    assert_eq!(report.attempt, decision.attempt);
                    report.decided = report.ready.take().map(|reduced| (decision, reduced));
                    report.attempt = Attempt::first(report.attempt.epoch, report.attempt.step + 1);
                    report.rested = None;
                }
                Command::Confirm { .. }
                | Command::Release
                | Command::Open(_)
                | Command::Welcome
                | Command::Write { .. }
                | Command::CancelSave { .. } => {}
                Command::NewPlacement { .. }
                | Command::Copy { .. }
                | Command::ServeVersion { .. } => panic!("the job has no replicas"),
                Command::Close(_) => panic!("the job is closed"),
                Command::Cordon { .. } => panic!("no operator is here"),
            },
        }
    }

    fn open(&mut self, attempt: Attempt, rested: Option<u32>) {
        let Self(report) = self;
        if attempt > report.attempt {
            (report.attempt, report.ready, report.rested, report.initialised) =
                (attempt, None, rested, false);
        }
    }

    fn state(&self) -> (Attempt, bool, &Ranks, Option<u32>) {
        let JobReport { attempt, published, ranks, rested, .. } = &self.0;
        (*attempt, *published, ranks, *rested)
    }
}

/// A job of two ranks on the servers 1 and 2.
struct Play {
    script: Script,
    leases: [Lease; 2],
    log: Vec<(u64, Entry)>,
}

impl Play {
    /// The first `steps` steps of a story with every kind of command; `None` after its end.
    fn start(steps: usize) -> Option<Self> {
        let spec = JobSpec { min_servers: 2, departure: Departure::Absent, ..spec(2) };
        let script = Script::opened_job(spec, 2);
        let mut play = Self { script, leases: [Lease(0); 2], log: Vec::new() };
        let story: [fn(&mut Self); 19] = [
            |play| play.join(0),
            |play| play.join(1),
            |play| play.initialise(),
            |play| play.step(&[0, 1]),
            |play| play.rest(1),
            |play| play.step(&[0]),
            |play| play.rest(0),
            |play| play.discard(),
            |play| play.step(&[0, 1]),
            |play| play.script.lose(1, play.leases[1]),
            |play| play.join(1),
            |play| _ = play.script.leave(play.leases[0], false),
            |play| play.join(0),
            |play| play.rest(1),
            |play| play.script.lose(0, play.leases[0]),
            |play| play.join(0),
            |play| play.step(&[0, 1]),
            |play| _ = play.script.leave(play.leases[1], true),
            |play| play.step(&[0]),
        ];
        for step in story.get(..steps)? {
            step(&mut play);
            play.record();
        }
        Some(play)
    }

    fn record(&mut self) {
        let told = std::mem::take(&mut self.script.commands).into_iter();
        self.log.extend(told.map(|(server, command)| (server, Entry::Told(command))));
    }

    fn join(&mut self, rank: u32) {
        self.leases[rank as usize] = self.script.join(rank).unwrap();
    }

    fn initialise(&mut self) {
        let epoch = self.script.epoch();
        for server in [1, 2] {
            self.log.push((server, Entry::Initialised));
            self.script.said(server, ServerEvent::Initialised { job: job(), epoch });
        }
    }

    fn attempt(&self) -> Attempt {
        self.script.open().attempt(self.script.epoch())
    }

    fn turn(&self, rank: u32) -> Turn {
        Turn { job: job(), lease: self.leases[rank as usize], rank, attempt: self.attempt() }
    }

    fn step(&mut self, ranks: &[u32]) {
        let attempt = self.attempt();
        for &rank in ranks {
            let commit = commit(self.leases[rank as usize], attempt.epoch, rank, attempt.step);
            self.script.commit(Commit { turn: self.turn(rank), ..commit });
        }
        for server in [1, 2] {
            if self.script.open().plan.trainable.contains_key(&server) {
                let reduced = self.script.gradients(server);
                self.log.push((server, Entry::Ready(reduced.clone())));
                self.script.said(server, ServerEvent::Ready { job: job(), attempt, reduced });
            }
        }
    }

    fn rest(&mut self, rank: u32) {
        let turn = self.turn(rank);
        self.script.rest(turn, false);
    }

    fn discard(&mut self) {
        let turns = [0, 1].map(|rank| self.turn(rank));
        turns.into_iter().for_each(|turn| _ = self.script.discard(turn));
    }

    /// The server after each number of commands that it may have received.
    fn shards(&self, server: u64) -> Vec<Shard> {
        let open = self.script.open();
        let found = &self.script.cluster.jobs()["job"];
        let mut shard = Shard(JobReport {
            id: JOB,
            term: 7,
            spec: found.spec.clone(),
            plan: Plan::of(&found.spec, open.plan.placement.as_ref().clone()),
            fork: None,
            restore: None,
            line: Arc::default(),
            recent: RecentSteps::default(),
            empty: BTreeSet::new(),
            copies: 0,
            attempt: Attempt::first(1, 0),
            published: false,
            initialised: false,
            ranks: Ranks::default(),
            rested: None,
            ready: None,
            restoring: false,
            restored: None,
            decided: None,
        });
        let log: Vec<_> = self.log.iter().filter(|(id, _)| *id == server).collect();
        let mut shards = vec![shard.clone()];
        for (_, entry) in log {
            shard.apply(entry);
            // What the server itself has said has happened.
            if !matches!(entry, Entry::Told(_)) {
                shards.clear();
            }
            shards.push(shard.clone());
        }
        shards
    }
}

fn returns(script: &mut Script, id: u64, reports: Vec<JobReport>, is_new: bool) {
    let server = Server { id, incarnation: 1, address: format!("host:{id}") };
    let stream = script.next();
    script.links.insert(id, Link { server: id, stream });
    let failed = BTreeMap::new();
    script.event(Event::ServerJoined {
        stream,
        server,
        about: About { failed, ..About::default() },
        reports,
        is_new,
    });
}

/// Tells a server what the script has sent to it, or the first `limit` commands of that.
fn tell(script: &Script, server: u64, shard: &mut Shard, limit: usize) {
    let told = script.commands.iter().filter(|(id, _)| *id == server).take(limit);
    told.for_each(|(_, command)| shard.apply(&Entry::Told(command.clone())));
}

/// A new coordinator after the servers have described the job.
fn recover(shards: [&Shard; 2]) -> Script {
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    for (id, shard) in (1..).zip(shards) {
        returns(&mut script, id, vec![shard.0.clone()], true);
    }
    assert_eq!(script.failure(), None);
    script
}

#[test]
fn a_server_that_reconnects_receives_what_it_has_missed() {
    let (mut steps, mut tries) = (0, 0);
    while let Some(play) = Play::start(steps) {
        let shards = play.shards(2);
        let complete = shards.last().unwrap().clone();
        for mut shard in shards {
            let mut play = Play::start(steps).unwrap();
            // The story may draw other leases, but draws the same ones every time.
            play.script.lose_link(play.script.links[&2]);
            assert!(play.script.open().disconnects.contains(2));
            returns(&mut play.script, 2, vec![shard.0.clone()], false);
            tell(&play.script, 2, &mut shard, usize::MAX);
            assert_eq!(shard.state(), complete.state(), "after {steps} steps");
            assert_eq!(play.attempt(), shard.0.attempt);
            assert!(play.script.open().disconnects.is_empty());
            tries += 1;
        }
        steps += 1;
    }
    assert!(steps > 15 && tries > 40, "{steps} {tries}");
}

#[test]
fn servers_agree_after_a_restart_whichever_commands_each_of_them_has_received() {
    let (mut steps, mut tries) = (0, 0);
    while let Some(play) = Play::start(steps) {
        for one in play.shards(1) {
            for other in play.shards(2) {
                let script = recover([&one, &other]);
                // The coordinator dies again after any number of commands to a server.
                for limit in 0..=script.commands.len() {
                    let (mut one, mut other) = (one.clone(), other.clone());
                    tell(&script, 1, &mut one, limit);
                    tell(&script, 2, &mut other, script.commands.len() - limit);
                    let script = recover([&one, &other]);
                    tell(&script, 1, &mut one, usize::MAX);
                    tell(&script, 2, &mut other, usize::MAX);
                    assert_eq!(one.state(), other.state(), "after {steps} steps");
                    let open = script.open();
                    assert_eq!(open.attempt(script.epoch()), one.0.attempt);
                    let known = |rank| one.0.ranks.leases.contains_key(&rank);
                    assert!(open.members.ranks().all(known));
                    tries += 1;
                }
            }
        }
        steps += 1;
    }
    assert!(tries > 300, "{tries}");
}

#[test]
fn a_step_is_decided_and_reported_when_the_server_is_back() {
    let (mut script, leases) = Script::training(2, 2);
    let epoch = script.epoch();
    let link = script.links[&2];
    script.ready(1, 0, |_| {});
    let plan = Plan::of(&spec(2), Arc::unwrap_or_clone(script.open().plan.placement.clone()));
    let reduced = script.gradients(2);
    let attempt = script.first_attempt(0);
    script.lose_link(link);
    let callers: Vec<_> = (0..)
        .zip(&leases)
        .map(|(rank, &lease)| script.commit(commit(lease, epoch, rank, 0)))
        .collect();
    script.after(Duration::from_secs(20));
    assert!(callers.iter().all(|&caller| script.answer(caller).is_none()));
    assert_eq!(script.answer(callers[0]), None);
    let ranks = Ranks { leases: (0..).zip(leases).collect(), ..Ranks::default() };
    let report = JobReport {
        id: JOB,
        term: 7,
        spec: Arc::new(spec(2)),
        plan,
        fork: None,
        restore: None,
        line: Arc::default(),
        recent: RecentSteps::default(),
        empty: BTreeSet::new(),
        copies: 0,
        attempt,
        published: true,
        initialised: false,
        ranks,
        rested: None,
        ready: Some(reduced),
        restoring: false,
        restored: None,
        decided: None,
    };
    returns(&mut script, 2, vec![report], false);
    assert_eq!(script.report(callers[0]), script.report(callers[1]));
    // No epoch has begun, and no rank was told anything.
    assert_eq!((script.epoch(), script.version(), script.ended.len()), (epoch, Some(1), 0));
}

#[test]
fn a_server_that_does_not_come_back_fails_the_job() {
    let failure = |away: &dyn Fn(&mut Script)| {
        let (mut script, _) = Script::training(1, 2);
        script.lose_link(script.links[&2]);
        assert_eq!(script.failure(), None);
        away(&mut script);
        script.failure().expect("failed").to_owned()
    };
    let late = failure(&|script| script.after(RECOVERY));
    assert!(late.contains("host:2 was lost (its control stream ended; it did not connect again"));
    let ended = failure(&|script| {
        let server = script.probed.remove(0);
        script.event(Event::Refused(server));
    });
    assert!(ended.contains("its address refuses connections); it held"), "{ended}");
    let restarted = failure(&|script| {
        script.server_as(Server { id: 2, incarnation: 9, address: "host:2".into() });
    });
    assert!(restarted.contains("it was restarted"), "{restarted}");
    let replaced = failure(&|script| {
        script.server_as(Server { id: 5, incarnation: 9, address: "host:2".into() });
    });
    assert!(replaced.contains("host:2") && replaced.contains("with its address"), "{replaced}");
    let dropped = failure(&|script| returns(script, 2, vec![], false));
    assert!(dropped.contains("it has dropped the job"), "{dropped}");
}

#[test]
fn a_job_that_was_deleted_while_its_server_was_away_is_closed_there() {
    let (mut script, _) = Script::training(1, 1);
    let play = Play::start(0).unwrap();
    let report = play.shards(1).remove(0).0;
    script.lose_link(script.links[&1]);
    let deleting = script.delete(JOB);
    assert_eq!(script.answer(deleting), Some(&Ok(Reply::Deleted)));
    returns(&mut script, 1, vec![report], false);
    assert_eq!(script.closed(), [1]);
}
