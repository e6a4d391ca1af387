//! The jobs of which a server holds slices.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use dashmap::{DashMap, Entry};
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};
use zeroshard_net::Deadline;
use zeroshard_proto::pb;
use zeroshard_shard::{budget::Budget, device::Device, fair::Resources};

use super::{job::Job, stall::Readers, windows::Windows};
use crate::{config::MAX_WAIT, failure::Failure, memory::Budgets, metrics::Metrics};

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
    /// The resources that jobs share by weight.
    pub(crate) resources: Resources,
    pub(crate) budget: Arc<Budget>,
    /// The budget for the memory that pulls hold before they send it.
    pub(crate) held: Arc<Budget>,
    /// The budget for the versions that readers have pinned.
    pub(crate) pinned: Arc<Budget>,
    /// The budget for what steps have changed, for readers that follow a job.
    pub(crate) history: Arc<Budget>,
    /// The budget for second copies of slices that are being saved.
    pub(crate) snapshots: Arc<Budget>,
    pub(crate) readers: Readers,
    /// The memory that this server shares with workers on its host.
    pub(super) windows: Arc<Windows<B>>,
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
        let store = Self {
            devices: devices.into(),
            resources: Resources::new(),
            budget: Budget::new(limits.budgets.parked),
            held: Budget::new(limits.budgets.held),
            pinned: Budget::new(limits.budgets.pinned),
            history: Budget::new(limits.budgets.history),
            snapshots: Budget::new(limits.budgets.snapshots),
            readers: Readers::default(),
            windows: Arc::new(Windows::new(limits.budgets.outboxes, metrics.shard.clone())),
            limits,
            metrics,
            failure,
            jobs: DashMap::new(),
            closing: Mutex::default(),
        };
        store.metrics.shard.begin();
        store.show_limits();
        store
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

    /// Returns whether a job with this id is open.
    pub(crate) fn holds(&self, id: u64) -> bool {
        self.jobs.iter().any(|job| job.id == id)
    }

    /// Registers an opened job, which may have been closed meanwhile.
    pub(crate) fn insert(&self, job: Arc<Job<B>>) {
        // The entry keeps an earlier job of this name from removing the series of this one.
        let entry = self.jobs.entry(job.spec.name.clone());
        job.show_in(&self.metrics.shard);
        entry.insert(job.clone());
        if job.closed().is_cancelled() {
            self.close(&job.spec.name, job.id);
        }
    }

    /// Ends the calls of a job; its memory is freed when the last call has released it.
    pub(crate) fn close(&self, name: &str, id: u64) {
        if let Entry::Occupied(entry) = self.jobs.entry(name.to_owned())
            && entry.get().id == id
        {
            self.metrics.shard.forget(name);
            self.windows.forget(id);
            let mut closing = self.closing.lock().expect("no holder of the lock panics");
            closing.retain(|memory| memory.strong_count() > 0);
            closing.push(entry.get().memory_in_use());
            drop(closing);
            entry.remove().close();
        }
    }

    /// Returns whether the memory of closed jobs is still being freed.
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
        let mut windows = self.windows.by_job();
        for job in self.jobs() {
            job.end_follows();
            let memory = job.memory();
            stats.master_bytes += memory.master;
            stats.state_bytes += memory.state;
            stats.accumulator_bytes += memory.accumulator;
            stats.published_bytes += memory.published;
            let [sent_bytes, received_bytes] = job.transferred();
            let (windows, no_window) = windows.remove(&job.id).unwrap_or_default();
            stats.jobs.push(pb::JobStats {
                sent_bytes,
                received_bytes,
                windows,
                no_window,
                readers: job.readers(),
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

    /// Shows the memory and the jobs in the metrics.
    pub(super) fn show(&self, stats: &pb::Stats) {
        let metrics = &self.metrics.shard;
        for (kind, bytes) in [
            ("master", stats.master_bytes),
            ("state", stats.state_bytes),
            ("accumulator", stats.accumulator_bytes),
            ("published", stats.published_bytes),
            ("parked", stats.parked_bytes),
            ("pinned", self.pinned.used()),
            ("snapshot", self.snapshots.used()),
            ("history", self.history.used()),
        ] {
            metrics.show_memory(kind, bytes);
        }
        for backend in self.devices.iter().map(|device| &device.backend) {
            if let Some(usage) = backend.usage() {
                metrics.show_device(backend.device(), &usage);
            }
        }
        for (tier, used, _) in self.tiers() {
            metrics.show_tier(tier, used);
        }
        for job in &stats.jobs {
            // The reference keeps the job from being closed meanwhile.
            if let Some(job) = self.jobs.get(&job.job) {
                job.show_in(metrics);
            }
        }
    }

    /// Shows the limits of the budgets, which do not change.
    fn show_limits(&self) {
        let metrics = &self.metrics.shard;
        metrics.show_limit("memory", self.limits.budgets.memory);
        for (kind, budget) in [
            ("parked", &self.budget),
            ("pinned", &self.pinned),
            ("snapshot", &self.snapshots),
            ("history", &self.history),
        ] {
            metrics.show_limit(kind, budget.limit());
        }
        for (tier, _, limit) in self.tiers() {
            metrics.show_limit(tier, limit);
        }
    }

    /// The tiers that have a budget: name, used bytes and limit.
    pub(super) fn tiers(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        let tiers: Vec<_> =
            self.devices.iter().filter_map(|device| device.tiers.as_ref()).collect();
        // Devices share host memory and the disk.
        let on_devices = tiers.iter().map(|tiers| tiers.used()[0]).sum();
        let of_devices = tiers.iter().map(|tiers| tiers.limits()[0]).sum();
        let shared = tiers.first().map(|tiers| (tiers.used(), tiers.limits()));
        let all = shared.map(|([_, host, disk], [_, of_host, of_disk])| {
            [("device", on_devices, of_devices), ("host", host, of_host), ("disk", disk, of_disk)]
        });
        all.into_iter().flatten().filter(|(_, _, limit)| *limit > 0)
    }

    pub(super) fn jobs(&self) -> Vec<Arc<Job<B>>> {
        self.jobs.iter().map(|job| job.value().clone()).collect()
    }
}
