//! The barrier at the end of a step, and the decision.
//!
//! A step is decided when every rank has committed it and every server with slices that train has said that
//! it has all the gradients. Votes and reports belong to one (epoch, step): the round is dropped when either
//! changes.

use std::collections::BTreeMap;

use zeroshard_proto::{
    Error, JobSpec, Optimizer, Result,
    pb::{self, server_command::Command},
};

use super::{
    cluster::Cluster,
    reduce::{Gradient, Reducer},
    state::{Action, Caller, Commit, Job, Lease, Now, Open, Phase, Reply, ServerId, Waiter},
};
use crate::listing::some_of;

/// What every rank must say the same about a step.
#[derive(Debug, Clone, PartialEq)]
struct Terms {
    groups: Vec<Optimizer>,
    loss_scale: f64,
    max_norm: Option<f64>,
    discard: bool,
}

impl Terms {
    /// The first thing about which `other` differs.
    fn difference(&self, other: &Self) -> Option<String> {
        if self == other {
            return None;
        }
        let names = ["loss_scale", "max_norm", "discard"];
        let equal = [
            self.loss_scale == other.loss_scale,
            self.max_norm == other.max_norm,
            self.discard == other.discard,
        ];
        let plain = names.into_iter().zip(equal).find(|(_, equal)| !equal).map(|(name, _)| name.to_owned());
        plain.or_else(|| {
            let groups = self.groups.iter().zip(&other.groups).enumerate();
            groups.into_iter().find_map(|(index, (ours, theirs))| {
                let [ours, theirs] = [ours, theirs].map(|o| pb::Optimizer::from(o).hyperparameters);
                let names: std::collections::BTreeSet<&String> = ours.keys().collect();
                let name = names.into_iter().find(|&name| ours.get(name) != theirs.get(name))?;
                Some(format!("{name} of parameter group {index}"))
            })
        })
    }
}

/// Who speaks, and of which job and membership.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn<'a> {
    pub(super) job: &'a str,
    pub(super) lease: Lease,
    pub(super) epoch: u64,
    pub(super) rank: u32,
}

#[derive(Debug)]
struct Vote {
    terms: Terms,
    loss: Option<f64>,
    /// More than one when the rank has asked again.
    waiters: Vec<Waiter>,
}

/// What is known about the open step.
#[derive(Debug, Default)]
pub(crate) struct Round {
    votes: BTreeMap<u32, Vote>,
    /// Of each server: for each of its slices that train, the sum of squares of the summed gradient.
    pub(super) reports: BTreeMap<ServerId, pb::StepReady>,
    /// Who waits for the gradient's norm.
    pub(super) reducers: Vec<Reducer>,
    first_vote: Now,
    last_vote: Now,
}

impl Round {
    pub(crate) fn is_empty(&self) -> bool {
        self.votes.is_empty() && self.reports.is_empty() && self.reducers.is_empty()
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        let voters = self.votes.values().flat_map(|vote| &vote.waiters);
        let waiters = voters.chain(self.reducers.iter().map(|reducer| &reducer.waiter));
        waiters.map(|waiter| waiter.deadline).min()
    }

    /// Forgets everything; who waits must be told.
    pub(crate) fn drop_all(&mut self) -> Vec<Waiter> {
        let Self { votes, reducers, .. } = std::mem::take(self);
        let reducers = reducers.into_iter().map(|reducer| reducer.waiter);
        votes.into_values().flat_map(|vote| vote.waiters).chain(reducers).collect()
    }

    /// Counts a rank once, however often it commits.
    fn vote(&mut self, waiter: Waiter, commit: &Commit, terms: Terms) -> Result<()> {
        // All votes have the same terms.
        let first = self.votes.values().next();
        if let Some(what) = first.and_then(|vote| vote.terms.difference(&terms)) {
            let Commit { job, step, rank, .. } = commit.clone();
            return Err(Error::Disagreement { job, step, rank, what });
        }
        if self.votes.is_empty() {
            self.first_vote = waiter.since;
        }
        let vote = self.votes.entry(commit.rank).or_insert_with(|| {
            self.last_vote = waiter.since;
            Vote { terms, loss: commit.loss, waiters: Vec::new() }
        });
        vote.waiters.push(waiter);
        Ok(())
    }

    fn expire(&mut self, now: Now) -> Vec<Waiter> {
        let mut expired = Vec::new();
        for vote in self.votes.values_mut() {
            // The vote stays: the gradients are pushed, and the rank may ask again.
            expired.extend(vote.waiters.extract_if(.., |waiter| waiter.deadline <= now));
        }
        expired
    }

    /// Mean over the ranks, in rank order.
    fn loss(&self, world: u32) -> Option<f64> {
        let sum: Option<f64> = self.votes.values().map(|vote| vote.loss).sum();
        sum.map(|sum| sum / f64::from(world))
    }
}

/// The decision about a step: what the servers are told to do, and what the ranks are told.
fn decide(job: &str, spec: &JobSpec, epoch: u64, step: u64, round: &Round) -> (pb::Decision, pb::StepReport) {
    let terms = round.votes.values().next().map(|vote| &vote.terms).expect("a job has at least one rank");
    let gradient = Gradient::new(spec, &round.reports);
    let finite = gradient.overflow.is_none();
    // All groups are of one kind.
    let apply = !terms.discard && (finite || !terms.groups.iter().all(Optimizer::skips_overflow));
    let norm = gradient.norm(terms.loss_scale);
    let clip = match terms.max_norm {
        Some(max) if apply && finite => max / norm.max(max),
        _ => 1.0,
    };
    let decision = pb::Decision {
        job: job.to_owned(),
        epoch,
        step,
        apply,
        coefficient: if apply { clip / terms.loss_scale } else { 0.0 },
        groups: terms.groups.iter().map(Into::into).collect(),
        unclipped: if apply { 1.0 / terms.loss_scale } else { 0.0 },
        job_id: 0,
        attempt: 0,
    };
    let report = pb::StepReport {
        version: step + 1,
        applied: apply,
        gradient_norm: norm,
        clip_coefficient: clip,
        overflow: gradient.overflow,
        loss: round.loss(spec.world),
        world: spec.world,
        absent: gradient.absent,
    };
    (decision, report)
}

impl Cluster {
    pub(super) fn commit(&mut self, caller: Caller, commit: Commit, now: Now, out: &mut Vec<Action>) {
        match self.try_commit(caller, &commit, now) {
            Ok(None) => self.decide(&commit.job, now, out),
            Ok(Some(report)) => out.push(Action::Answer(caller, Ok(Reply::Report(report)))),
            Err(error) => out.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Counts the commit; or the report, if the step is over and it was asked again.
    fn try_commit(&mut self, caller: Caller, commit: &Commit, now: Now) -> Result<Option<pb::StepReport>> {
        let name = &commit.job;
        let &Commit { lease, epoch, rank, step, .. } = commit;
        let (spec, open) = self.member(&Turn { job: name, lease, epoch, rank })?;
        if let Some(last) = open.report_of(step) {
            return Ok(Some(last.clone()));
        }
        open.check_step(name, step)?;
        let terms = Terms {
            groups: commit.groups.clone().unwrap_or_else(|| spec.groups.clone()),
            loss_scale: commit.loss_scale,
            max_norm: commit.max_norm,
            discard: commit.discard,
        };
        spec.validate_step(&terms.groups)?;
        open.round.vote(Waiter::new(caller, now, commit.wait), commit, terms)?;
        Ok(None)
    }

    /// The job that a rank speaks of, if the rank may.
    pub(super) fn member(&mut self, turn: &Turn<'_>) -> Result<(&JobSpec, &mut Open)> {
        let &Turn { job: name, lease, epoch, rank } = turn;
        let Job { spec, epoch: current, phase } = self.job_mut(name)?;
        let Phase::Open(open) = phase else { return Err(phase.not_open(name)) };
        if rank >= spec.world {
            let expected = format!("less than the world, {}", spec.world);
            return Err(Error::invalid(format!("rank of job {name:?}"), rank, expected));
        }
        if open.members.get(&rank).is_none_or(|member| member.lease != lease) {
            return Err(Error::LeaseLost { job: name.to_owned(), rank });
        }
        if epoch != *current {
            return Err(Error::StaleEpoch { job: name.to_owned(), epoch, current: *current });
        }
        Ok((spec, open))
    }

    pub(super) fn ready(&mut self, server: ServerId, report: pb::StepReady, now: Now, out: &mut Vec<Action>) {
        let name = report.job.clone();
        let Some(Job { epoch, phase: Phase::Open(open), .. }) = self.jobs.get_mut(&name) else { return };
        if report.epoch != *epoch || report.step != open.step() {
            return;
        }
        if let Err(what) = check_report(&report, open.trainable.get(&server)) {
            let step = report.step;
            let reason = format!("{} reported {what} at step {step}; this is a bug", self.name(server));
            return self.fail(&name, &reason, out);
        }
        // Of a server without slices that train nothing is expected.
        if open.trainable.contains_key(&server) {
            open.round.reports.insert(server, report);
        }
        self.decide(&name, now, out);
    }

    /// Decides the open step of `name` if nobody is missing.
    pub(super) fn decide(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        self.answer_reducers(name, out);
        let Some(Job { spec, epoch, phase: Phase::Open(open) }) = self.jobs.get_mut(name) else { return };
        let round = &open.round;
        if round.votes.len() != spec.world as usize || !open.is_reduced() {
            return;
        }
        let (decision, report) = decide(name, spec, *epoch, open.step(), round);
        for server in open.placement.servers() {
            out.push(Action::Command(server.id, Command::Decide(decision.clone())));
        }
        out.push(Action::Decided {
            applied: report.applied,
            commit_spread: round.last_vote - round.first_vote,
            ready_wait: now.saturating_sub(round.last_vote),
        });
        if let Some(overflow) = report.overflow.filter(|_| !report.applied) {
            out.push(Action::Note(skipped(name, spec, decision.step, overflow)));
        }
        for waiter in open.round.drop_all() {
            out.push(Action::Answer(waiter.caller, Ok(Reply::Report(report.clone()))));
        }
        open.version = Some(report.version);
        open.last = Some(Box::new(report));
    }

    pub(super) fn expire_commits(&mut self, now: Now, out: &mut Vec<Action>) {
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(&name) else { continue };
            let expired = open.round.expire(now);
            if expired.is_empty() {
                continue;
            }
            let waiting_for = self.commits_wait_for(&name);
            let timeout = |w: Waiter| Action::Answer(w.caller, Err(w.timeout(now, waiting_for.clone())));
            out.extend(expired.into_iter().map(timeout));
        }
    }

    /// Who is missing: ranks, and servers with what they wait for themselves.
    fn commits_wait_for(&self, name: &str) -> String {
        let Some(Job { spec, epoch, phase: Phase::Open(open) }) = self.jobs.get(name) else {
            return String::new();
        };
        let missing = (0..spec.world).filter(|rank| !open.round.votes.contains_key(rank));
        let (here, absent): (Vec<u32>, Vec<u32>) = missing.partition(|rank| open.members.contains_key(rank));
        let mut parts = Vec::new();
        let ranks = |ranks: Vec<u32>, what: &str| {
            format!("{what} ({})", some_of(ranks.into_iter().map(|rank| spec.describe_rank(rank))))
        };
        if !here.is_empty() {
            parts.push(ranks(here, "ranks that have not committed"));
        }
        if !absent.is_empty() {
            parts.push(ranks(absent, "ranks without a worker"));
        }
        parts.extend(self.late_servers(name, open));
        format!("step {} of job {name:?} (epoch {epoch}): {}", open.step(), some_of(parts))
    }
}

/// Whether a server reports about exactly its slices that train.
fn check_report(report: &pb::StepReady, expected: Option<&Vec<u32>>) -> Result<(), String> {
    let expected = expected.map_or(&[][..], Vec::as_slice);
    if report.slices != expected {
        return Err(format!("{} slices, and has {} that train", report.slices.len(), expected.len()));
    }
    if report.sums_of_squares.len() != report.slices.len() {
        return Err(format!("{} sums for {} slices", report.sums_of_squares.len(), report.slices.len()));
    }
    if let Some(absent) = report.absent.iter().find(|absent| !expected.contains(&absent.slice)) {
        return Err(format!("absence of slice {}, which is not its own", absent.slice));
    }
    match report.overflow {
        Some(overflow) if !expected.contains(&overflow.slice) => {
            Err(format!("an overflow in slice {}, which is not its own", overflow.slice))
        }
        _ => Ok(()),
    }
}

fn skipped(name: &str, spec: &JobSpec, step: u64, overflow: pb::Overflow) -> String {
    let tensor = &spec.manifest.tensor_of(overflow.slice as usize).name;
    let by = overflow.rank.map_or("the sum over the ranks".to_owned(), |rank| spec.describe_rank(rank));
    format!("step {step} of job {name:?} is skipped: inf or NaN in tensor {tensor:?}, from {by}")
}
