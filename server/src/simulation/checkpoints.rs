//! Checkpoints: servers write their slices to a virtual store, from which the job starts, and to
//! which it returns.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    time::Duration,
};

use bytes::Bytes;
use zeroshard_checkpoint::Part;
use zeroshard_coordinator::{
    placement::plan::Plan,
    state::user_data::UserData,
    vocabulary::{
        calls::Rewind,
        commands::Checkpoint,
        events::{Completion, Event, Placed, Placing, Search, Target},
        ids::{Caller, JobRef},
    },
};
use zeroshard_kernels::Cpu;
use zeroshard_model::{
    AppliedSteps, Error, Line, LineVersion, RecentSteps, RestoreVersion, Result,
};
use zeroshard_shard::events::JobEvent;

use super::{
    data::whole,
    world::{Happening, JOB, World, spec},
};
use crate::shard::job::Job;

/// How long the store needs to find a checkpoint, at most.
const FINDING: Duration = Duration::from_millis(100);
/// How long the store needs to complete a checkpoint, at most.
const COMPLETING: Duration = Duration::from_millis(500);

/// How long an operator waits for the return to a checkpoint.
const REWINDING: Duration = Duration::from_secs(60);

/// Where the checkpoints are.
pub(super) const URL: &str = "file:///checkpoints";

/// The whole content of a slice.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Content {
    pub(super) values: Vec<Bytes>,
    pub(super) applied: AppliedSteps,
}

pub(super) type Slices = BTreeMap<u32, Content>;

/// The store.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// The slices of each save that servers have written.
    written: BTreeMap<u64, Slices>,
    /// The complete checkpoints, with the ids of their jobs.
    complete: BTreeMap<LineVersion, (u64, Slices)>,
    /// The figures in them, for the policy on spikes.
    recent: BTreeMap<LineVersion, RecentSteps>,
    /// The lines that have been claimed, and the version from which each of them begins.
    lines: BTreeMap<u64, (LineVersion, Line)>,
    /// The line that owns the checkpoints.
    line: u64,
}

impl Store {
    /// Returns whether a line has a version, alone or in common with a line that it continues.
    fn is_on(&self, version: LineVersion, mut line: u64) -> bool {
        let mut until = u64::MAX;
        while line != version.line {
            let Some((from, _)) = self.lines.get(&line) else { return false };
            (line, until) = (from.line, until.min(from.version));
        }
        version.version <= until
    }

    /// Returns the complete checkpoints of the current line and of those that it continues.
    fn current(&self) -> impl DoubleEndedIterator<Item = LineVersion> {
        self.complete.keys().copied().filter(|version| self.is_on(*version, self.line))
    }

    /// Removes all checkpoints of the current line but the latest, and those of other lines that it
    /// has passed.
    fn keep(&mut self, number: usize) {
        let current: Vec<LineVersion> = self.current().collect();
        let Some(newest) = current.last() else { return };
        let kept = &current[current.len().saturating_sub(number)..];
        let stays = |of: &LineVersion| kept.contains(of) || of.version > newest.version;
        self.complete.retain(|version, _| stays(version));
    }

    /// Returns a checkpoint to which a job on `line` can return. The next line skips these batches,
    /// too.
    fn target(&self, version: LineVersion, line: &Line, skip: Range<u64>) -> Result<Target> {
        let next = line.next(line.number, version.version, &[skip])?;
        let (url, job, job_id) = (URL.to_owned(), JOB.to_owned(), self.complete[&version].0);
        let to = Checkpoint { url, job, job_id, version };
        Ok(Target { to, skips: next.skips().to_vec() })
    }

    /// The latest version of the current line, and the id of its job.
    pub(super) fn latest(&self) -> Option<(LineVersion, u64)> {
        let version = self.current().next_back()?;
        Some((version, self.complete[&version].0))
    }
}

/// A failure of the store.
fn failure(action: &str, cause: &str) -> Error {
    let (action, cause) = (action.to_owned(), cause.to_owned());
    Error::Storage { action, url: URL.to_owned(), cause }
}

/// The data of a rank in a checkpoint.
pub(super) fn user_data(rank: u32, version: u64) -> Bytes {
    format!("rank {rank} at version {version}").into()
}

/// The content of the slices of which a server is the primary.
pub(super) fn snapshot(job: &Job<Cpu>, version: u64) -> Result<Slices> {
    let content = |index| match whole(job, version, index)? {
        Some((values, applied)) => Ok((index, Content { values, applied })),
        None => Err(Error::Internal { cause: format!("slice {index} is not at {version}") }),
    };
    job.primary_slices().map(|(index, _)| content(index)).collect()
}

/// Fills the slices of a job that is being opened.
pub(super) fn fill(job: &Job<Cpu>, slices: &Slices) -> Result<()> {
    for (index, slice) in job.slices() {
        let Content { values, applied } = &slices[&index];
        let states = (0..values.len() - 1).map(Part::State);
        for (part, values) in [Part::Values].into_iter().chain(states).zip(values) {
            slice.restore(part, 0, values)?;
        }
        slice.set_applied(*applied);
    }
    Ok(())
}

impl World {
    /// Rewinds the job. `back`: how many checkpoints before the last one. `skips`: the new line
    /// skips the next batch.
    pub(super) fn rewind(&mut self, back: usize, skips: bool) {
        let index = self.any_coordinator();
        let coordinator = &self.coordinators[index];
        let job = coordinator.cluster.as_ref().and_then(|cluster| cluster.jobs().get(JOB));
        let Some(line) = job.map(|job| job.line.clone()) else { return };
        let Some(version) = self.store.current().rev().nth(back) else { return };
        let first = line.batch(version.version);
        let skip = if skips { first..first + 1 } else { first..first };
        // The last claim may be for a line that this coordinator does not know yet.
        let Ok(Target { to, skips }) = self.store.target(version, &line, skip) else { return };
        let job = JobRef { name: JOB.to_owned(), id: 0 };
        let coordinator = &mut self.coordinators[index];
        let cluster = coordinator.cluster.as_ref().expect("it has a job");
        let completed = cluster.common().saves.number_completed();
        let rewind = Rewind { job, from: line.number, to, completed, skips, wait: REWINDING };
        let (caller, life) = (Caller(coordinator.next()), coordinator.life);
        let event = Box::new(Event::Rewind { caller, rewind });
        self.later(Happening::Event { life, stream: None, event });
    }

    /// From now on the gradients of a rank are far too large for the batch after the next one. That
    /// one may have been sent already.
    pub(super) fn spike(&mut self, rank: u32) {
        let next = self.workers.iter().map(|worker| worker.batch(worker.step + 2)).max();
        self.spikes.insert(next.expect("there are workers"), rank);
    }

    /// A server begins to write slices.
    pub(super) fn write(&mut self, server: usize, job: u64, save: u64, slices: Result<Slices>) {
        let life = self.servers[server].life;
        let fails = self.faults.loses(&mut self.rng);
        let slices = slices.ok().filter(|_| !fails);
        let written = Happening::Written { server, life, job, save, slices };
        let wait = Duration::from_micros(self.rng.u64(..20_000));
        self.after(wait, written);
    }

    /// A server has written slices; without `slices` it has failed.
    pub(super) fn written(
        &mut self,
        server: usize,
        life: u64,
        (job, save): (u64, u64),
        slices: Option<Slices>,
    ) {
        let of = &mut self.servers[server];
        let running = of.jobs.get_mut(&job).filter(|_| of.is_alive && of.life == life);
        let Some(running) = running else { return };
        // A save that was given up removes its files.
        let is_current = running.save.take_if(|current| *current == save).is_some();
        match slices.filter(|_| is_current) {
            Some(slices) => {
                self.store.written.entry(save).or_default().extend(slices);
                running.job.tell_written(save, Vec::new());
            }
            None => {
                let (url, error) = (URL.to_owned(), failure("write", "the disk is full"));
                running.job.tell(JobEvent::SaveFailed { save, url, error });
            }
        }
        self.flush(server);
    }

    /// The coordinator computes a placement, and looks for the checkpoint from which a job starts.
    pub(super) fn place(&mut self, life: u64, placing: Placing) {
        let takes = Duration::from_micros(self.rng.u64(..FINDING.as_micros() as u64));
        self.after(takes, Happening::Find { life, placing });
    }

    pub(super) fn found(&mut self, life: u64, placing: Placing) {
        let plan = Plan::new(&placing.spec, &placing.live, &placing.zones);
        let fails = placing.restore.is_some() && self.faults.loses(&mut self.rng);
        let found =
            if fails { Err(failure("list", "it is not reachable")) } else { self.find(&placing) };
        let placed = plan.and_then(|plan| {
            let (checkpoint, user_data, line) = found?;
            let saved = checkpoint.as_ref().and_then(|of| self.store.recent.get(&of.version));
            let recent = saved.cloned().unwrap_or_default();
            let user_data = UserData::restored(user_data, &[]);
            Ok(Placed { plan, checkpoint, user_data, line, recent })
        });
        let event = Box::new(Event::Placed { job: placing.job, placed });
        self.later(Happening::Event { life, stream: None, event });
    }

    /// The coordinator looks for the checkpoint to which a job returns after a spike.
    pub(super) fn search(&mut self, life: u64, search: Search) {
        let found = self.store.current().rev().find(|of| of.version <= search.until);
        let none = || {
            let (url, job, version) = (URL.to_owned(), JOB.to_owned(), "any version".to_owned());
            Error::NoCheckpoint { url, job, version }
        };
        let target = |version| self.store.target(version, &search.line, search.skip.clone());
        let found = found.ok_or_else(none).and_then(target);
        let event = Box::new(Event::Searched { search: Box::new(search), found });
        self.later(Happening::Event { life, stream: None, event });
    }

    /// The checkpoint from which a job starts, the data of its ranks, and the line that begins.
    fn find(
        &mut self,
        placing: &Placing,
    ) -> Result<(Option<Checkpoint>, BTreeMap<u32, Bytes>, Line)> {
        let Some(restore) = &placing.restore else { return Ok(Default::default()) };
        let wanted = match restore.version {
            RestoreVersion::Exactly(version) => {
                let wanted = LineVersion { version, line: restore.line.unwrap_or_default() };
                self.store.complete.get(&wanted).map(|(id, _)| (wanted, *id))
            }
            _ => self.store.latest(),
        };
        match (wanted, restore.version) {
            (Some((version, job_id)), _) => {
                let (url, job) = (URL.to_owned(), JOB.to_owned());
                let checkpoint = Checkpoint { url, job, job_id, version };
                let line = self.next_line(placing, version);
                Ok((Some(checkpoint), self.user_data(version.version), line))
            }
            (None, RestoreVersion::LatestIfAny) => Ok(Default::default()),
            (None, _) => {
                let (url, job) = (URL.to_owned(), JOB.to_owned());
                Err(Error::NoCheckpoint { url, job, version: "any version".to_owned() })
            }
        }
    }

    /// The line of a job that starts from a version.
    fn next_line(&mut self, placing: &Placing, version: LineVersion) -> Line {
        let Store { lines, line: owner, .. } = &mut self.store;
        let claimed = lines.get(owner).map(|(_, line)| line.clone()).unwrap_or_default();
        if !placing.returns {
            return claimed;
        }
        let is_requested =
            placing.restore.as_ref().is_some_and(|of| of.version != RestoreVersion::Latest);
        let is_later = claimed.number > placing.line.number && !is_requested;
        let line = if is_later { claimed } else { Line::clone(&placing.line) };
        let last = lines.last_key_value().map_or(0, |(&last, _)| last);
        let number = last.max(line.number) + 1;
        let line = line.numbered(number);
        lines.insert(number, (version, line.clone()));
        *owner = number;
        line
    }

    /// The slices of a checkpoint, when a server has read them.
    pub(super) fn checkpoint(&mut self, version: LineVersion) -> Result<Slices> {
        if self.faults.loses(&mut self.rng) {
            return Err(failure("read", "it is not reachable"));
        }
        let found = self.store.complete.get(&version).map(|(_, slices)| slices.clone());
        // Of two coordinators, one may complete a later version, and remove the one to which the
        // other returns. The other one tries again.
        let is_only = self.coordinators.len() == 1;
        found.ok_or_else(|| {
            if is_only {
                self.fail(format!("version {version} was removed while a server was reading it"));
            }
            failure("read", "no such file")
        })
    }

    /// The coordinator begins to write the manifest.
    pub(super) fn begin_manifest(&mut self, life: u64, completion: Completion) {
        let takes = Duration::from_micros(self.rng.u64(..COMPLETING.as_micros() as u64));
        self.after(takes, Happening::Complete { life, completion });
    }

    /// The coordinator writes the manifest.
    pub(super) fn complete(&mut self, life: u64, completion: Completion) {
        if self.running(life).is_none() {
            return;
        }
        let Completion { job, plan, user_data, recent, .. } = completion;
        let fails = self.faults.loses(&mut self.rng);
        let outcome = match (fails, self.store.complete.get(&plan.version)) {
            (true, _) => Err("the disk is full"),
            (false, Some((id, _))) if *id != job.id => Err("an earlier job is saved there"),
            (false, Some(_)) => Ok(1),
            (false, None) => {
                self.check_user_data(plan.version.version, &user_data);
                let slices = self.store.written.remove(&plan.save).unwrap_or_default();
                self.check_saved(plan.version, &slices);
                self.store.complete.insert(plan.version, (job.id, slices));
                self.store.recent.insert(plan.version, recent);
                // The job continues on this line, whatever a coordinator that was lost has claimed.
                self.store.line = plan.version.line;
                self.store.keep(plan.keep as usize);
                Ok(1)
            }
        };
        let outcome = outcome.map_err(|cause| failure("write", cause));
        let event = Box::new(Event::Completed { job, save: plan.save, outcome });
        self.later(Happening::Event { life, stream: None, event });
    }

    fn check_user_data(&mut self, version: u64, found: &BTreeMap<u32, Bytes>) {
        if *found != self.user_data(version) {
            self.fail(format!("the checkpoint of version {version} has the data {found:?}"));
        }
    }

    fn user_data(&self, version: u64) -> BTreeMap<u32, Bytes> {
        (0..self.size.world).map(|rank| (rank, user_data(rank, version))).collect()
    }

    fn check_saved(&mut self, version: LineVersion, slices: &Slices) {
        let expected: BTreeSet<u32> = (0..).take(spec(self.size).manifest.slices().len()).collect();
        if !slices.keys().eq(&expected) {
            return self.fail(format!("the checkpoint of version {version} has {slices:?}"));
        }
        let line = self.store.lines.get(&version.line).map(|(_, line)| line.clone());
        let batches = self.batches(&line.unwrap_or_default(), version.version);
        for (slice, content) in slices {
            let outcome = self.record.saved(batches.clone(), *slice, content);
            self.check(outcome);
        }
    }
}
