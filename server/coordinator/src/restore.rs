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

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use zeroshard_model::{Error, Restore, RestoreVersion};

use super::{
    context::Context,
    epochs::Cause,
    events::{Action, Checkpoint, Command, Lease, Now, ServerId, Waiter},
    feed::Peers,
    held::Ranks,
    history::Severity,
    learning::RECOVERY,
    members::{Member, Members, Queue},
    state::{Job, Open, Phase},
    user_data::UserData,
};

/// How long an interrupted job waits for servers and for its slices.
pub const RESTORE_LIMIT: Duration = Duration::from_secs(3600);

/// How long an interrupted job waits for as many servers as it has had. Then it continues with the
/// connected ones, and slices stay where they are placed.
pub const SERVERS_LIMIT: Duration = Duration::from_secs(10);

/// The pause after a failed try to restore a job.
pub const RETRY: Duration = Duration::from_secs(5);

/// The ranks of a job that was open and is being restored.
#[derive(Debug)]
pub struct Interrupted {
    /// The last checkpoint of the job.
    pub(super) checkpoint: Arc<Restore>,
    pub(super) members: Members,
    queue: Queue,
    left: BTreeSet<u32>,
    /// As in [`Open`].
    done: BTreeMap<u32, u64>,
    peers: Peers,
    /// Ranks whose lease has ended since. Those that have left in order are also in `left`.
    lost: Vec<u32>,
    /// The servers that may still hold the job as it was. They keep it until they open it again, or
    /// until all others have, because a new coordinator learns of the job from them.
    holders: BTreeSet<ServerId>,
    /// The number of servers that the job has had.
    servers: usize,
    /// Until when it waits for as many servers; `None` if there are too few for its replicas.
    settles_until: Option<Now>,
    /// After a failed try: the time of the next one, and why it has failed.
    retry: Option<(Now, String)>,
    deadline: Now,
}

impl Interrupted {
    /// The ranks of a job that a new coordinator has learned. They have no streams yet.
    fn detached(
        checkpoint: Arc<Restore>,
        (ranks, version): (Ranks, u64),
        holders: BTreeSet<ServerId>,
        servers: usize,
        now: Now,
    ) -> Self {
        let Ranks { leases, done, left, .. } = ranks;
        // They may have been done at an earlier version.
        let done = done.into_iter().map(|rank| (rank, version)).collect();
        let mut members = Members::default();
        for (rank, lease) in leases {
            members.insert(rank, Member::detached(lease, now + RECOVERY));
        }
        Self {
            checkpoint,
            members,
            queue: Queue::default(),
            left,
            done,
            peers: Peers::default(),
            lost: Vec::new(),
            holders,
            servers,
            settles_until: None,
            retry: None,
            deadline: now + RESTORE_LIMIT,
        }
    }

    /// The version of the checkpoint is known. Ranks that had data at this version are not done any
    /// more: the job waits for workers.
    pub(super) fn return_to(&mut self, version: u64) {
        self.done.retain(|_, since| *since <= version);
    }

    /// Returns whether the job may be placed on the `connected` servers. It needs one for each of
    /// its
    /// `replicas`, and waits for a while for as many as it has had.
    pub(super) fn may_be_placed(
        &mut self,
        connected: usize,
        replicas: usize,
        now: Now,
        out: &mut Vec<Action>,
    ) -> bool {
        if self.retry.is_some() || connected < replicas.max(1) {
            self.settles_until = None;
            return false;
        }
        let settles_until = *self.settles_until.get_or_insert(now + SERVERS_LIMIT);
        let may_be_placed = connected >= self.servers || settles_until <= now;
        if may_be_placed {
            self.settles_until = None;
        } else {
            out.push(Action::Tick(settles_until));
        }
        may_be_placed
    }

    /// Describes what the job waits for before it is placed, for messages.
    pub(super) fn waits_for(&self, connected: usize, replicas: u32) -> String {
        match (&self.retry, self.settles_until) {
            (Some((_, failure)), _) => {
                format!("another try, because the last one failed: {failure}")
            }
            (_, Some(_)) => format!("shard servers: {connected} of {} are connected", self.servers),
            (_, None) => format!("shard servers: {connected} of {replicas} are connected"),
        }
    }

    /// The leases of the ranks, the ranks that have no more data, and those that have left, for the
    /// servers.
    pub(super) fn ranks(&self) -> (Vec<(u32, Lease)>, Vec<u32>, Vec<u32>) {
        let lease = |rank| Some((rank, self.members.get(rank)?.lease));
        let leases = self.members.ranks().filter_map(lease).collect();
        (leases, self.done.keys().copied().collect(), self.left.iter().copied().collect())
    }

    /// A server may still hold the job as it was.
    pub(super) fn holds(&mut self, server: ServerId) {
        self.holders.insert(server);
    }

    pub(super) fn holders(&self) -> impl Iterator<Item = ServerId> {
        self.holders.iter().copied()
    }

    /// The lease of a rank has ended. A rank that has no more data counts as lost: the steps since
    /// the checkpoint need its gradients again.
    pub(super) fn lose(&mut self, rank: u32, lease: Lease, cause: Cause) {
        if self.members.rank_of(lease) != Some(rank) {
            return self.queue.remove(rank, lease);
        }
        self.members.remove(rank);
        self.peers.set(rank, None);
        if matches!(cause, Cause::Left) {
            self.left.insert(rank);
        }
        self.lost.push(rank);
    }

    pub(super) fn next_deadline(&self) -> Option<Now> {
        let retry_at = self.retry.as_ref().map(|(at, _)| *at);
        let times = [self.queue.next_deadline(), self.settles_until, retry_at];
        times.into_iter().flatten().chain([self.deadline]).min()
    }

    pub(super) fn into_waiters(self) -> Vec<Waiter> {
        self.queue.into_waiters().chain(self.members.into_joining()).collect()
    }
}

/// Returns whether a job that was created from one checkpoint may be requested with another. The
/// latest checkpoint stands for any, because there may be a later one since.
pub(super) fn same_checkpoint(created: Option<&Restore>, requested: Option<&Restore>) -> bool {
    match requested {
        Some(Restore { version: RestoreVersion::Latest | RestoreVersion::LatestIfAny, .. }) => true,
        requested => created == requested,
    }
}

impl Job {
    /// A failed job makes way for itself, if its workers create it again from its latest
    /// checkpoint, unless that may be wrong.
    pub(super) fn make_way_for(&mut self, requested: Option<&Restore>, cx: &mut Context<'_>) {
        let is_latest = requested.is_some_and(|r| !matches!(r.version, RestoreVersion::Exactly(_)));
        if is_latest && matches!(self.phase, Phase::Failed { is_damaged: false, .. }) {
            self.remove("it is created again from a checkpoint", cx);
        }
    }

    /// Returns an open job to its last checkpoint, if its policy asks for it. `gone` describes the
    /// loss.
    pub(super) fn interrupt(&mut self, gone: &str, cx: &mut Context<'_>) -> bool {
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
    pub(super) fn interrupt_or_fail(&mut self, reason: &str, cx: &mut Context<'_>) {
        if !self.interrupt(reason, cx) {
            self.fail(reason, cx);
        }
    }

    /// A try to restore an interrupted job has failed. Another one follows.
    pub(super) fn restore_again(&mut self, failure: &str, cx: &mut Context<'_>) {
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
    pub(super) fn end_interrupted(&mut self, rank: u32, cause: Cause) {
        if let Phase::Waiting { interrupted: Some(interrupted), .. } = &mut self.phase
            && let Some(lease) = interrupted.members.get(rank).map(|member| member.lease)
        {
            interrupted.lose(rank, lease, cause);
        }
    }

    /// The servers of a restored job have read their slices: its ranks continue.
    pub(super) fn resume(&mut self, interrupted: Interrupted, cx: &mut Context<'_>) {
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
    pub(super) fn cannot_open(&mut self, error: &Error, cx: &mut Context<'_>) {
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
    pub(super) fn expire_interrupted(&mut self, cx: &mut Context<'_>) {
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
    pub(super) fn restored(&mut self, checkpoint: Checkpoint, user_data: UserData) {
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
