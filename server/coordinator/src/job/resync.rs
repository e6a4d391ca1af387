//! Commands for a server that has missed some: it has received the first part of the commands about
//! a job, and nothing after that.
//!
//! A server that is told only a part of what it lacks, because the coordinator dies, still has a
//! state that the next coordinator understands: see the order of the commands in `resync`.

use zeroshard_model::Attempt;

use crate::{
    job::Open,
    vocabulary::{commands::Command, decision::Decision, ids::JobRef, job_report::JobReport},
};

/// A job as its coordinator knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known<'a> {
    pub(crate) job: &'a JobRef,
    pub(crate) epoch: u64,
    pub(crate) open: &'a Open,
    /// The decision that has led to the open step.
    pub(crate) decision: Option<&'a Decision>,
}

/// The commands after which a server that describes the job as `held` has the state `known`.
/// `trains`: whether the server has trained slices.
///
/// # Errors
/// A text without the name of the server, if it can never have had this state.
pub(crate) fn resync(
    known: Known<'_>,
    report: &JobReport,
    trains: bool,
) -> Result<Vec<Command>, String> {
    let Known { job, epoch, open, .. } = known;
    let (current, mut commands) = (open.attempt(epoch), Vec::new());
    if open.version.is_published() && !report.published {
        // It drops its uploads with a later epoch.
        commands.push(Command::Publish { job: job.clone(), epoch: report.attempt.epoch });
    }
    let mut attempt = report.attempt;
    if attempt.step != current.step {
        attempt = decide(known, report, trains, &mut commands)?;
    }
    if attempt > current {
        return Err(format!("is at {attempt:?} while the job is at {current:?}; this is a bug"));
    }
    let is_moved = open.plan.placement != report.plan.placement;
    if is_moved {
        let (job, placement) = (job.clone(), open.plan.placement.clone());
        commands.push(Command::NewPlacement { job, epoch, placement });
        attempt = Attempt { epoch, number: 0, ..attempt };
    }
    // A rest that has ended must not be found together with the attempt in which it has ended.
    let ended = report.ranks.resting.keys().filter(|&&rank| !open.uneven_inputs.contains(rank));
    let rests = |rank, begins| Command::RankRests { job: job.clone(), rank, begins };
    commands.extend(ended.map(|&rank| rests(rank, None)));
    if attempt != current {
        let rested = open.uneven_inputs.ended(current).map(|rested| rested.last);
        commands.push(Command::NewAttempt { job: job.clone(), attempt: current, rested });
    }
    ranks(known, report, &mut commands);
    let begins = |rank| rests(rank, open.uneven_inputs.begins(rank));
    let unknown = open.uneven_inputs.ranks().filter(|&rank| {
        let theirs = report.ranks.resting.get(&rank);
        open.uneven_inputs.begins(rank).map(|ours| (ours.since, ours.excluded)).as_ref() != theirs
    });
    commands.extend(unknown.map(begins));
    Ok(commands)
}

/// Adds the decision that the server lacks. Returns the attempt that is then open there.
fn decide(
    known: Known<'_>,
    report: &JobReport,
    trains: bool,
    commands: &mut Vec<Command>,
) -> Result<Attempt, String> {
    let Known { job, open, decision, .. } = known;
    let step = open.step();
    let other =
        || format!("is at {:?} while the job is at step {step}; this is a bug", report.attempt);
    let decision = decision.filter(|d| d.attempt.step == report.attempt.step).ok_or_else(other)?;
    if !trains && report.attempt != decision.attempt {
        // The decision did not wait for it, so it may lack more than the decision.
        let (job, attempt) = (job.clone(), decision.attempt);
        commands.push(Command::NewAttempt { job, attempt, rested: None });
    } else if report.attempt != decision.attempt {
        return Err(other());
    }
    if trains && report.ready.is_none() {
        let step = decision.attempt.step;
        return Err(format!("lacks gradients of step {step} that was decided; this is a bug"));
    }
    commands.push(Command::Decide { job: job.clone(), decision: decision.clone() });
    Ok(Attempt::first(decision.attempt.epoch, step))
}

/// Adds ends of leases, ranks that are done, and leases.
fn ranks(
    Known { job, epoch, open, .. }: Known<'_>,
    report: &JobReport,
    commands: &mut Vec<Command>,
) {
    let theirs = &report.ranks;
    let mut ranks: Vec<u32> = theirs.leases.keys().chain(&theirs.done).copied().collect();
    ranks.extend(
        theirs.left.iter().copied().chain(open.departed.left()).chain(open.departed.done()),
    );
    ranks.extend(open.members.ranks());
    ranks.sort_unstable();
    ranks.dedup();
    for rank in ranks {
        let job = job.clone();
        let lease = open.members.get(rank).map(|member| member.lease);
        let (left, done) = (open.departed.has_left(rank), open.departed.is_done(rank));
        if done && !theirs.done.contains(&rank) {
            commands.push(Command::RankDone { job, rank });
            continue;
        }
        let ends = theirs.leases.contains_key(&rank) && lease.is_none() && !done;
        let returns = theirs.done.contains(&rank) && !done;
        let differs = lease.is_none() && left != theirs.left.contains(&rank);
        if ends || returns || differs {
            commands.push(Command::NewEpoch { job: job.clone(), epoch, rank, left });
        }
        if let Some(lease) = lease.filter(|lease| theirs.leases.get(&rank) != Some(lease)) {
            commands.push(Command::Grant { job, rank, lease });
        }
    }
}
