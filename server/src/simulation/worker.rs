//! A worker, which does what the client does: creates and joins the job, uploads the parameters,
//! and makes steps, again if they are aborted.

use std::{collections::BTreeMap, collections::BTreeSet, sync::Arc, time::Duration};

use bytes::Bytes;
use zeroshard_coordinator::{
    state::memberships::Change,
    vocabulary::{
        calls::{Attach, Commit, Create, Join, RankData, Reply, Save, Turn},
        decision::Report,
        events::Event,
        ids::{Caller, JobRef, Lease, Now},
    },
};
use zeroshard_model::{Attempt, Error, Line, Placement, Restore, RestoreVersion};

use super::{
    checkpoints::{URL, user_data},
    data::Request,
    safeguard::{Safeguard, is_missing},
    server::REPEAT,
    world::{Happening, JOB, World, spec},
};

mod transfers;

/// How long calls may wait.
const WAIT: Duration = Duration::from_secs(60);
/// The pause after a call that has failed, at most.
const PAUSE: Duration = Duration::from_millis(500);

/// What a worker hears from the coordinator.
#[derive(Debug)]
pub(super) enum Told {
    Answer(Caller, Result<Reply, Box<Error>>),
    CallBroken(Caller),
    Membership(Box<Change>),
    StreamBroken,
    StreamEnded(Option<Error>),
}

/// The open call to the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Create,
    Join,
    Attach,
    Commit,
    UserData,
    Save,
}

impl Call {
    /// Returns whether it is about the membership, and not about a step.
    fn enters(self) -> bool {
        matches!(self, Self::Create | Self::Join | Self::Attach)
    }
}

/// A process of a worker, and those before it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) life: u64,
    pub(super) is_alive: bool,
    pub(super) lease: Option<Lease>,
    /// The next step.
    pub(super) step: u64,
    /// `true` if the process will end before it commits. Its gradients are wrong.
    is_doomed: bool,
    has_created: bool,
    has_joined: bool,
    pub(super) has_stream: bool,
    /// The coordinator that it has reached last.
    pub(super) at: Option<usize>,
    /// The open calls: one for its membership and one for its step at most.
    calls: BTreeMap<Caller, Call>,
    /// It has joined, and the first membership has not arrived.
    awaits_membership: bool,
    /// No call before this time.
    quiet_until: Now,
    job: u64,
    epoch: u64,
    /// An error has named this epoch; nothing is pushed before it is announced.
    known_epoch: u64,
    version: Option<u64>,
    placement: Option<Arc<Placement>>,
    /// The slices that were uploaded in this epoch, with the servers.
    uploaded: BTreeSet<(u32, u64)>,
    pulled: BTreeSet<u32>,
    /// The slices of the next version that were pulled while the step is committed.
    pulled_next: BTreeSet<u32>,
    /// The parts of slices that were pushed in this epoch, by their first elements.
    pushed: BTreeSet<(u32, usize)>,
    /// The parts of new values that were sent in this epoch, by slice, first element and server.
    replaced: BTreeSet<(u32, usize, u64)>,
    /// The step was decided before, so that nothing has to be pushed.
    is_decided: bool,
    /// `true` if the data of the rank for checkpoints of its last step has not been sent.
    owes_data: bool,
    /// The latest version for which this process has begun to send its data. It sends the data to a
    /// new coordinator as well, since the answer of an earlier one may still be under way.
    sent_data: u64,
    /// The first epoch after the last restoration of the job.
    restored_in: u64,
    line: Arc<Line>,
    /// When requests were sent.
    asked: BTreeMap<(u8, u32, u64), Now>,
}

impl Worker {
    pub(super) fn new() -> Self {
        Self {
            life: 0,
            is_alive: false,
            lease: None,
            step: 0,
            is_doomed: false,
            has_created: false,
            has_joined: false,
            has_stream: false,
            at: None,
            calls: BTreeMap::new(),
            awaits_membership: false,
            quiet_until: Now::ZERO,
            job: 0,
            epoch: 0,
            known_epoch: 0,
            version: None,
            placement: None,
            uploaded: BTreeSet::new(),
            pulled: BTreeSet::new(),
            pulled_next: BTreeSet::new(),
            pushed: BTreeSet::new(),
            replaced: BTreeSet::new(),
            is_decided: false,
            owes_data: false,
            sent_data: 0,
            restored_in: 0,
            line: Arc::default(),
            asked: BTreeMap::new(),
        }
    }

    /// Returns whether it has joined a job whose parameters have been uploaded.
    pub(super) fn trains(&self) -> bool {
        self.version.is_some()
    }

    /// The batch of a step on the line that it knows.
    pub(super) fn batch(&self, step: u64) -> u64 {
        self.line.batch(step)
    }

    /// From now on the gradients are wrong, and no step is committed.
    pub(super) fn doom(&mut self) {
        self.is_doomed = true;
    }

    /// Ends what [`Self::doom`] began, for a worker that lives on.
    pub(super) fn spare(&mut self) {
        self.is_doomed = false;
    }

    fn attempt(&self) -> Attempt {
        Attempt::first(self.epoch, self.step)
    }

    /// The latest attempt that it knows, for a new coordinator, which may not know the epoch that
    /// an error has named.
    fn latest_attempt(&self) -> Attempt {
        Attempt::first(self.epoch.max(self.known_epoch), self.step)
    }

    /// Learns of a membership.
    fn learn(&mut self, change: Change) {
        if !self.has_joined {
            self.step = change.version.unwrap_or(0);
            self.calls.clear();
        } else if let Some((_, version)) = change.restored.filter(|of| of.0 > self.restored_in) {
            self.roll_back(version);
        }
        self.restored_in = change.restored.map_or(self.restored_in, |(epoch, _)| epoch);
        self.line = change.line;
        self.awaits_membership = false;
        (self.has_joined, self.has_stream, self.job) = (true, true, change.job_id);
        self.version = self.version.or(change.version);
        self.placement = change.placement.or(self.placement.take());
        if change.epoch > self.epoch {
            self.epoch = change.epoch;
            self.forget_pushes();
        }
    }

    fn forget_pushes(&mut self) {
        self.pushed.clear();
        self.replaced.clear();
        self.uploaded.clear();
        self.asked.clear();
    }

    /// The job has returned to a checkpoint.
    fn roll_back(&mut self, version: u64) {
        self.calls.clear();
        self.version = Some(version);
        self.step = version;
        self.pulled.clear();
        self.pulled_next.clear();
        (self.is_decided, self.owes_data, self.sent_data) = (false, false, 0);
    }

    /// An error names an epoch.
    fn wait_for_epoch(&mut self, epoch: u64) {
        self.known_epoch = self.known_epoch.max(epoch);
    }

    /// The step is committed.
    fn advance(&mut self) {
        self.step += 1;
        self.version = Some(self.step);
        self.pulled = std::mem::take(&mut self.pulled_next);
        self.is_decided = false;
        self.forget_pushes();
    }

    /// Returns whether a request for parameters has been answered.
    fn has(&self, request: &Request) -> bool {
        matches!(request, Request::Pull { slice, .. } if self.pulled.contains(slice))
    }

    /// Returns whether a request for parameters is of an earlier epoch.
    fn is_stale(&self, request: &Request) -> bool {
        matches!(request, Request::Pull { epoch, .. } if *epoch < self.epoch)
    }

    /// Returns whether a request is due: it has not been sent for a while.
    fn is_due(&mut self, key: (u8, u32, u64), now: Now) -> bool {
        let is_due = self.asked.get(&key).is_none_or(|at| *at + REPEAT <= now);
        if is_due {
            self.asked.insert(key, now);
        }
        is_due
    }
}

impl World {
    pub(super) fn worker_starts(&mut self, rank: u32) {
        let worker = &mut self.workers[rank as usize];
        if worker.is_alive {
            return;
        }
        let life = worker.life + 1;
        *worker = Worker { life, is_alive: true, ..Worker::new() };
        self.later(Happening::Wake { rank, life, again: true });
    }

    pub(super) fn kill_worker(&mut self, rank: u32) {
        let life = self.workers[rank as usize].life;
        self.workers[rank as usize] = Worker { life, ..Worker::new() };
        self.disconnect(rank, life);
    }

    /// Calls the coordinator.
    fn begin_call(&mut self, rank: u32, call: Call, event: impl FnOnce(Caller, &Worker) -> Event) {
        let caller = self.call(rank, event);
        self.workers[rank as usize].calls.insert(caller, call);
    }

    pub(super) fn wake(&mut self, rank: u32, life: u64, again: bool) {
        let worker = &self.workers[rank as usize];
        let has_ended = worker.step >= self.size.steps && self.size.save_every.is_none();
        if worker.life != life || !worker.is_alive || has_ended {
            return;
        }
        if again {
            let wait = Duration::from_micros(500 + self.rng.u64(..20_000));
            self.after(wait, Happening::Wake { rank, life, again });
        }
        self.act_for(rank);
    }

    fn act_for(&mut self, rank: u32) {
        let now = self.now;
        let worker = &self.workers[rank as usize];
        let is_quiet = worker.quiet_until > now || worker.awaits_membership;
        let enters = worker.calls.values().any(|call| call.enters());
        let commits = worker.calls.values().any(|call| !call.enters());
        if !worker.has_joined || !worker.has_stream {
            if !is_quiet && !enters {
                self.enter(rank);
            }
            return;
        }
        let can_call = !is_quiet && !commits;
        if worker.version.is_none() {
            return self.upload(rank);
        }
        if worker.known_epoch > worker.epoch {
            return;
        }
        if worker.owes_data || worker.step >= self.size.steps {
            return if can_call {
                self.end_step(rank)
            };
        }
        let slices = self.slices();
        let worker = &self.workers[rank as usize];
        let has_all =
            |pulled: &BTreeSet<u32>| slices.iter().all(|(slice, ..)| pulled.contains(slice));
        if !worker.is_decided && !has_all(&worker.pulled) {
            let step = worker.step;
            return self.pull(rank, step);
        }
        if !worker.is_decided {
            let is_pushed = self.push(rank);
            if !self.replace(rank) || !is_pushed {
                return;
            }
        }
        let worker = &self.workers[rank as usize];
        if worker.is_doomed {
            return;
        }
        if can_call {
            self.commit(rank);
        }
        let next = self.workers[rank as usize].step + 1;
        self.pull(rank, next);
    }

    /// Creates the job, joins it, or continues with a lease.
    fn enter(&mut self, rank: u32) {
        let random = self.rng.u64(1..u64::MAX);
        let spec = spec(self.size);
        let worker = &self.workers[rank as usize];
        let name = || JOB.to_owned();
        if !worker.has_created && !worker.has_joined {
            return self.begin_call(rank, Call::Create, move |caller, _| {
                let version = RestoreVersion::LatestIfAny;
                let (url, job) = (URL.to_owned(), JOB.to_owned());
                let restore = Restore { url, job, version, line: None };
                let restore = spec.checkpoints.is_some().then_some(restore);
                let create = Create { spec, fork: None, restore, quota: None };
                Event::Create { caller, job_id: random, create: Box::new(create), wait: WAIT }
            });
        }
        if !worker.has_joined {
            self.workers[rank as usize].lease = Some(Lease(random));
            return self.begin_call(rank, Call::Join, move |caller, _| {
                let (lease, address) = (Lease(random), None);
                let join =
                    Join { job: name(), rank, address, lease, rank_wait: WAIT / 2, wait: WAIT };
                Event::Join { caller, join }
            });
        }
        self.begin_call(rank, Call::Attach, move |caller, worker| {
            let job = JobRef { name: name(), id: worker.job };
            let lease = worker.lease.expect("it has joined");
            let attempt = worker.latest_attempt();
            let version = worker.sent_data;
            let user_data = (version > 0).then(|| (version, user_data(rank, version)));
            let attach = Attach { job, rank, address: None, lease, attempt, user_data };
            Event::Attach { caller, attach }
        });
    }

    fn commit(&mut self, rank: u32) {
        // Without the safeguard, the coordinator does not wait for the data.
        let user_data_follows = self.size.save_every.is_some() && !is_missing(Safeguard::UserData);
        self.begin_call(rank, Call::Commit, move |caller, worker| {
            let job = JobRef { name: JOB.to_owned(), id: worker.job };
            let lease = worker.lease.expect("it has joined");
            let commit = Commit {
                turn: Turn { job, lease, rank, attempt: worker.attempt() },
                groups: None,
                loss_scale: 1.0,
                max_norm: Some(1.0),
                loss: Some(f64::from(rank) + worker.step as f64),
                gradient_factors: Vec::new(),
                written: Vec::new(),
                user_data: Bytes::new(),
                user_data_follows,
                wait: WAIT,
            };
            Event::Commit { caller, commit: Box::new(commit) }
        });
    }

    /// Sends the data of a rank for checkpoints. At the end of the run, asks for a checkpoint.
    fn end_step(&mut self, rank: u32) {
        let job = |worker: &Worker| JobRef { name: JOB.to_owned(), id: worker.job };
        let worker = &mut self.workers[rank as usize];
        if worker.owes_data {
            worker.sent_data = worker.step;
            return self.begin_call(rank, Call::UserData, |caller, worker| {
                let lease = worker.lease.expect("it has joined");
                let data = user_data(rank, worker.step);
                let job = job(worker);
                let data = RankData { job, rank, lease, version: worker.step, data };
                Event::UserData { caller, data }
            });
        }
        if rank == 0 {
            self.begin_call(rank, Call::Save, |caller, worker| {
                let save = Save { job: job(worker), url: None, unless_saved: true, wait: WAIT };
                Event::Save { caller, save }
            });
        }
    }

    pub(super) fn told(&mut self, rank: u32, life: u64, told: Told) {
        let now = self.now;
        let pause = Duration::from_micros(self.rng.u64(..PAUSE.as_micros() as u64));
        let worker = &mut self.workers[rank as usize];
        if worker.life != life || !worker.is_alive {
            return;
        }
        match told {
            Told::Membership(change) => {
                if let Some(restored) = change.restored {
                    self.decisions.returned(change.job_id, restored);
                }
                worker.learn(*change);
            }
            // The coordinator learns the job again, in which the worker keeps its lease.
            Told::StreamBroken | Told::StreamEnded(Some(Error::Unavailable { .. })) => {
                worker.has_stream = false;
                worker.awaits_membership = false;
                // The answer of a process that has ended may still be under way.
                worker.calls.retain(|_, call| !call.enters());
            }
            Told::StreamEnded(error) => {
                self.end_lease(rank, &format!("the lease of rank {rank} has ended: {error:?}"));
            }
            Told::CallBroken(caller) => {
                worker.calls.remove(&caller);
                worker.quiet_until = now + pause;
            }
            Told::Answer(caller, answer) => {
                let Some(call) = worker.calls.remove(&caller) else { return };
                match answer {
                    Ok(reply) => self.replied(rank, call, reply),
                    Err(error) => {
                        worker.quiet_until = now + pause / 10;
                        self.refused_call(rank, call, *error);
                    }
                }
            }
        }
        self.later(Happening::Wake { rank, life, again: false });
    }

    fn replied(&mut self, rank: u32, call: Call, reply: Reply) {
        let worker = &mut self.workers[rank as usize];
        match (call, reply) {
            (Call::Create, Reply::Created { .. }) => worker.has_created = true,
            // The first membership follows, unless it has arrived before.
            (Call::Join, Reply::Joined) => worker.awaits_membership = !worker.has_joined,
            (Call::Attach, Reply::Joined) => worker.awaits_membership = !worker.has_stream,
            (Call::Commit, Reply::Report(report, _)) => self.committed(rank, report),
            (Call::UserData, Reply::UserDataStored) => worker.owes_data = false,
            (Call::Save, Reply::Saved(_)) => {}
            (call, reply) => self.fail(format!("{reply:?} answers {call:?}")),
        }
    }

    fn committed(&mut self, rank: u32, report: Report) {
        let Worker { step, ref line, .. } = self.workers[rank as usize];
        let batches = self.batches(line, step + 1);
        if report.version != step + 1 {
            return self.fail(format!("step {step} has the report of version {}", report.version));
        }
        let outcome = self.record.reported(batches, report);
        self.check(outcome);
        let worker = &mut self.workers[rank as usize];
        worker.advance();
        worker.owes_data = self.size.save_every.is_some();
    }

    /// The lease of a rank has ended by no fault of its process: the program ends, and is started
    /// again. This happens only to a job that all servers have lost together with the coordinator,
    /// and to ranks that have lost a coordinator that runs on.
    fn end_lease(&mut self, rank: u32, cause: &str) {
        let is_lost = self.size.save_every.is_some() && self.nobody_held;
        if !is_lost && self.coordinators.len() == 1 {
            return self.fail(cause.to_owned());
        }
        self.kill_worker(rank);
        self.later(Happening::WorkerStarts { rank });
    }

    /// An error of a call to the coordinator. It is repeated, unless the error is final.
    fn refused_call(&mut self, rank: u32, call: Call, error: Error) {
        let worker = &mut self.workers[rank as usize];
        match error {
            Error::Unavailable { .. } | Error::Timeout { .. } | Error::RankTaken { .. } => {}
            Error::StepAborted { epoch, .. } | Error::StaleEpoch { current: epoch, .. } => {
                worker.wait_for_epoch(epoch);
            }
            Error::StepMismatch { current, .. } if current > worker.step => {
                worker.is_decided = true;
            }
            // A new coordinator does not know the job yet. The program ends, and is started again.
            Error::UnknownJob { .. } if call == Call::Join => {
                self.kill_worker(rank);
                self.later(Happening::WorkerStarts { rank });
            }
            // The membership names the version.
            Error::RolledBack { .. } => {}
            // The storage fails at times.
            Error::Storage { .. } if matches!(call, Call::Save | Call::Create) => {}
            // A server could not read the checkpoint of a job that starts.
            Error::JobFailed { .. } if call == Call::Create => {}
            Error::UnknownJob { .. } | Error::JobReplaced { .. } | Error::LeaseLost { .. } => {
                self.end_lease(rank, &format!("{call:?} of rank {rank}: {error}"));
            }
            error => self.fail(format!("{call:?} of rank {rank}: {error}")),
        }
    }
}
