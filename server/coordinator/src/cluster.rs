//! The complete state of the coordinator, which only changes through events: an event and the time
//! are the input, actions are the output.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use zeroshard_model::{Error, JobSpec, Placement, Result, limits::MAX_JOBS};

use super::{
    confirm::Confirmations,
    events::{Action, Event, JobRef, Now, Said, ServerId, Waiter},
    jobs::Failed,
    missing::Missing,
    placement::Zones,
    recovery::{LEARNING, RECOVERY, SETTLING, unknown_yet},
    state::{Job, Open, Phase, ServerState},
};

/// The low bits of the term of a coordinator without an election are random: two of them that have
/// met different servers never have the same term.
pub const RANDOM: u32 = 24;

/// The operator's limits on jobs.
#[derive(Debug, Clone, Copy)]
pub struct JobLimits {
    /// The idle timeout of jobs that have none of their own; `None`: they are kept.
    pub timeout: Option<Duration>,
    /// The maximum number of jobs.
    pub number: usize,
}

/// The state of the coordinator, initially empty.
#[derive(Debug)]
pub struct Cluster {
    pub servers: BTreeMap<ServerId, ServerState>,
    /// The servers that were connected, and were not drained before they left.
    pub(super) missing: BTreeMap<ServerId, Missing>,
    /// The zones of servers that have one, also while they are away.
    pub zones: Zones,
    /// The names that operators gave to servers, also while they are away.
    pub names: BTreeMap<ServerId, String>,
    /// The connected servers that are about to stop. The value is true for a server that was
    /// released.
    pub(super) departing: BTreeMap<ServerId, bool>,
    /// `true` if this coordinator is about to stop.
    is_stopping: bool,
    pub jobs: BTreeMap<String, Job>,
    /// The last epoch that was assigned; the epochs of all jobs come from this counter.
    epoch: u64,
    /// The number of the last save.
    pub(super) saves: u64,
    /// The low bits of the term, in which two coordinators differ.
    pub(super) lane: u64,
    /// The saves whose manifests are being written, with the names of their jobs.
    pub(super) completing: BTreeMap<u64, String>,
    /// Until then, servers may still describe jobs of an earlier coordinator, and no new job is
    /// placed.
    pub(super) learns_until: Option<Now>,
    /// Until then, the members of jobs that no server has described wait for their servers.
    pub(super) members_wait_until: Option<Now>,
    /// Until then, servers of an earlier coordinator may return after the first new one.
    pub(super) settles_until: Option<Now>,
    /// Whether a server has followed another coordinator before; `None` before the first one
    /// registers.
    pub(super) has_returning: Option<bool>,
    pub(super) confirmations: Confirmations,
    /// The idle timeout of jobs that have none of their own; `None`: they are kept.
    pub(super) job_timeout: Option<Duration>,
    /// The maximum number of jobs.
    pub(super) max_jobs: usize,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            servers: BTreeMap::new(),
            missing: BTreeMap::new(),
            zones: Zones::new(),
            names: BTreeMap::new(),
            departing: BTreeMap::new(),
            is_stopping: false,
            jobs: BTreeMap::new(),
            epoch: 0,
            saves: 0,
            lane: 0,
            completing: BTreeMap::new(),
            learns_until: None,
            members_wait_until: None,
            settles_until: None,
            has_returning: None,
            confirmations: Confirmations::default(),
            job_timeout: None,
            max_jobs: MAX_JOBS,
        }
    }
}

/// The content of a DescribeJob response, which the service converts without the driver's lock.
#[derive(Debug)]
pub struct Description {
    pub spec: Arc<JobSpec>,
    pub placement: Arc<Placement>,
    pub epoch: u64,
    pub version: Option<u64>,
    pub job_id: u64,
}

impl Cluster {
    /// The state of a coordinator that has just started, and that learns jobs from their servers.
    pub fn starting() -> Self {
        Self {
            settles_until: Some(SETTLING),
            learns_until: Some(LEARNING),
            members_wait_until: Some(RECOVERY),
            ..Self::default()
        }
    }

    /// Sets the operator's limits on jobs.
    pub fn with_limits(self, jobs: JobLimits) -> Self {
        Self { job_timeout: jobs.timeout, max_jobs: jobs.number, ..self }
    }

    /// Numbers saves, and the epochs of restorations, differently from coordinators of other terms.
    pub fn set_term(&mut self, term: u64) {
        self.saves = term << 20;
        self.lane = term & ((1 << RANDOM) - 1);
    }

    /// Applies `event`, and returns the resulting actions.
    pub fn handle(&mut self, event: Event, now: Now) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::ServerJoined { stream, server, about, held, is_new } => {
                let id = server.id;
                self.has_returning = Some(is_new || self.has_returning == Some(true));
                self.server_joined(stream, server, about, now, &mut out);
                self.take_over(id, held, is_new, now, &mut out);
            }
            Event::ServerLost { from, cause } => self.server_lost(from, &cause, now, &mut out),
            Event::Said { from, said } if self.is_current(from) => {
                self.said(from.server, said, now, &mut out)
            }
            Event::Said { .. } => {}
            Event::Placed { job, placed } => self.placed(&job, placed, now, &mut out),
            Event::Create { caller, job_id, create, wait } => {
                self.create(Waiter::new(caller, now, wait), job_id, *create, &mut out);
            }
            Event::Delete { caller, job, wait } => {
                self.delete(Waiter::new(caller, now, wait), &job, &mut out);
            }
            Event::Join { caller, join } => self.join(caller, join, now, &mut out),
            Event::Attach { caller, attach } => self.attach(caller, attach, now, &mut out),
            Event::Leave { caller, leave, wait } => {
                self.leave(Waiter::new(caller, now, wait), &leave, now, &mut out);
            }
            Event::LeaseEnded { job, rank, lease } => {
                self.lease_ended(&job, rank, lease, now, &mut out)
            }
            Event::Commit { caller, commit } => self.commit(caller, *commit, now, &mut out),
            Event::Reduce { caller, reduce } => self.reduce(caller, *reduce, now, &mut out),
            Event::Discard { caller, discard } => self.discard(caller, discard, now, &mut out),
            Event::Rest { caller, rest } => self.rest(caller, rest, now, &mut out),
            Event::Link { caller, report } => self.link_reported(caller, report, now, &mut out),
            Event::Save { caller, save } => self.save(caller, save, now, &mut out),
            Event::UserData { caller, data } => self.user_data(caller, data, &mut out),
            Event::Cordon { caller, server, cordoned } => {
                self.cordon(caller, &server, cordoned, now, &mut out);
            }
            Event::Drain { caller, server, restore } => {
                self.drain(caller, &server, restore, now, &mut out);
            }
            Event::Evict { caller, job, rank } => self.evict(caller, &job, rank, now, &mut out),
            Event::SaverGone { caller, job } => self.saver_gone(&job, caller),
            Event::Completed { job, save, outcome } => {
                self.completing.remove(&save);
                self.save_ended(&job, save, outcome, now, &mut out);
                self.try_place(&job.name, now, &mut out);
            }
            Event::Gone { caller, job, rank: None } => self.creator_gone(&job, caller, &mut out),
            Event::Gone { caller, job, rank: Some(rank) } => {
                if let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(&job) {
                    open.forget_caller(rank, caller);
                }
            }
            Event::Refused(server) => self.refused(&server, now, &mut out),
            Event::Stopping => {
                self.is_stopping = true;
                self.stopping(now, &mut out);
            }
            Event::Tick => self.tick(now, &mut out),
        }
        self.release(&mut out);
        self.note_progress(now);
        out
    }

    /// Returns whether this coordinator is about to stop.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    fn said(&mut self, server: ServerId, said: Said, now: Now, out: &mut Vec<Action>) {
        self.amend(server, &said, now, out);
        match said {
            Said::Opened { job, epoch } => self.opened(server, &job, epoch, now, out),
            Said::Initialised { job, epoch } => self.initialised(server, &job, epoch, now, out),
            Said::Ready { job, attempt, reduced } => {
                self.ready(server, &job, attempt, reduced, now, out);
            }
            Said::Granted { job, rank, lease } => self.granted(server, &job, rank, lease, out),
            Said::Stored { job, epoch, step } => self.stored(server, &job, epoch, step, now, out),
            Said::Failed { job, epoch, reason, transient } => {
                let failed = Failed { epoch, reason: &reason, transient };
                self.failed_on(server, &job, failed, now, out);
            }
            Said::CopyRefused { job, number, reason } => {
                self.copy_refused(server, &job, number, &reason, now, out);
            }
            Said::Copied { job, number } => self.copied(server, &job, number, now, out),
            Said::Hashes { job, epoch, version, slices } => {
                self.hashes(server, &job, (epoch, version), &slices, now, out);
            }
            Said::Written { job, save, files } => self.written(server, &job, save, files, out),
            Said::SaveFailed { job, save, cause } => {
                self.save_failed(server, &job, save, cause, now, out);
            }
            Said::Departing => self.departing(server, now, out),
            Said::Confirmed { number } => self.confirmed(server, number, out),
            Said::Stats(stats) => {
                if let Some(known) = self.servers.get_mut(&server) {
                    known.stats = Some(stats);
                }
            }
        }
    }

    /// The earliest deadline of a waiting caller or of an unused job, when [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Now> {
        let waiting = |job: &Job| match &job.phase {
            Phase::Waiting { creators, interrupted, .. }
            | Phase::Opening { creators, interrupted, .. } => {
                let deadlines = creators.iter().map(|waiter| waiter.deadline);
                let interrupted = interrupted.iter().filter_map(|i| i.next_deadline());
                deadlines.chain(interrupted).min()
            }
            Phase::Open(open) => open.next_deadline(),
            Phase::Recovering(recovery) => Some(recovery.deadline()),
            Phase::Failed { .. } => None,
        };
        let deadlines = self.jobs.values().flat_map(|job| [waiting(job), self.disposal(job)]);
        let deadlines = deadlines.flatten().chain(self.settles_until);
        let deadlines = deadlines.chain(self.learns_until).chain(self.members_wait_until);
        deadlines.chain(self.confirmations.next_deadline()).min()
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Action>) {
        self.expire_learning(now, out);
        self.expire_creators(now, out);
        self.expire_confirmations(now, out);
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            self.expire_recovery(&name, now, out);
            self.expire_interrupted(&name, now, out);
            self.expire_absence(&name, now, out);
            self.expire_links(&name, now, out);
            self.expire_joins(&name, now, out);
            self.expire_commits(&name, now, out);
            self.expire_stored(&name, now, out);
            self.expire_reducers(&name, now, out);
            self.expire_discards(&name, now, out);
            self.expire_rests(&name, now, out);
            self.expire_saves(&name, now, out);
            self.dispose(&name, now, out);
        }
    }

    /// A new epoch, which no job has had before.
    pub(super) fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    /// No job gets this epoch or an earlier one any more.
    pub(super) fn see_epoch(&mut self, epoch: u64) {
        self.epoch = self.epoch.max(epoch);
    }

    pub(super) fn job(&self, job: &str) -> Result<&Job> {
        self.jobs.get(job).ok_or_else(|| self.unknown(job))
    }

    pub(super) fn job_mut(&mut self, job: &str) -> Result<&mut Job> {
        match self.jobs.contains_key(job) {
            true => Ok(self.jobs.get_mut(job).expect("it is there")),
            false => Err(self.unknown(job)),
        }
    }

    /// The error for a job that does not exist, or that a server may still describe.
    pub(super) fn unknown(&self, job: &str) -> Error {
        match self.is_learning() {
            true => unknown_yet(job),
            false => Error::UnknownJob { job: job.to_owned() },
        }
    }

    /// The job of a member's call.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an id of 0; [`Error::JobReplaced`] if another
    /// job has the name.
    pub(super) fn member_job(&mut self, job: &JobRef) -> Result<&mut Job> {
        // A member knows that the job exists. The first server that registers may be a new one, and
        // another worker may have asked for the job as if it were new.
        let is_known = self.jobs.get(&job.name).is_some_and(|found| {
            let is_new = matches!(
                found.phase,
                Phase::Waiting { interrupted: None, .. } | Phase::Opening { interrupted: None, .. }
            );
            found.id == job.id || !is_new
        });
        if !is_known && self.members_wait_until.is_some() {
            return Err(unknown_yet(&job.name));
        }
        let found = self.job_mut(&job.name)?;
        match job.id {
            0 => Err(Error::invalid(
                format!("job_id of job {:?}", job.name),
                0,
                "the job_id in the JoinResponse",
            )),
            id if id == found.id => Ok(found),
            _ => Err(Error::JobReplaced { job: job.name.clone() }),
        }
    }

    /// The job of a server's message; `None` if the message is about an earlier job with the same
    /// name.
    pub(super) fn reported_job(&mut self, job: &JobRef) -> Option<&mut Job> {
        self.jobs.get_mut(&job.name).filter(|found| found.id == job.id)
    }

    /// The description of a job that a reader needs.
    pub fn describe(&self, job: &str) -> Result<Description> {
        let found = self.job(job)?;
        let open = found.phase.open(job)?;
        let (spec, placement) = (found.spec.clone(), open.placement.clone());
        Ok(Description {
            spec,
            placement,
            epoch: found.epoch,
            version: open.version,
            job_id: found.id,
        })
    }

    /// The job, and the attempt that was decided last.
    pub fn last_decision(&self, job: &str) -> Option<(u64, zeroshard_model::Attempt)> {
        let job = self.jobs.get(job)?;
        let last = job.phase.open("").ok()?.last.as_ref()?;
        Some((job.id, last.decision.attempt))
    }

    /// Why a job has failed, if it has.
    pub fn failure_of(&self, job: &str) -> Option<&str> {
        match &self.jobs.get(job)?.phase {
            Phase::Failed { reason, .. } => Some(reason),
            _ => None,
        }
    }
}

impl Open {
    fn next_deadline(&self) -> Option<Now> {
        let last =
            self.last.iter().flat_map(|last| last.waiters.iter().map(|waiter| waiter.deadline));
        let others = [
            self.round.next_deadline(),
            self.resting.next_deadline(),
            self.saves.next_deadline(),
            self.queue.next_deadline(),
            self.members.next_deadline(),
        ];
        let away = self.away.values().map(|away| away.until);
        last.chain(others.into_iter().flatten()).chain(away).min()
    }
}

/// The longest interval between two checks of the clock while no call waits.
pub const IDLE: Duration = Duration::from_secs(3600);
