//! Checkpoints: servers write their slices to a virtual store, from which the job starts, and to
//! which it returns.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bytes::Bytes;
use zeroshard_checkpoint::Part;
use zeroshard_coordinator::{
    placement::plan::Plan,
    state::user_data::UserData,
    vocabulary::{
        commands::Checkpoint,
        events::{Completion, Event, Placed, Placing},
    },
};
use zeroshard_kernels::Cpu;
use zeroshard_model::{AppliedSteps, Error, RestoreVersion, Result};
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
    /// The complete checkpoints, by version, with the ids of their jobs.
    complete: BTreeMap<u64, (u64, Slices)>,
}

impl Store {
    /// Removes all checkpoints but the latest.
    fn keep(&mut self, number: usize) {
        while self.complete.len() > number {
            self.complete.pop_first();
        }
    }

    /// The latest version, and the id of its job.
    pub(super) fn latest(&self) -> Option<(u64, u64)> {
        self.complete.last_key_value().map(|(&version, &(id, _))| (version, id))
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
            let (checkpoint, user_data) = found?;
            let user_data = UserData::restored(user_data, &[]);
            Ok(Placed { plan, checkpoint, user_data })
        });
        let event = Box::new(Event::Placed { job: placing.job, placed });
        self.later(Happening::Event { life, stream: None, event });
    }

    /// The checkpoint from which a job starts, and the data of its ranks.
    fn find(&self, placing: &Placing) -> Result<(Option<Checkpoint>, BTreeMap<u32, Bytes>)> {
        let Some(restore) = &placing.restore else { return Ok(Default::default()) };
        match (self.store.latest(), restore.version) {
            (Some((version, job_id)), _) => {
                let (url, job) = (URL.to_owned(), JOB.to_owned());
                let checkpoint = Checkpoint { url, job, job_id, version };
                Ok((Some(checkpoint), self.user_data(version)))
            }
            (None, RestoreVersion::LatestIfAny) => Ok(Default::default()),
            (None, _) => {
                let (url, job) = (URL.to_owned(), JOB.to_owned());
                Err(Error::NoCheckpoint { url, job, version: "any version".to_owned() })
            }
        }
    }

    /// The slices of a checkpoint, when a server has read them.
    pub(super) fn checkpoint(&mut self, version: u64) -> Result<Slices> {
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
        let Completion { job, plan, user_data, .. } = completion;
        let fails = self.faults.loses(&mut self.rng);
        let outcome = match (fails, self.store.complete.get(&plan.version)) {
            (true, _) => Err("the disk is full"),
            (false, Some((id, _))) if *id != job.id => Err("an earlier job is saved there"),
            (false, Some(_)) => Ok(1),
            (false, None) => {
                self.check_user_data(plan.version, &user_data);
                let slices = self.store.written.remove(&plan.save).unwrap_or_default();
                self.check_saved(plan.version, &slices);
                self.store.complete.insert(plan.version, (job.id, slices));
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

    fn check_saved(&mut self, version: u64, slices: &Slices) {
        let expected: BTreeSet<u32> = (0..).take(spec(self.size).manifest.slices().len()).collect();
        if !slices.keys().eq(&expected) {
            return self.fail(format!("the checkpoint of version {version} has {slices:?}"));
        }
        for (slice, content) in slices {
            let outcome = self.record.saved(version, *slice, content);
            self.check(outcome);
        }
    }
}
