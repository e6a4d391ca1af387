//! Jobs that start from a checkpoint, and jobs that return to one. A job returns to its last
//! checkpoint when it loses the server with the only copy of a slice, or a rank that has not sent
//! its data yet. It returns to any checkpoint when somebody rewinds it (`rewind`).
//!
//! ```text
//! Open --state is lost--> Waiting --placed--> Opening --all have read their slices--> Open
//! ```
//!
//! So does a job that a new coordinator is learning. The ranks keep their leases meanwhile. Their
//! calls end with an error that makes them call again and, when the job is open, with
//! [`Error::RolledBack`].

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use zeroshard_model::{Attempt, Error, LineVersion, Restore, RestoreVersion};

use crate::{
    cluster::{context::Context, startup::RECOVERY},
    job::{Job, Open, Phase},
    operators::history::Severity,
    state::{
        interrupted::{Interrupted, RESTORE_LIMIT, Returning},
        members::Cause,
        user_data::UserData,
    },
    vocabulary::{
        calls::Reply,
        commands::{Checkpoint, Command},
        events::Action,
        ids::{Now, ServerId, Waiter},
    },
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
        let Self { name, spec, epoch, progress, phase, .. } = self;
        let attempt = match phase {
            Phase::Open(open) => Some(open.attempt(*epoch)),
            _ => None,
        };
        let policy = spec.checkpoints.as_ref().filter(|_| spec.is_restored_on_loss());
        let last = policy.map(|policy| {
            Arc::new(Restore {
                url: policy.url.clone(),
                job: spec.name.clone(),
                version: RestoreVersion::Latest,
                line: None,
            })
        });
        let mut creators = Vec::new();
        let mut known = *epoch;
        let (interrupted, waiters) = match phase {
            Phase::Open(open) if open.version.is_published() => {
                let Some(checkpoint) = last else { return false };
                let (interrupted, waiters) = open.interrupt(checkpoint, cx.now);
                (Box::new(interrupted), waiters)
            }
            // It is already returning to a checkpoint.
            Phase::Opening { plan, creators: waiting, interrupted, .. } => {
                let Some(mut interrupted) = interrupted.take() else { return false };
                creators.append(waiting);
                interrupted.held_by(plan.placement.servers().iter().map(|of| of.id));
                (interrupted, Vec::new())
            }
            Phase::Recovering(recovery) => {
                let Some(checkpoint) = last else { return false };
                let Some((attempt, ranks)) = recovery.published() else { return false };
                known = attempt.epoch;
                let ranks = (ranks, attempt.step);
                let placed = recovery.plan().placement.servers();
                let holders =
                    placed.iter().map(|of| of.id).chain(recovery.reports().keys().copied());
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
        let text = format!("{gone}; job {name:?} is restored from its last checkpoint");
        cx.alarm(Severity::Warning, text);
        self.interrupted((attempt, known), cx);
        true
    }

    /// Places an interrupted job again. `attempt`: the one that was open, and the latest known
    /// epoch.
    pub(crate) fn interrupted(
        &mut self,
        (attempt, known): (Option<Attempt>, u64),
        cx: &mut Context<'_>,
    ) {
        let job = self.reference();
        cx.push(Action::Aborted { job: job.name.clone() });
        if let Some(attempt) = attempt {
            cx.push(Action::Interrupted { job, attempt, began: self.progress.since() });
        }
        cx.push(Action::Tick(cx.now + RESTORE_LIMIT));
        cx.common.epochs.skip(known);
        self.try_place(cx);
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
        interrupted.failed(cx.now + RETRY, failure);
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
            && let Some(lease) = interrupted.lease_of(rank)
        {
            interrupted.lose(rank, lease, cause);
        }
    }

    /// The servers of a restored job have read their slices: its ranks continue.
    pub(crate) fn resume(&mut self, mut interrupted: Interrupted, cx: &mut Context<'_>) {
        for caller in interrupted.take_callers() {
            cx.answer(caller, Ok(Reply::Rewound { line: self.line.number }));
        }
        let close = Command::Close(self.reference());
        let Self { name, epoch, line, phase: Phase::Open(open), .. } = self else { return };
        let (returning, lost, holders) = interrupted.end();
        let Returning { mut members, queue, departed, peers } = returning;
        members.wait_for_streams_until(cx.now + RECOVERY);
        cx.out.push(Action::Tick(cx.now + RECOVERY));
        (open.members, open.queue, open.departed, open.peers) = (members, queue, departed, peers);
        open.version.roll_back(*epoch);
        // Commands to servers that are lost are dropped.
        let placed: BTreeSet<ServerId> = open.servers().collect();
        for &server in holders.difference(&placed) {
            cx.command(server, close.clone());
        }
        let version = LineVersion { version: open.step(), line: line.number };
        cx.note(format!("job {name:?} continues from version {version}, epoch {epoch}"));
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
        cx.refuse(interrupted.expire_joins(cx.now), &being_restored(&self.name));
        cx.time_out(interrupted.expire_callers(cx.now), |_| {
            format!("job {:?} to return to a checkpoint", self.name)
        });
        if interrupted.is_late(cx.now) {
            let waits_for = self.creators_wait_for(cx.common);
            let reason = format!(
                "it could not be restored within {RESTORE_LIMIT:?}; it has waited for {waits_for}"
            );
            return self.fail(&reason, cx);
        }
        interrupted.end_pause(cx.now);
        self.try_place(cx);
    }
}

impl Open {
    /// The job is at the version of a checkpoint, with all of its parameters.
    pub(crate) fn restored(&mut self, checkpoint: Checkpoint, user_data: UserData) {
        self.version.restored(checkpoint.version.version);
        self.saves.restored(checkpoint, user_data);
    }

    /// Takes the ranks out of a job, and the calls that wait.
    pub(crate) fn interrupt(
        &mut self,
        checkpoint: Arc<Restore>,
        now: Now,
    ) -> (Interrupted, Vec<Waiter>) {
        let mut waiters = self.drop_calls();
        let mut members = std::mem::take(&mut self.members);
        // The servers receive the leases when they open the job again.
        waiters.extend(members.give_up_joining());
        let returning = Returning {
            members,
            queue: std::mem::take(&mut self.queue),
            departed: std::mem::take(&mut self.departed),
            peers: std::mem::take(&mut self.peers),
        };
        (Interrupted::new(checkpoint, returning, self.servers().collect(), now), waiters)
    }
}

/// The error for calls about a job that is being restored; they are repeated.
pub(crate) fn being_restored(job: &str) -> Error {
    Error::Unavailable {
        peer: format!("job {job:?}"),
        cause: "it is being restored from a checkpoint".to_owned(),
    }
}
