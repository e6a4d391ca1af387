//! The complete state of the coordinator, which only changes through events: an event and the time
//! are the input, actions are the output.
//!
//! The cluster knows servers and the names of jobs, and passes each event to the jobs that it is
//! about. A job handles its events alone ([`Job`]), and an event visits no other job. Only commands
//! of operators, quotas and the end of the process go over all jobs.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    time::Duration,
};

use zeroshard_model::{Error, Result, Server, limits::MAX_JOBS};

use crate::{
    admission::check_quota,
    calls::{Create, Drained, Reply},
    commands::{About, Command, ServerEvent},
    context::{Common, Consequence, Context},
    events::{Action, Event},
    held::Held,
    history::Severity,
    ids::{Caller, JobRef, Lease, Link, Now, ServerId, Waiter},
    index::Name,
    job::{Job, Phase},
    learning::{Learning, unknown_yet},
    memberships::Change,
    servers::Missing,
    succession::Source,
};

/// The longest interval between two checks of the clock while no call waits.
pub const IDLE: Duration = Duration::from_secs(3600);

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
    pub(crate) jobs: BTreeMap<String, Job>,
    /// What the jobs have in common.
    pub(crate) common: Common,
    /// `true` if this coordinator is about to stop.
    is_stopping: bool,
    /// The maximum number of jobs.
    pub(crate) max_jobs: usize,
    /// The jobs that have been visited since they were last asked for.
    changed: BTreeSet<Name>,
    /// The number of visits to jobs so far.
    visits: u64,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            jobs: BTreeMap::new(),
            common: Common::default(),
            is_stopping: false,
            max_jobs: MAX_JOBS,
            changed: BTreeSet::new(),
            visits: 0,
        }
    }
}

impl Cluster {
    /// The state of a coordinator that has just started, and that learns jobs from their servers.
    pub fn starting() -> Self {
        let common = Common { learning: Learning::starting(), ..Common::default() };
        Self { common, ..Self::default() }
    }

    /// Sets the operator's limits on jobs.
    pub fn with_limits(mut self, jobs: JobLimits) -> Self {
        self.common.job_timeout = jobs.timeout;
        self.max_jobs = jobs.number;
        self
    }

    /// Numbers saves, and the epochs of restorations, differently from coordinators of other terms.
    pub fn set_term(&mut self, term: u64) {
        self.common.saves.set_term(term);
        self.common.epochs.set_term(term);
    }

    /// What the jobs have in common: servers, and what is known of jobs without visiting them.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// All jobs, by name.
    pub fn jobs(&self) -> &BTreeMap<String, Job> {
        &self.jobs
    }

    /// The job with this name.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], or [`Error::Unavailable`] while a server may still describe it.
    pub fn job(&self, name: &str) -> Result<&Job> {
        self.jobs.get(name).ok_or_else(|| match self.common.learning.is_learning() {
            true => unknown_yet(name),
            false => Error::UnknownJob { job: name.to_owned() },
        })
    }

    /// The number of visits to jobs so far: how often events were passed to a job.
    pub fn visits(&self) -> u64 {
        self.visits
    }

    /// The names of the jobs that may have changed since the last call, including jobs that are
    /// gone.
    pub fn take_changed(&mut self) -> BTreeSet<Name> {
        mem::take(&mut self.changed)
    }

    /// The missing servers, by id: also those of jobs that wait for servers which this coordinator
    /// has never seen.
    pub fn missing(&self) -> Vec<Missing> {
        let mut all = self.common.servers.missing().clone();
        for name in self.common.index.recovering() {
            let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs.get(&*name) else {
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
        let Common { index, learning, acknowledgements, .. } = &self.common;
        let times =
            [index.next_deadline(), learning.next_deadline(), acknowledgements.next_deadline()];
        times.into_iter().flatten().min()
    }

    /// Applies `event`, and returns the resulting actions.
    pub fn handle(&mut self, event: Event, now: Now) -> Vec<Action> {
        let mut out = Vec::new();
        let run = &mut Run { now, out: &mut out };
        match event {
            Event::ServerJoined { stream, server, about, held, is_new } => {
                let id = server.id;
                self.server_joined(stream, server, about, is_new, run);
                self.take_over(id, held, is_new, run);
            }
            Event::ServerLost { from, cause } => self.server_lost(from, &cause, run),
            Event::FromServer { from, event } => {
                if self.common.servers.is_current(from) {
                    self.reported(from.server, event, run);
                }
            }
            Event::Placed { job, placed } => {
                let source = self.source_of(&job);
                self.visit_job(&job, run, |job, cx| job.placed(placed, source, cx));
            }
            Event::Create { caller, job_id, create, wait } => {
                self.create(Waiter::new(caller, now, wait), job_id, *create, run);
            }
            Event::Delete { caller, job, wait } => {
                let waiter = Waiter::new(caller, now, wait);
                let id = job.id;
                self.call(caller, &job.name, run, |job, cx| job.delete(waiter, id, cx));
            }
            Event::Join { caller, join } => {
                let name = join.job.clone();
                self.call(caller, &name, run, |job, cx| job.join(caller, join, cx));
            }
            Event::Attach { caller, attach } => {
                self.visit_job(&attach.job, run, |job, cx| job.asked_by(&attach, cx));
                let of = attach.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.attach(caller, attach, cx));
            }
            Event::Leave { caller, leave, wait } => {
                let waiter = Waiter::new(caller, now, wait);
                self.member_call(caller, &leave.job, run, |job, cx| job.leave(waiter, &leave, cx));
            }
            Event::LeaseEnded { job, rank, lease } => {
                self.visit(&job, run, |job, cx| job.lease_ended(rank, lease, cx));
            }
            Event::Commit { caller, commit } => {
                let of = commit.turn.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.commit(caller, *commit, cx));
            }
            Event::Reduce { caller, reduce } => {
                let of = reduce.turn.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.reduce(caller, *reduce, cx));
            }
            Event::Discard { caller, discard } => {
                let of = discard.turn.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.discard(caller, discard, cx));
            }
            Event::Rest { caller, rest } => {
                let of = rest.turn.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.rest(caller, rest, cx));
            }
            Event::Link { caller, report } => {
                let of = report.turn.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.link_reported(caller, report, cx));
            }
            Event::Save { caller, save } => {
                let name = save.job.name.clone();
                self.call(caller, &name, run, |job, cx| job.save(caller, save, cx));
            }
            Event::UserData { caller, data } => {
                let of = data.job.clone();
                self.member_call(caller, &of, run, |job, cx| job.user_data(caller, data, cx));
            }
            Event::Cordon { caller, server, cordoned } => {
                let answer = self.set_cordoned(&server, cordoned, run).map(Reply::Cordoned);
                run.out.push(Action::Answer(caller, answer));
            }
            Event::Drain { caller, server, restore } => {
                let answer = self.drain(&server, restore, run).map(Reply::Drained);
                run.out.push(Action::Answer(caller, answer));
            }
            Event::Evict { caller, job, rank } => {
                self.call(caller, &job, run, |job, cx| job.evict(caller, rank, cx));
            }
            Event::SaverGone { caller, job } => {
                self.visit(&job, run, |job, _| job.saver_gone(caller));
            }
            Event::Completed { job, save, outcome } => {
                self.common.saves.completed(save);
                self.visit_job(&job, run, |job, cx| job.save_ended(save, outcome, cx));
                self.visit(&job.name, run, Job::try_place);
            }
            Event::Gone { caller, job, rank } => {
                self.visit(&job, run, |job, cx| job.caller_gone(caller, rank, cx));
            }
            Event::Refused(server) => {
                if !self.common.servers.is_connected(server.id) {
                    self.visit_users(server.id, run, |job, cx| job.refused_at(&server, cx));
                }
            }
            Event::Stopping => {
                // The coordinator stores nothing, but all processes of the cluster may be stopping.
                self.is_stopping = true;
                let names: Vec<String> = self.jobs.keys().cloned().collect();
                names.iter().for_each(|name| _ = self.visit(name, run, Job::save_last));
            }
            Event::Tick => self.tick(run),
        }
        self.release(run);
        out
    }

    /// Lets a job handle an event, and carries out what follows for others. `None` if there is no
    /// such job.
    fn visit<T>(
        &mut self,
        name: &str,
        run: &mut Run<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let job = self.jobs.get_mut(name)?;
        self.visits += 1;
        let (mut consequences, common) = (Vec::new(), &mut self.common);
        let mut context =
            Context { now: run.now, common, out: run.out, consequences: &mut consequences };
        let result = handle(job, &mut context);
        job.note_progress(run.now);
        self.index(name);
        consequences.into_iter().for_each(|consequence| self.carry_out(consequence, run));
        Some(result)
    }

    fn carry_out(&mut self, consequence: Consequence, run: &mut Run<'_>) {
        match consequence {
            Consequence::Ended { job_id, error } => {
                for name in self.common.index.successors(job_id) {
                    self.visit(&name, run, |job, cx| job.abandon(&error, cx));
                }
            }
            Consequence::Dismiss { link, cause } => self.server_lost(link, &cause, run),
            Consequence::Answer { waiter, reply, servers, what } => {
                self.common.answer_when_received(vec![waiter], reply, servers, what, run.out);
            }
        }
    }

    /// Notes what is known of a job without visiting it, and forgets a job that is gone.
    fn index(&mut self, name: &str) {
        let Some(job) = self.jobs.get(name) else { return };
        let key = job.name.clone();
        let entry = (!matches!(job.phase, Phase::Gone)).then(|| job.entry(&self.common));
        let is_gone = entry.is_none();
        let has_moved = self.common.index.set(&key, entry, job.phase.loads());
        let succession = job.succession.as_ref().filter(|_| has_moved);
        let predecessor = succession.map(|succession| succession.from.job.clone());
        self.changed.insert(key);
        if is_gone {
            self.jobs.remove(name);
        }
        // It is kept while another job is being created from it.
        if let Some(predecessor) = predecessor {
            self.index(&predecessor);
        }
    }

    fn insert(&mut self, job: Job) {
        let name = job.spec.name.clone();
        self.jobs.insert(name.clone(), job);
        self.index(&name);
    }

    /// Visits the jobs that use a server, or may hold slices there.
    fn visit_users(
        &mut self,
        server: ServerId,
        run: &mut Run<'_>,
        mut handle: impl FnMut(&mut Job, &mut Context<'_>),
    ) {
        for name in self.common.index.users(server) {
            self.visit(&name, run, &mut handle);
        }
    }

    /// Visits the job of a server's message, unless the message is about an earlier job with the
    /// same name.
    fn visit_job<T>(
        &mut self,
        job: &JobRef,
        run: &mut Run<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>) -> T,
    ) -> Option<T> {
        self.jobs.get(&job.name).filter(|found| found.id == job.id)?;
        self.visit(&job.name, run, handle)
    }

    /// Visits the job of a call, which is refused if there is none.
    fn call(
        &mut self,
        caller: Caller,
        name: &str,
        run: &mut Run<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>),
    ) {
        match self.job(name).map(|_| ()) {
            Ok(()) => _ = self.visit(name, run, handle),
            Err(error) => run.out.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Visits the job of a member's call, which is refused if there is none.
    fn member_call(
        &mut self,
        caller: Caller,
        job: &JobRef,
        run: &mut Run<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>),
    ) {
        match self.check_member(job) {
            Ok(()) => _ = self.visit(&job.name, run, handle),
            Err(error) => run.out.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Checks that the job of a member's call exists.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an id of 0; [`Error::JobReplaced`] if another
    /// job has the name.
    fn check_member(&self, job: &JobRef) -> Result<()> {
        // A member knows that the job exists. The first server that registers may be a new one, and
        // another worker may have asked for the job as if it were new.
        let is_known =
            self.jobs.get(&job.name).is_some_and(|found| found.id == job.id || !found.is_new());
        if !is_known && self.common.learning.members_wait() {
            return Err(unknown_yet(&job.name));
        }
        let found = self.job(&job.name)?;
        match job.id {
            0 => Err(Error::invalid(
                format!("job_id of job {:?}", job.name),
                0,
                "the job_id in the JoinResponse",
            )),
            id if id == found.id => Ok(()),
            _ => Err(Error::JobReplaced { job: job.name.clone() }),
        }
    }

    fn reported(&mut self, server: ServerId, event: ServerEvent, run: &mut Run<'_>) {
        match event {
            ServerEvent::Departing => self.departing(server, run),
            ServerEvent::Confirmed { number } => {
                self.common.acknowledgements.confirmed(server, number, run.out);
            }
            ServerEvent::Stats(stats) => self.common.servers.report(server, stats),
            ServerEvent::Written { job, save, files } => {
                let handle = |found: &mut Job, cx: &mut Context<'_>| {
                    found.written(server, save, files, cx);
                };
                if self.visit_job(&job, run, handle).is_none() {
                    let cancel = Command::CancelSave { job, save };
                    run.out.push(Action::Command(server, cancel));
                }
            }
            ServerEvent::Failed { job, epoch, reason, transient } => {
                let source = self.source_of(&job);
                self.visit_job(&job, run, |found, cx| {
                    found.failed_on(server, epoch, &reason, transient, source, cx);
                });
            }
            ServerEvent::Opened { job, epoch } => {
                self.visit_job(&job, run, |found, cx| found.opened(server, epoch, cx));
            }
            ServerEvent::Initialised { job, epoch } => {
                self.visit_job(&job, run, |found, cx| found.initialised(server, epoch, cx));
            }
            ServerEvent::Ready { job, attempt, reduced } => {
                self.visit_job(&job, run, |found, cx| found.ready(server, attempt, reduced, cx));
            }
            ServerEvent::Granted { job, rank, lease } => {
                self.visit_job(&job, run, |found, cx| found.granted(server, rank, lease, cx));
            }
            ServerEvent::Stored { job, epoch, step } => {
                self.visit_job(&job, run, |found, cx| found.stored(server, epoch, step, cx));
            }
            ServerEvent::CopyRefused { job, number, reason } => {
                self.visit_job(&job, run, |of, cx| of.copy_refused(server, number, &reason, cx));
            }
            ServerEvent::Copied { job, number } => {
                self.visit_job(&job, run, |found, cx| found.copied(server, number, cx));
            }
            ServerEvent::Hashes { job, epoch, version, slices } => {
                self.visit_job(&job, run, |found, cx| {
                    found.hashes(server, (epoch, version), &slices, cx);
                });
            }
            ServerEvent::SaveFailed { job, save, cause } => {
                let text = format!("{}: {cause}", self.common.servers.name(server));
                run.out.push(Action::Alarm(Severity::Warning, text));
                self.visit_job(&job, run, |found, cx| found.save_ended(save, Err(cause), cx));
            }
        }
    }

    fn tick(&mut self, run: &mut Run<'_>) {
        if self.common.learning.expire(run.now) {
            self.learning_changed(run);
        }
        let Common { servers, acknowledgements, index, .. } = &mut self.common;
        acknowledgements.expire(servers, run.now, run.out);
        for name in index.due(run.now) {
            self.visit(&name, run, Job::expire);
        }
    }

    /// Servers may describe no more jobs: jobs are placed, or continue with the servers they have.
    fn learning_changed(&mut self, run: &mut Run<'_>) {
        for name in self.common.index.waiting() {
            self.visit(&name, run, Job::try_place);
        }
        for name in self.common.index.recovering() {
            self.visit(&name, run, Job::try_recover);
        }
    }

    /// Creates a job, or waits for one that exists.
    fn create(&mut self, waiter: Waiter, id: u64, create: Create, run: &mut Run<'_>) {
        let name = create.spec.name.clone();
        self.visit(&name, run, |job, cx| job.make_way_for(create.restore.as_ref(), cx));
        if self.jobs.contains_key(&name) {
            self.visit(&name, run, |job, cx| job.create_again(waiter, &create, cx));
            return;
        }
        let possible = self.check_number_of_jobs();
        let possible =
            possible.and_then(|()| check_quota(&self.jobs, &name, create.quota.as_ref()));
        if let Err(error) = possible {
            return run.out.push(Action::Answer(waiter.caller, Err(error)));
        }
        let job = Job::new(waiter, id, create);
        if let Some(succession) = &job.succession
            && let Err(error) =
                self.job(&succession.from.job).and_then(|from| from.as_source(succession))
        {
            return run.out.push(Action::Answer(waiter.caller, Err(error)));
        }
        self.insert(job);
        self.visit(&name, run, Job::try_place);
    }

    /// Checks that the cluster may have another job.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`].
    fn check_number_of_jobs(&self) -> Result<()> {
        if self.jobs.len() < self.max_jobs {
            return Ok(());
        }
        Err(Error::LimitExceeded {
            what: "jobs of the cluster (--max-jobs of the coordinator)".to_owned(),
            limit: self.max_jobs as u64,
            remedy: "delete jobs that are not needed any more; `zsctl status` lists them"
                .to_owned(),
        })
    }

    /// The job from which this one is being created, if it is.
    fn source_of(&self, job: &JobRef) -> Option<Result<Source>> {
        let found = self.jobs.get(&job.name).filter(|found| found.id == job.id)?;
        let succession = found.succession.as_ref().filter(|_| found.is_new())?;
        Some(self.job(&succession.from.job).and_then(|job| job.as_source(succession)))
    }

    /// Registers a server. A known server with the same id or address is removed first, because it
    /// has restarted or connected again.
    fn server_joined(
        &mut self,
        stream: u64,
        server: Server,
        about: About,
        is_new: bool,
        run: &mut Run<'_>,
    ) {
        self.common.learning.registered(is_new);
        for (link, cause) in self.common.servers.replaced_by(&server) {
            self.server_lost(link, cause, run);
        }
        self.common.servers.join(stream, server, about, run.out);
        for name in self.common.index.waiting() {
            self.visit(&name, run, Job::try_place);
        }
    }

    /// Removes a server. A job with slices on the server waits for its return; a job that is being
    /// opened fails.
    fn server_lost(&mut self, link: Link, cause: &str, run: &mut Run<'_>) {
        if !self.common.servers.is_current(link) {
            return;
        }
        let server = link.server;
        let gone = format!("{} was lost ({cause})", self.common.servers.name(server));
        let has_departed = self.note_loss(server, cause, run);
        run.out.push(Action::Dismiss(link));
        self.visit_users(server, run, |job, cx| job.server_lost(server, cause, &gone, cx));
        if has_departed {
            self.visit_users(server, run, |job, cx| job.server_stopped(server, cx));
        }
        self.common.acknowledgements.lose(server, run.out);
        self.probe_missing(run);
    }

    /// A server is not connected any more. It is missed, unless it was drained. Returns whether it
    /// was about to stop.
    fn note_loss(&mut self, id: ServerId, cause: &str, run: &mut Run<'_>) -> bool {
        let name = self.common.servers.name(id);
        let Some((known, has_departed)) = self.common.servers.remove(id) else { return false };
        let uses = |job: &Name| self.jobs.get(&**job).is_some_and(|job| job.phase.uses(id));
        let is_drained = known.cordoned && !self.common.index.users(id).iter().any(uses);
        let cause = if has_departed { "it was stopped" } else { cause };
        let (severity, what) = match (is_drained, has_departed) {
            (true, _) => (Severity::Info, "has left the cluster, and held no slices"),
            (false, true) => (Severity::Warning, "has left the cluster"),
            (false, false) => (Severity::Warning, "was lost"),
        };
        run.out.push(Action::Alarm(severity, format!("{name} {what} ({cause})")));
        if !is_drained {
            let server = Server { id, incarnation: known.incarnation, address: known.address };
            let missing = Missing { server, since: run.now, cause: cause.to_owned() };
            self.common.servers.miss(missing);
        }
        has_departed
    }

    /// Dials the servers that jobs wait for.
    fn probe_missing(&self, run: &mut Run<'_>) {
        for (server, users) in self.common.index.used() {
            if !self.common.servers.is_connected(server) {
                let mut jobs = users.iter().rev().filter_map(|name| self.jobs.get(&**name));
                let awaited = jobs.find_map(|job| job.awaited(server));
                run.out.extend(awaited.map(|server| Action::Probe(server.clone())));
            }
        }
    }

    /// A server has described the jobs that it holds. It has followed another coordinator before if
    /// it `is_new` here; a job that this coordinator has dropped is closed.
    fn take_over(&mut self, server: ServerId, held: Vec<Held>, is_new: bool, run: &mut Run<'_>) {
        let ids: BTreeSet<u64> = held.iter().map(|held| held.id).collect();
        for held in held {
            let job = JobRef { name: held.spec.name.clone(), id: held.id };
            if is_new {
                self.make_way_for(&held, server, run);
            }
            match self.jobs.get(&job.name) {
                None if is_new => {
                    let job = Job::recovering(server, held, run.now);
                    run.out.extend(job.next_deadline(&self.common).map(Action::Tick));
                    self.insert(job);
                }
                Some(found) if found.id == job.id => {
                    self.visit(&job.name, run, |found, cx| found.described(server, held, cx));
                }
                _ => run.out.push(Action::Command(server, Command::Close(job))),
            }
        }
        let Some(known) = self.common.servers.get(server) else { return };
        let (incarnation, address) = (known.incarnation, known.address.clone());
        let process = Server { id: server, incarnation, address };
        for name in self.common.index.users_of(&process) {
            self.visit(&name, run, |job, cx| {
                let holds = ids.contains(&job.id);
                job.abandoned_by(&process, holds, cx);
            });
        }
        for name in self.common.index.recovering() {
            self.visit(&name, run, Job::try_recover);
        }
        // After the server was told to close what it holds of an earlier placement.
        for name in self.common.index.short() {
            self.visit(&name, run, Job::restore_redundancy);
        }
        self.probe_missing(run);
    }

    /// A worker may have asked for the job before a server has described it. It asks again.
    /// And a server that was away may have described an earlier job of the name, or this job
    /// without steps and epochs that another coordinator has made since.
    fn make_way_for(&mut self, held: &Held, server: ServerId, run: &mut Run<'_>) {
        let name = &held.spec.name;
        let Some(found) = self.jobs.get(name) else { return };
        if found.is_new() {
            let error = unknown_yet(name);
            self.visit(name, run, |job, cx| job.give_way(&error, cx));
        } else if found.id != held.id && found.is_older_than(held) {
            let error = Error::JobReplaced { job: name.clone() };
            self.visit(name, run, |job, cx| job.give_way(&error, cx));
        } else if found.lacks_what(held) {
            self.learn_again(name, server, run);
        }
    }

    /// Another coordinator has had an open job meanwhile. Its servers keep it, and those other than
    /// `server` describe it again. Its ranks keep their leases, and open new streams.
    fn learn_again(&mut self, name: &str, server: ServerId, run: &mut Run<'_>) {
        let servers = &self.common.servers;
        let placement = self.jobs.get(name).and_then(|job| job.phase.placement());
        let placed = placement.into_iter().flat_map(|placement| placement.servers());
        let others = placed.map(|of| of.id).filter(|&other| other != server);
        let link = |server| Some(Link { server, stream: servers.get(server)?.stream });
        let links: Vec<Link> = others.filter_map(link).collect();
        self.visit(name, run, Job::learn_again);
        let cause = format!("another coordinator has had job {name:?} meanwhile");
        links.into_iter().for_each(|link| self.server_lost(link, &cause, run));
    }

    /// A server is about to stop. No further slices are placed on it. Jobs that would be lost are
    /// saved first, if they have a checkpoint policy.
    ///
    /// A departing server keeps its jobs until the coordinator releases it, or until its time limit
    /// has passed. Jobs with replicas are not saved, because their backups take over when the
    /// server has stopped.
    fn departing(&mut self, server: ServerId, run: &mut Run<'_>) {
        let note = format!("{} is about to stop", self.common.servers.name(server));
        run.out.push(Action::Note(note));
        self.common.servers.depart(server);
        self.visit_users(server, run, |job, cx| {
            if job.spec.replicas <= 1 && job.phase.uses(server) {
                job.save_last(cx);
            }
        });
    }

    /// Releases the departing servers of which no job is being saved.
    fn release(&mut self, run: &mut Run<'_>) {
        let Common { servers, index, .. } = &mut self.common;
        let released: Vec<ServerId> =
            servers.unreleased().filter(|&server| !index.saves_on(server)).collect();
        for server in released {
            servers.release(server);
            run.out.push(Action::Command(server, Command::Release));
        }
    }

    /// Cordons a server, or uncordons it.
    fn set_cordoned(&mut self, name: &str, cordoned: bool, run: &mut Run<'_>) -> Result<Server> {
        let server = self.common.servers.find(name).map_err(|unknown| {
            match self.common.learning.is_learning() {
                true => Error::Unavailable {
                    peer: format!("shard server {name:?}"),
                    cause: "the coordinator was started, and the server has not connected".into(),
                },
                false => unknown,
            }
        })?;
        if self.common.servers.set_cordoned(server.id, cordoned) {
            run.out.push(Action::Command(server.id, Command::Cordon { cordoned }));
            let what = if cordoned { "cordoned" } else { "no longer cordoned" };
            let note = format!("{} is {what}", self.common.servers.name(server.id));
            run.out.push(Action::Note(note));
        }
        if !cordoned {
            // Any job may have refused it.
            let names: Vec<String> = self.jobs.keys().cloned().collect();
            for name in names {
                self.visit(&name, run, |job, cx| job.uncordoned(server.id, cx));
            }
        }
        Ok(server)
    }

    /// Cordons a server, and begins or continues to move its slices to other servers. A lost server
    /// is not missed any more, if no job waits for it.
    fn drain(&mut self, name: &str, restore: bool, run: &mut Run<'_>) -> Result<Drained> {
        let server = match self.set_cordoned(name, true, run) {
            Ok(server) => server,
            Err(unknown) => {
                let missing = self.common.servers.find_missing(name).ok_or(unknown.clone())?;
                if self.jobs.values().any(|job| job.phase.uses(missing.id)) {
                    return Err(unknown);
                }
                self.common.servers.forget_missing(missing.id);
                let name = self.common.servers.name_at(missing.id, &missing.address);
                run.out.push(Action::Note(format!("{name} is not missed any more")));
                return Ok(Drained { server: missing, stays: Vec::new(), degraded: 0 });
            }
        };
        let mut stays = Vec::new();
        self.visit_users(server.id, run, |job, cx| {
            stays.extend(job.move_off(&server, restore, cx).err());
        });
        let degraded = self.jobs.values().map(Job::degraded_slices).sum();
        Ok(Drained { server, stays, degraded })
    }
}

/// The time of an event, and its actions so far.
struct Run<'a> {
    now: Now,
    out: &'a mut Vec<Action>,
}
