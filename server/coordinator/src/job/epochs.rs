//! Epochs of a job: a new one begins when the set of its ranks or servers changes.
//!
//! The open attempt ends with its epoch, because the servers may have a part of the gradients of a
//! rank or a slice that is not part of the next one.

use zeroshard_model::Error;

use crate::{
    cluster::context::Context,
    job::{Job, Open, Phase},
    operators::history::Severity,
    state::members::Cause,
    vocabulary::{commands::Command, events::Action},
};

impl Job {
    /// Drops the gradients of the open step on the servers, because they may contain a part of the
    /// rank's gradients.
    pub(crate) fn new_epoch(&mut self, rank: u32, cause: Cause, cx: &mut Context<'_>) {
        let (name, job) = (self.name.clone(), self.reference());
        let left = matches!(cause, Cause::Left);
        let announce = |open: &mut Open, epoch, out: &mut Vec<Action>| {
            open.send(&Command::NewEpoch { job, epoch, rank, left }, out);
        };
        let error = |step, epoch| {
            let job = name.to_string();
            let cause = match cause {
                Cause::Left => return Error::RankLeft { job, rank, step },
                Cause::Lost => format!("rank {rank} was lost"),
                Cause::Evicted => format!("rank {rank} was evicted by an operator"),
                Cause::Unreachable => format!("rank {rank} cannot reach its shard servers"),
                Cause::Done => format!("rank {rank} left before version 0"),
                Cause::Returned => format!("rank {rank} joined again"),
                Cause::Recovered => "the coordinator was restarted".to_owned(),
            };
            Error::StepAborted { job, step, epoch, cause }
        };
        self.enter_epoch(announce, error, cx);
        if matches!(cause, Cause::Lost) {
            cx.alarm(Severity::Warning, format!("rank {rank} of job {name:?} was lost"));
        }
    }

    /// Begins an epoch: the open attempt and all rests end. `announce` tells the servers. `error`
    /// is the one for waiting calls, of a step in the epoch.
    pub(crate) fn enter_epoch(
        &mut self,
        announce: impl FnOnce(&mut Open, u64, &mut Vec<Action>),
        error: impl Fn(u64, u64) -> Error,
        cx: &mut Context<'_>,
    ) {
        let job = self.reference();
        let new = cx.common.epochs.next();
        let Self { epoch, progress, phase: Phase::Open(open), .. } = self else { return };
        let (attempt, began) = (open.attempt(*epoch), progress.since());
        *epoch = new;
        let ended = error(open.step(), new);
        // At the end of training, ranks leave in order, and none has committed the open step.
        let is_interrupted = open.version.is_published()
            && !(open.round.is_empty() && matches!(ended, Error::RankLeft { .. }));
        progress.disturbed(ended.clone());
        open.version.upload_again(open.servers().collect());
        // The servers come first: when a worker learns of the epoch, the command to the servers has
        // been sent.
        let (rested, mut waiters) = open.uneven_inputs.end();
        for rank in rested {
            open.send(&Command::RankRests { job: job.clone(), rank, begins: None }, cx.out);
        }
        announce(open, new, cx.out);
        // Ranks compute and push before the first of them commits.
        if !open.round.is_empty() || is_interrupted && !open.members.is_empty() {
            cx.push(Action::Aborted { job: job.name.clone() });
        }
        if is_interrupted {
            cx.push(Action::Interrupted { job, attempt, began });
        }
        waiters.extend(open.round.drop_all());
        cx.refuse(waiters, &ended);
        open.wake_all(cx.out);
    }

    /// Begins an epoch between two steps: no rank has begun the open step, and none rests, so
    /// nothing ends. `announce` tells the servers.
    pub(crate) fn enter_epoch_between_steps(
        &mut self,
        announce: impl FnOnce(&mut Open, u64, &mut Vec<Action>),
        cx: &mut Context<'_>,
    ) {
        let new = cx.common.epochs.next();
        let Self { epoch, phase: Phase::Open(open), .. } = self else { return };
        *epoch = new;
        announce(open, new, cx.out);
        open.wake_all(cx.out);
    }
}
