//! The jobs of which a server holds slices.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use dashmap::DashMap;

use zeroshard_proto::{Deadline, Error, Result, pb};

use super::{budget::Budget, device::Device, job::Job, stall::Readers};
use crate::{
    backend::Backend, config::MAX_WAIT, failure::Failure, memory::Budgets, metrics::Metrics,
};

/// The limits on the resources of a caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The waiting time of a call without a deadline.
    pub(crate) wait: Duration,
    /// The longest data-plane message, in bytes.
    pub(crate) max_message: usize,
    /// The memory for each purpose.
    pub(crate) budgets: Budgets,
}

/// All jobs of one server.
pub(crate) struct Store<B: Backend> {
    pub(crate) devices: Arc<[Device<B>]>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) failure: Failure,
    pub(crate) budget: Arc<Budget>,
    /// The budget for the memory that pulls hold before they send it.
    pub(crate) held: Arc<Budget>,
    /// The budget for the versions that readers have pinned.
    pub(crate) pinned: Arc<Budget>,
    /// The budget for second copies of slices that are being saved.
    pub(crate) snapshots: Arc<Budget>,
    pub(crate) readers: Readers,
    /// The jobs, by name.
    jobs: DashMap<String, Arc<Job<B>>>,
    /// The memory of closed jobs that has not been freed when the last one was closed.
    closing: Mutex<Vec<Weak<()>>>,
}

impl<B: Backend> Store<B> {
    pub(crate) fn new(
        devices: Vec<Device<B>>,
        limits: Limits,
        metrics: Arc<Metrics>,
        failure: Failure,
    ) -> Self {
        Self {
            devices: devices.into(),
            budget: Budget::new(limits.budgets.parked),
            held: Budget::new(limits.budgets.held),
            pinned: Budget::new(limits.budgets.pinned),
            snapshots: Budget::new(limits.budgets.snapshots),
            readers: Readers::default(),
            limits,
            metrics,
            failure,
            jobs: DashMap::new(),
            closing: Mutex::default(),
        }
    }

    /// The job with this name and id. A reader may pass 0 for any job with this name.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::JobReplaced`].
    pub(crate) fn job(&self, name: &str, id: u64) -> Result<Arc<Job<B>>> {
        let Some(job) = self.jobs.get(name) else {
            return Err(Error::UnknownJob { job: name.to_owned() });
        };
        if id != 0 && job.id != id {
            return Err(Error::JobReplaced { job: name.to_owned() });
        }
        Ok(job.clone())
    }

    /// Whether a job with this id is open.
    pub(crate) fn holds(&self, id: u64) -> bool {
        self.jobs.iter().any(|job| job.id == id)
    }

    /// Registers an opened job, which may have been closed meanwhile.
    pub(crate) fn insert(&self, job: Arc<Job<B>>) {
        self.jobs.insert(job.spec.name.clone(), job.clone());
        if job.closed().is_cancelled() {
            self.close(&job.spec.name, job.id);
        }
    }

    /// Ends the calls of a job; its memory is freed when the last call has released it.
    pub(crate) fn close(&self, name: &str, id: u64) {
        if let Some((_, job)) = self.jobs.remove_if(name, |_, job| job.id == id) {
            job.close();
            self.metrics.forget_job(name);
            let mut closing = self.closing.lock().expect("no holder of the lock panics");
            closing.retain(|memory| memory.strong_count() > 0);
            closing.push(job.memory_in_use());
        }
    }

    /// Whether the memory of closed jobs is still being freed.
    pub(crate) fn is_releasing(&self) -> bool {
        let closing = self.closing.lock().expect("no holder of the lock panics");
        closing.iter().any(|memory| memory.strong_count() > 0)
    }

    pub(crate) fn close_all(&self) {
        for job in self.jobs() {
            self.close(&job.spec.name, job.id);
        }
    }

    /// The end of waits in a call: its own deadline or the default, and at most [`MAX_WAIT`].
    pub(crate) fn deadline(&self, of_call: Option<Deadline>) -> Deadline {
        of_call.unwrap_or_else(|| Deadline::after(self.limits.wait)).at_most(MAX_WAIT)
    }

    /// The memory and jobs of this server; also updates the metrics.
    pub(crate) fn stats(&self) -> pb::Stats {
        let mut stats = pb::Stats { parked_bytes: self.budget.used(), ..Default::default() };
        for job in self.jobs() {
            let memory = job.memory();
            stats.master_bytes += memory.master;
            stats.state_bytes += memory.state;
            stats.accumulator_bytes += memory.accumulator;
            stats.published_bytes += memory.published;
            stats.jobs.push(pb::JobStats {
                job: job.spec.name.clone(),
                epoch: job.epoch(),
                version: job.version(),
                slices: job.slices().count() as u32,
                waiting_for: job.waiting_for(),
                job_id: job.id,
            });
        }
        self.show(&stats);
        stats
    }

    fn show(&self, stats: &pb::Stats) {
        let metrics = &self.metrics;
        metrics.memory.master.set(stats.master_bytes as i64);
        metrics.memory.state.set(stats.state_bytes as i64);
        metrics.memory.accumulator.set(stats.accumulator_bytes as i64);
        metrics.memory.published.set(stats.published_bytes as i64);
        metrics.memory.parked.set(stats.parked_bytes as i64);
        metrics.memory.pinned.set(self.pinned.used() as i64);
        metrics.memory.snapshot.set(self.snapshots.used() as i64);
        for backend in self.devices.iter().map(|device| &device.backend) {
            if let Some(usage) = backend.usage() {
                metrics.devices.show(backend.device(), &usage);
            }
        }
        let tiers = self.devices.iter().filter_map(|device| device.tiers.as_ref());
        let used: Vec<_> = tiers.map(|tiers| tiers.used()).collect();
        // Devices share host memory and the disk.
        if let Some([_, host, disk]) = used.first() {
            metrics.tiers.device.set(used.iter().map(|[device, ..]| *device as i64).sum());
            metrics.tiers.host.set(*host as i64);
            metrics.tiers.disk.set(*disk as i64);
        }
        for job in &stats.jobs {
            metrics.epoch.with_label_values(&[&job.job]).set(job.epoch as i64);
            if let Some(version) = job.version {
                metrics.version.with_label_values(&[&job.job]).set(version as i64);
            }
        }
    }

    fn jobs(&self) -> Vec<Arc<Job<B>>> {
        self.jobs.iter().map(|job| job.value().clone()).collect()
    }
}
