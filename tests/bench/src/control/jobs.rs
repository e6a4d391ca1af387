//! The jobs of the simulated cluster: their specifications, their set-up, and their steps.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use zeroshard_coordinator::vocabulary::{
    calls::{Commit, Create, Join, Turn},
    commands::ServerEvent,
    events::Event,
    gradient::Reduced,
    ids::{JobRef, Lease, ServerId},
    reports::JobStats,
};
use zeroshard_model::{
    Attempt, DimPlacement, JobSpec, Manifest, ProcessMesh, TensorLayout, TensorSpec,
    geometry::blocks::SLICE,
};

use super::{LARGE, Options, driver::Driver};
use crate::Error;

/// The maximum duration of a call.
const WAIT: Duration = Duration::from_secs(60);
/// The number of tensors of a small job, each of which is one slice.
const SMALL_TENSORS: u64 = 4;

/// Describes the large job. Its tensors have different sizes and are sharded over the ranks: a job
/// of so many ranks and slices would otherwise have more contributions than are allowed.
pub(super) fn large(options: &Options) -> Result<JobSpec, Error> {
    let (world, slices) = (options.ranks, options.slices.get());
    let tensors = options.tensors.get().min(slices);
    let tensor = |index: usize| {
        let number = slices / tensors + usize::from(index < slices % tensors);
        // The last slice of each tensor is shorter than the others.
        let numel = (number - 1) * SLICE + 1 + index * 7919 % SLICE;
        let layout = TensorLayout { mesh: 0, placements: vec![DimPlacement::Shard(0)] };
        TensorSpec {
            layout: Some(layout),
            ..TensorSpec::new(format!("layer.{index}"), [numel as u64])
        }
    };
    let manifest = Manifest::new((0..tensors).map(tensor).collect())?;
    let meshes = vec![Arc::new(ProcessMesh::dense([world as usize], ["dp"])?)];
    let spec = JobSpec { world, meshes, ..JobSpec::new(LARGE, manifest, vec!["adamw".parse()?]) };
    spec.validate()?;
    Ok(spec)
}

/// Describes a job of one rank with a few slices.
pub(super) fn small(number: usize) -> Result<JobSpec, Error> {
    let tensor = |index| TensorSpec::new(format!("layer.{index}"), [1024]);
    let manifest = Manifest::new((0..SMALL_TENSORS).map(tensor).collect())?;
    Ok(JobSpec::new(format!("small-{number}"), manifest, vec!["adamw".parse()?]))
}

/// A job at a version, whose ranks have all joined.
pub(super) struct Job {
    job: JobRef,
    leases: Vec<Lease>,
    /// What each server of the job reports about the gradient: its slices with sums of squares.
    sums: Vec<(ServerId, Vec<(u32, f64)>)>,
    epoch: u64,
    step: u64,
}

impl Job {
    /// Creates a job, has all ranks join, and uploads the initial parameters.
    pub(super) fn start(driver: &mut Driver, id: u64, spec: JobSpec) -> Result<Self, Error> {
        let (job, world) = (JobRef { name: spec.name.clone(), id }, spec.world);
        let create = Box::new(Create { spec, fork: None, restore: None, quota: None });
        let caller = driver.caller();
        driver.send(Event::Create { caller, job_id: id, create, wait: WAIT })?;
        let placement = driver.cluster.job(&job.name)?.describe()?.placement;
        let sums_on = |server: ServerId| {
            let slices = placement.primary_slices(server);
            (server, slices.map(|slice| (slice as u32, 1.0 + slice as f64)).collect())
        };
        let sums = placement.servers().iter().map(|server| sums_on(server.id)).collect();
        let mut started = Self { job, leases: Vec::new(), sums, epoch: 0, step: 0 };
        for rank in 0..world {
            let lease = started.join(driver, rank)?;
            started.leases.push(lease);
        }
        started.epoch = driver.progress(&started.job)?.0;
        for server in started.servers().collect::<Vec<_>>() {
            let (job, epoch) = (started.job.clone(), started.epoch);
            driver.say(server, ServerEvent::Initialised { job, epoch })?;
        }
        started.check(driver, 1 + world as usize)?;
        Ok(started)
    }

    fn join(&self, driver: &mut Driver, rank: u32) -> Result<Lease, Error> {
        let (caller, lease) = (driver.caller(), driver.lease());
        let job = self.job.name.clone();
        let join = Join { job, rank, address: None, lease, rank_wait: WAIT, wait: WAIT };
        driver.send(Event::Join { caller, join })?;
        Ok(lease)
    }

    /// Checks that `calls` calls were answered, and that the job is at its step.
    fn check(&self, driver: &mut Driver, calls: usize) -> Result<(), Error> {
        let (answered, (_, version)) = (driver.take_answered(), driver.progress(&self.job)?);
        if answered != calls || version != Some(self.step) {
            let (name, step) = (&self.job.name, self.step);
            return Err(format!(
                "{answered} of {calls} calls of job {name:?} were answered, and its version is \
                 {version:?} instead of {step}"
            )
            .into());
        }
        Ok(())
    }

    fn attempt(&self) -> Attempt {
        Attempt::first(self.epoch, self.step)
    }

    fn servers(&self) -> impl Iterator<Item = ServerId> {
        self.sums.iter().map(|&(server, _)| server)
    }

    /// Makes a step in which the last rank commits after all servers are ready, or before any of
    /// them is. Returns [`Driver::busy`] before the last rank's commit.
    pub(super) fn step(&mut self, driver: &mut Driver, ready_before: bool) -> Result<f64, Error> {
        let last = self.leases.len() - 1;
        (0..last).try_for_each(|rank| self.commit(driver, rank))?;
        if ready_before {
            self.ready(driver)?;
        }
        let busy = driver.busy();
        self.commit(driver, last)?;
        if !ready_before {
            self.ready(driver)?;
        }
        self.step += 1;
        self.check(driver, self.leases.len())?;
        Ok(busy)
    }

    fn commit(&self, driver: &mut Driver, rank: usize) -> Result<(), Error> {
        let (job, lease, attempt) = (self.job.clone(), self.leases[rank], self.attempt());
        let commit = Box::new(Commit {
            turn: Turn { job, lease, rank: rank as u32, attempt },
            groups: None,
            loss_scale: 1.0,
            max_norm: Some(1.0),
            loss: Some(0.5),
            gradient_factors: Vec::new(),
            written: Vec::new(),
            user_data: Bytes::new(),
            user_data_follows: false,
            wait: WAIT,
        });
        let caller = driver.caller();
        driver.send(Event::Commit { caller, commit })
    }

    /// All servers report their gradients.
    fn ready(&self, driver: &mut Driver) -> Result<(), Error> {
        self.sums.iter().try_for_each(|(server, sums)| {
            let (job, attempt, sums) = (self.job.clone(), self.attempt(), sums.clone());
            let reduced = Reduced {
                sums,
                overflow: None,
                absent: Vec::new(),
                largest: Vec::new(),
                copies: 0,
            };
            driver.say(*server, ServerEvent::Ready { job, attempt, reduced })
        })
    }

    /// The worker of a rank is lost between two steps, and another one joins.
    pub(super) fn replace(&mut self, driver: &mut Driver, rank: usize) -> Result<(), Error> {
        let (job, lease) = (self.job.name.clone(), self.leases[rank]);
        driver.send(Event::LeaseEnded { job, rank: rank as u32, lease })?;
        self.leases[rank] = self.join(driver, rank as u32)?;
        self.epoch = driver.progress(&self.job)?.0;
        self.check(driver, 1)
    }

    /// The number of ranks.
    pub(super) fn world(&self) -> usize {
        self.leases.len()
    }

    /// What each server of the job reports about it once a second.
    pub(super) fn stats(&self) -> impl Iterator<Item = (ServerId, JobStats)> {
        self.sums.iter().map(|(server, sums)| {
            let stats = JobStats {
                job: self.job.name.clone(),
                job_id: self.job.id,
                epoch: self.epoch,
                version: Some(self.step),
                slices: sums.len() as u32,
                ..JobStats::default()
            };
            (*server, stats)
        })
    }
}
