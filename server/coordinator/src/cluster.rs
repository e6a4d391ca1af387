//! The complete state of the coordinator. Only events change it: an event and the time are the
//! input, actions are the output.
//!
//! The cluster knows servers and the names of jobs, and passes each event to the jobs that it is
//! about. A job handles its events alone ([`Job`]), and an event visits no other job. Only commands
//! of operators, quotas and the end of the process go over all jobs.

pub mod acknowledgements;
pub mod admission;
pub(crate) mod connections;
pub mod context;
pub(crate) mod drains;
pub mod index;
pub(crate) mod jobs;
pub mod numbers;
pub mod servers;
pub mod startup;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use zeroshard_model::Result;

use crate::{
    cluster::{
        context::{Common, Context, JobLimits},
        index::Name,
        jobs::Jobs,
        servers::Missing,
        startup::Startup,
    },
    job::{Job, Phase},
    operators::history::Severity,
    state::memberships::Change,
    vocabulary::{
        calls::Reply,
        commands::{Command, ServerEvent},
        events::{Action, Event},
        ids::{Lease, Now, ServerId, Waiter},
    },
};

/// The longest interval between two checks of the clock while no call waits.
pub const IDLE: Duration = Duration::from_secs(3600);

/// The state of the coordinator, initially empty.
#[derive(Debug, Default)]
pub struct Cluster {
    jobs: Jobs,
    /// What the jobs have in common.
    pub(crate) common: Common,
    /// `true` if this coordinator is about to stop.
    is_stopping: bool,
}

impl Cluster {
    /// The state of a coordinator that has just started, and that learns jobs from their servers.
    pub fn starting() -> Self {
        let common = Common { startup: Startup::starting(), ..Common::default() };
        Self { common, ..Self::default() }
    }

    /// Sets the operator's limits on jobs.
    pub fn with_limits(mut self, limits: JobLimits) -> Self {
        self.common.limits = limits;
        self
    }

    /// Numbers saves, and the epochs of restorations, differently from coordinators of other terms.
    pub fn set_term(&mut self, term: u64) {
        self.common.saves.set_term(term);
        self.common.epochs.set_term(term);
    }

    /// What the jobs share: the servers, and the index of jobs.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// All jobs, by name.
    pub fn jobs(&self) -> &BTreeMap<String, Job> {
        self.jobs.all()
    }

    /// The job with this name.
    ///
    /// # Errors
    /// [`Error::UnknownJob`](zeroshard_model::Error::UnknownJob), or
    /// [`Error::Unavailable`](zeroshard_model::Error::Unavailable) while a server may still
    /// describe it.
    pub fn job(&self, name: &str) -> Result<&Job> {
        self.jobs.find(name, &self.common)
    }

    /// The number of visits to jobs so far: how often events were passed to a job.
    pub fn visits(&self) -> u64 {
        self.jobs.visits()
    }

    /// The names of the jobs that may have changed since the last call, including jobs that are
    /// gone.
    pub fn take_changed(&mut self) -> BTreeSet<Name> {
        self.jobs.take_changed()
    }

    /// The missing servers, by id. A job that is being recovered may wait for servers that this
    /// coordinator has never seen; they are missing, too.
    pub fn missing(&self) -> Vec<Missing> {
        let mut all = self.common.servers.missing().clone();
        for name in self.common.index.recovering() {
            let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs().get(&*name)
            else {
                continue;
            };
            for server in recovery.missing() {
                if !self.common.servers.is_connected(server.id) {
                    let cause = "it has not connected since this coordinator began to lead";
                    let (server, cause) = (server.clone(), cause.to_owned());
                    let missing = Missing { server, since: Now::ZERO, cause };
                    all.entry(missing.server.id).or_insert(missing);
                }
            }
        }
        all.into_values().collect()
    }

    /// The next message for the member with `lease`: `None` if nothing has changed, or if it has
    /// not joined yet.
    pub fn next_membership(&mut self, job: &str, lease: Lease) -> Option<Change> {
        self.jobs.get_mut(job)?.next_membership(lease)
    }

    /// Returns whether this coordinator is about to stop.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Now> {
        let Common { index, startup, acknowledgements, .. } = &self.common;
        let times =
            [index.next_deadline(), startup.next_deadline(), acknowledgements.next_deadline()];
        times.into_iter().flatten().min()
    }

    /// Applies `event`, and returns the resulting actions.
    pub fn handle(&mut self, event: Event, now: Now) -> Vec<Action> {
        let mut out = Vec::new();
        let Self { jobs, common, is_stopping } = self;
        let cx = &mut Context { now, common, out: &mut out, consequences: Vec::new() };
        match event {
            Event::ServerJoined { stream, server, about, reports, is_new } => {
                let id = server.id;
                connections::joined(jobs, stream, server, about, is_new, cx);
                connections::described(jobs, id, reports, is_new, cx);
            }
            Event::ServerLost { from, cause } => connections::lost(jobs, from, &cause, cx),
            Event::FromServer { from, event } => {
                if cx.common.servers.is_current(from) {
                    reported(jobs, from.server, event, cx);
                }
            }
            Event::Placed { job, placed } => {
                let source = jobs.source_of(&job, cx.common);
                jobs.visit_job(&job, cx, |job, cx| job.placed(placed, source, cx));
            }
            Event::Searched { search, found } => {
                let job = search.job.clone();
                jobs.visit_job(&job, cx, |job, cx| job.searched(&search, found, cx));
            }
            Event::Create { caller, job_id, create, wait } => {
                admission::create(jobs, Waiter::new(caller, now, wait), job_id, *create, cx);
            }
            Event::Delete { caller, job, wait } => {
                let waiter = Waiter::new(caller, now, wait);
                let id = job.id;
                let of = jobs.named(&job.name, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.delete(waiter, id, cx));
            }
            Event::Join { caller, join } => {
                let of = jobs.named(&join.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.join(caller, join, cx));
            }
            Event::Attach { caller, attach } => {
                jobs.visit_job(&attach.job, cx, |job, cx| job.asked_by(&attach, cx));
                let of = jobs.of_member(&attach.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.attach(caller, attach, cx));
            }
            Event::Leave { caller, leave, wait } => {
                let waiter = Waiter::new(caller, now, wait);
                let of = jobs.of_member(&leave.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.leave(waiter, &leave, cx));
            }
            Event::LeaseEnded { job, rank, lease } => {
                jobs.visit(&job, cx, |job, cx| job.lease_ended(rank, lease, cx));
            }
            Event::Commit { caller, commit } => {
                let of = jobs.of_member(&commit.turn.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.commit(caller, *commit, cx));
            }
            Event::Reduce { caller, reduce } => {
                let of = jobs.of_member(&reduce.turn.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.reduce(caller, *reduce, cx));
            }
            Event::Discard { caller, discard } => {
                let of = jobs.of_member(&discard.turn.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.discard(caller, discard, cx));
            }
            Event::Rest { caller, rest } => {
                let of = jobs.of_member(&rest.turn.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.rest(caller, rest, cx));
            }
            Event::Link { caller, report } => {
                let of = jobs.of_member(&report.turn.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.link_reported(caller, report, cx));
            }
            Event::Save { caller, save } => {
                let of = jobs.named(&save.job.name, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.save(caller, save, cx));
            }
            Event::Rewind { caller, rewind } => {
                let of = jobs.named(&rewind.job.name, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.rewind(caller, rewind, cx));
            }
            Event::UserData { caller, data } => {
                let of = jobs.of_member(&data.job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.user_data(caller, data, cx));
            }
            Event::Cordon { caller, server, cordoned } => {
                let answer = drains::set_cordoned(jobs, &server, cordoned, cx).map(Reply::Cordoned);
                cx.push(Action::Answer(caller, answer));
            }
            Event::Drain { caller, server, restore } => {
                let answer = drains::drain(jobs, &server, restore, cx).map(Reply::Drained);
                cx.push(Action::Answer(caller, answer));
            }
            Event::Evict { caller, job, rank } => {
                let of = jobs.named(&job, cx.common);
                jobs.call(caller, of, cx, |job, cx| job.evict(caller, rank, cx));
            }
            Event::SaverGone { caller, job } => {
                jobs.visit(&job, cx, |job, _| job.saver_gone(caller));
            }
            Event::Completed { job, save, outcome } => {
                cx.common.saves.completed(save);
                jobs.visit_job(&job, cx, |job, cx| job.save_ended(save, outcome, cx));
                jobs.visit(&job.name, cx, Job::try_place);
            }
            Event::Gone { caller, job, rank } => {
                jobs.visit(&job, cx, |job, cx| job.caller_gone(caller, rank, cx));
            }
            Event::Refused(server) => {
                if !cx.common.servers.is_connected(server.id) {
                    jobs.visit_all(cx.common.index.users(server.id), cx, |job, cx| {
                        job.refused_at(&server, cx)
                    });
                }
            }
            Event::Stopping => {
                // The coordinator stores nothing, but all processes of the cluster may be stopping.
                *is_stopping = true;
                jobs.visit_all(jobs.names(), cx, Job::save_last);
            }
            Event::Tick => tick(jobs, cx),
        }
        drains::release(cx);
        out
    }
}

/// Passes the message of a server to the job that it is about.
fn reported(jobs: &mut Jobs, server: ServerId, event: ServerEvent, cx: &mut Context<'_>) {
    match event {
        ServerEvent::Departing => drains::departing(jobs, server, cx),
        ServerEvent::Confirmed { number } => {
            cx.common.acknowledgements.confirmed(server, number, cx.out);
        }
        ServerEvent::Stats(stats) => cx.common.servers.report(server, stats),
        ServerEvent::Written { job, save, line, files } => {
            let handle = |found: &mut Job, cx: &mut Context<'_>| {
                found.written(server, (save, line), files, cx);
            };
            if jobs.visit_job(&job, cx, handle).is_none() {
                let cancel = Command::CancelSave { job, save };
                cx.command(server, cancel);
            }
        }
        ServerEvent::Failed { job, epoch, reason, transient } => {
            let source = jobs.source_of(&job, cx.common);
            jobs.visit_job(&job, cx, |found, cx| {
                found.failed_on(server, epoch, &reason, transient, source, cx);
            });
        }
        ServerEvent::Opened { job, epoch } => {
            jobs.visit_job(&job, cx, |found, cx| found.opened(server, epoch, cx));
        }
        ServerEvent::Initialised { job, epoch } => {
            jobs.visit_job(&job, cx, |found, cx| found.initialised(server, epoch, cx));
        }
        ServerEvent::Ready { job, attempt, reduced } => {
            jobs.visit_job(&job, cx, |found, cx| found.ready(server, attempt, reduced, cx));
        }
        ServerEvent::Granted { job, rank, lease } => {
            jobs.visit_job(&job, cx, |found, cx| found.granted(server, rank, lease, cx));
        }
        ServerEvent::Stored { job, epoch, step } => {
            jobs.visit_job(&job, cx, |found, cx| found.stored(server, epoch, step, cx));
        }
        ServerEvent::CopyRefused { job, number, reason } => {
            jobs.visit_job(&job, cx, |of, cx| of.copy_refused(server, number, &reason, cx));
        }
        ServerEvent::Copied { job, number } => {
            jobs.visit_job(&job, cx, |found, cx| found.copied(server, number, cx));
        }
        ServerEvent::Hashes { job, epoch, version, slices } => {
            jobs.visit_job(&job, cx, |found, cx| {
                found.hashes(server, (epoch, version), &slices, cx);
            });
        }
        ServerEvent::SaveFailed { job, save, cause } => {
            let text = format!("{}: {cause}", cx.name(server));
            cx.alarm(Severity::Warning, text);
            jobs.visit_job(&job, cx, |found, cx| found.save_ended(save, Err(cause), cx));
        }
    }
}

/// Lets the jobs whose time has come act.
fn tick(jobs: &mut Jobs, cx: &mut Context<'_>) {
    if cx.common.startup.expire(cx.now) {
        // Servers may describe no more jobs: jobs are placed, or continue with the servers they
        // have.
        jobs.visit_all(cx.common.index.waiting(), cx, Job::try_place);
        jobs.visit_all(cx.common.index.recovering(), cx, Job::try_recover);
    }
    let Common { servers, acknowledgements, .. } = &mut *cx.common;
    acknowledgements.expire(servers, cx.now, cx.out);
    jobs.visit_all(cx.common.index.due(cx.now), cx, Job::expire);
}
