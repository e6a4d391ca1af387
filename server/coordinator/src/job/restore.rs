//! Jobs that start from a checkpoint, and jobs that return to their last checkpoint because a
//! server was lost that held the only copy of a slice, or a rank before it had sent its data.
//!
//! ```text
//! Open --state is lost--> Waiting --placed--> Opening --all have read their slices--> Open
//! ```
//!
//! So does a job that a new coordinator is learning. The ranks keep their leases meanwhile. Their
//! calls end with an error that makes them call again and, when the job is open, with
//! [`Error::RolledBack`].

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use zeroshard_model::{Error, Restore, RestoreVersion};

use crate::{
    commands::{Checkpoint, Command},
    context::Context,
    events::Action,
    history::Severity,
    ids::{Now, ServerId, Waiter},
    interrupted::{Interrupted, RESTORE_LIMIT},
    job::{Job, Open, Phase},
    learning::RECOVERY,
    members::Cause,
    user_data::UserData,
};

/// The pause after a failed try to restore a job.
pub(crate) const RETRY: Duration = Duration::from_secs(5);

/// Returns whether a job that was created from one checkpoint may be requested with another. The
/// latest checkpoint stands for any, because there may be a later one since.
pub(crate) fn same_checkpoint(created: Option<&Restore>, requested: Option<&Restore>) -> bool {
    match requested {
        Some(Restore { version: RestoreVersion::Latest | RestoreVersion::LatestIfAny, .. }) => true,
        requested => created == requested,
    }
}

impl Job {
    /// A failed job makes way for itself, if its workers create it again from its latest
    /// checkpoint, unless that may be wrong.
    pub(crate) fn make_way_for(&mut self, requested: Option<&Restore>, cx: &mut Context<'_>) {
        let is_latest = requested.is_some_and(|r| !matches!(r.version, RestoreVersion::Exactly(_)));
        if is_latest && matches!(self.phase, Phase::Failed { is_damaged: false, .. }) {
            self.remove("it is created again from a checkpoint", cx);
        }
    }

    /// Returns an open job to its last checkpoint, if its policy asks for it. `gone` describes the
    /// loss.
    pub(crate) fn interrupt(&mut self, gone: &str, cx: &mut Context<'_>) -> bool {
        let job = self.reference();
        let Self { name, spec, epoch, progress, phase, .. } = self;
        let attempt = match phase {
            Phase::Open(open) => Some(open.attempt(*epoch)),
            _ => None,
        };
        let policy = spec.checkpoints.as_ref().filter(|_| spec.is_restored_on_loss());
        let Some(policy) = policy else { return false };
        let checkpoint = Arc::new(Restore {
            url: policy.url.clone(),
            job: spec.name.clone(),
            version: RestoreVersion::Latest,
        });
        let mut creators = Vec::new();
        let mut known = *epoch;
        let (interrupted, waiters) = match phase {
            Phase::Open(open) if open.version.is_some() => {
                let (interrupted, waiters) = open.interrupt(checkpoint, cx.now + RESTORE_LIMIT);
                (Box::new(interrupted), waiters)
            }
            Phase::Opening { plan, creators: waiting, interrupted, .. } => {
                let Some(mut interrupted) = interrupted.take() else { return false };
                creators.append(waiting);
                interrupted.holders.extend(plan.placement.servers().iter().map(|of| of.id));
                (interrupted, Vec::new())
            }
            Phase::Recovering(recovery) => {
                let Some((attempt, ranks)) = recovery.published() else { return false };
                known = attempt.epoch;
                let ranks = (ranks, attempt.step);
                let placed = recovery.plan.placement.servers();
                let holders = placed.iter().map(|of| of.id).chain(recovery.held.keys().copied());
                let (holders, servers) = (holders.collect(), placed.len());
                let interrupted =
                    Interrupted::detached(checkpoint, ranks, holders, servers, cx.now);
                (Box::new(interrupted), Vec::new())
            }
            _ => return false,
        };
        *phase = Phase::Waiting { creators, placing: false, interrupted: Some(interrupted) };
        let cause = format!("it returns to its last checkpoint, because {gone}");
        progress.disturbed(Error::Unavailable { peer: format!("job {name:?}"), cause });
        cx.refuse(waiters, &being_restored(name));
        cx.push(Action::Aborted { job: job.name.clone() });
        if let Some(attempt) = attempt {
            cx.push(Action::Interrupted { job, attempt, began: progress.since() });
        }
        let text = format!("{gone}; job {name:?} is restored from its last checkpoint");
        cx.alarm(Severity::Warning, text);
        cx.push(Action::Tick(cx.now + RESTORE_LIMIT));
        cx.common.epochs.skip(known);
        self.try_place(cx);
        true
    }

    /// Returns a job to its last checkpoint, or fails it if its policy does not ask for that.
    pub(crate) fn interrupt_or_fail(&mut self, reason: &str, cx: &mut Context<'_>) {
        if !self.interrupt(reason, cx) {
            self.fail(reason, cx);
        }
    }

    /// A try to restore an interrupted job has failed. Another one follows.
    pub(crate) fn restore_again(&mut self, failure: &str, cx: &mut Context<'_>) {
        let (Phase::Waiting { interrupted, .. } | Phase::Opening { interrupted, .. }) =
            &mut self.phase
        else {
            return;
        };
        let Some(interrupted) = interrupted else { return };
        interrupted.retry = Some((cx.now + RETRY, failure.to_owned()));
        cx.push(Action::Tick(cx.now + RETRY));
        let name = &self.name;
        let again = format!("job {name:?} could not be restored: {failure}; again in {RETRY:?}");
        match &self.phase {
            Phase::Opening { .. } => _ = self.interrupt(&again, cx),
            _ => cx.alarm(Severity::Warning, again),
        }
    }

    /// The lease of a rank of a job that has just been interrupted ends.
    pub(crate) fn end_interrupted(&mut self, rank: u32, cause: Cause) {
        if let Phase::Waiting { interrupted: Some(interrupted), .. } = &mut self.phase
            && let Some(lease) = interrupted.members.get(rank).map(|member| member.lease)
        {
            interrupted.lose(rank, lease, cause);
        }
    }

    /// The servers of a restored job have read their slices: its ranks continue.
    pub(crate) fn resume(&mut self, interrupted: Interrupted, cx: &mut Context<'_>) {
        let close = Command::Close(self.reference());
        let Self { name, epoch, phase: Phase::Open(open), .. } = self else { return };
        let Interrupted { mut members, queue, left, done, peers, lost, holders, .. } = interrupted;
        members.wait_for_streams_until(cx.now + RECOVERY);
        cx.out.push(Action::Tick(cx.now + RECOVERY));
        let cause = |rank| if left.contains(&rank) { Cause::Left } else { Cause::Lost };
        let lost: Vec<_> = lost.into_iter().map(|rank| (rank, cause(rank))).collect();
        (open.members, open.queue, open.left, open.done) = (members, queue, left, done);
        open.peers = peers;
        open.rolled_back = Some((*epoch, open.step()));
        // Commands to servers that are lost are dropped.
        let placed: BTreeSet<ServerId> = open.servers().collect();
        for &server in holders.difference(&placed) {
            cx.command(server, close.clone());
        }
        cx.note(format!("job {name:?} continues from version {}, epoch {epoch}", open.step()));
        open.wake_all(cx.out);
        for (rank, cause) in lost {
            self.new_epoch(rank, cause, cx);
            self.admit_next(rank, cx);
        }
        // Those before them in the queue were joining when the job was interrupted.
        let Phase::Open(open) = &self.phase else { return };
        let free = open.queue.ranks().filter(|&rank| open.members.get(rank).is_none());
        for rank in free.collect::<Vec<u32>>() {
            self.admit_next(rank, cx);
        }
    }

    /// The placement of a job or its checkpoint has not been found: creators receive `error`. A job
    /// that was open is tried again if the cause may pass; otherwise it fails.
    pub(crate) fn cannot_open(&mut self, error: &Error, cx: &mut Context<'_>) {
        match (&self.phase, error) {
            (
                Phase::Waiting { interrupted: Some(_), .. },
                Error::Storage { .. } | Error::Unavailable { .. } | Error::Timeout { .. },
            ) => self.restore_again(&error.to_string(), cx),
            (Phase::Waiting { interrupted: Some(_), .. }, _) => {
                self.fail(&format!("it cannot be restored: {error}"), cx);
            }
            _ => self.abandon(error, cx),
        }
    }

    /// Answers joins at their deadline, begins the next try, and fails a job that could not be
    /// restored in time.
    pub(crate) fn expire_interrupted(&mut self, cx: &mut Context<'_>) {
        let (Phase::Waiting { interrupted: Some(interrupted), .. }
        | Phase::Opening { interrupted: Some(interrupted), .. }) = &mut self.phase
        else {
            return;
        };
        let expired = interrupted.queue.expire(cx.now).into_iter().map(|(waiter, _)| waiter);
        cx.refuse(expired, &being_restored(&self.name));
        if interrupted.deadline <= cx.now {
            let waits_for = self.creators_wait_for(cx.common);
            let reason = format!(
                "it could not be restored within {RESTORE_LIMIT:?}; it has waited for {waits_for}"
            );
            return self.fail(&reason, cx);
        }
        interrupted.retry.take_if(|(at, _)| *at <= cx.now);
        self.try_place(cx);
    }
}

impl Open {
    /// The job is at the version of a checkpoint, with all of its parameters.
    pub(crate) fn restored(&mut self, checkpoint: Checkpoint, user_data: UserData) {
        self.version = Some(checkpoint.version);
        self.saves.user_data = user_data;
        self.saves.origin = Some(checkpoint);
        self.uninitialised.clear();
    }

    /// Takes the ranks out of a job, and the calls that wait.
    fn interrupt(&mut self, checkpoint: Arc<Restore>, deadline: Now) -> (Interrupted, Vec<Waiter>) {
        let mut waiters = self.round.drop_all();
        waiters.extend(self.last.take().into_iter().flat_map(|last| last.waiters));
        waiters.extend(self.resting.end().1);
        waiters.extend(std::mem::take(&mut self.saves).into_waiters());
        let (holders, servers) = (self.servers().collect(), self.placement.servers().len());
        let mut members = std::mem::take(&mut self.members);
        // The servers receive the leases when they open the job again.
        waiters.extend(members.give_up_joining());
        let interrupted = Interrupted {
            checkpoint,
            members,
            queue: std::mem::take(&mut self.queue),
            left: std::mem::take(&mut self.left),
            done: std::mem::take(&mut self.done),
            peers: std::mem::take(&mut self.peers),
            lost: Vec::new(),
            holders,
            servers,
            settles_until: None,
            retry: None,
            deadline,
        };
        (interrupted, waiters)
    }
}

/// The error for calls about a job that is being restored; they are repeated.
fn being_restored(job: &str) -> Error {
    Error::Unavailable {
        peer: format!("job {job:?}"),
        cause: "it is being restored from its last checkpoint".to_owned(),
    }
}
