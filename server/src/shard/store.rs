//! The jobs that a server holds slices of.

use std::{
    collections::HashMap,
    sync::{Arc, RwLock},
    time::Duration,
};

use zeroshard_proto::{Error, Result, pb};

use super::{
    budget::Budget,
    job::{Deadline, Job},
};
use crate::{backend::Backend, config::MAX_WAIT, metrics::Metrics};

/// How much pulls may hold of slices that they do not send yet. A step needs as much memory beside what is held.
const PINNED_BYTES: u64 = 256 << 20;

/// What a caller may cost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How long a call waits that does not say.
    pub(crate) wait: Duration,
    /// The longest data-plane message, in bytes.
    pub(crate) max_message: usize,
    /// Gradients that came before their turn, in bytes.
    pub(crate) parked_bytes: u64,
}

/// All jobs of one server.
pub(crate) struct Store<B: Backend> {
    pub(crate) backend: Arc<B>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) budget: Arc<Budget>,
    /// For what pulls hold before they send it.
    pub(crate) pins: Arc<Budget>,
    jobs: RwLock<HashMap<String, Arc<Job<B>>>>,
}

impl<B: Backend> Store<B> {
    pub(crate) fn new(backend: B, limits: Limits, metrics: Arc<Metrics>) -> Self {
        Self {
            backend: Arc::new(backend),
            budget: Budget::new(limits.parked_bytes),
            pins: Budget::new(PINNED_BYTES),
            limits,
            metrics,
            jobs: RwLock::default(),
        }
    }

    /// # Errors
    /// [`Error::UnknownJob`].
    pub(crate) fn job(&self, name: &str) -> Result<Arc<Job<B>>> {
        let jobs = self.jobs.read().expect("no holder of the lock panics");
        jobs.get(name).cloned().ok_or_else(|| Error::UnknownJob { job: name.to_owned() })
    }

    pub(crate) fn insert(&self, job: Arc<Job<B>>) {
        let mut jobs = self.jobs.write().expect("no holder of the lock panics");
        jobs.insert(job.spec.name.clone(), job);
    }

    pub(crate) fn close(&self, name: &str) {
        let job = self.jobs.write().expect("no holder of the lock panics").remove(name);
        if let Some(job) = job {
            job.close();
        }
        self.metrics.forget_job(name);
    }

    pub(crate) fn close_all(&self) {
        let names: Vec<_> = self.jobs().iter().map(|job| job.spec.name.clone()).collect();
        names.iter().for_each(|name| self.close(name));
    }

    /// When a call that may wait `wait_ms` (0: the default) must have its answer.
    ///
    /// # Errors
    /// [`Error::Invalid`] if that is longer than [`MAX_WAIT`].
    pub(crate) fn deadline(&self, wait_ms: u32) -> Result<Deadline> {
        let wait = match wait_ms {
            0 => self.limits.wait,
            ms => Duration::from_millis(ms.into()),
        };
        if wait > MAX_WAIT {
            let expected = format!("at most {} ms", MAX_WAIT.as_millis());
            return Err(Error::invalid("wait_ms", wait_ms, expected));
        }
        Ok(Deadline::after(wait))
    }

    /// What this server holds now; also brings the metrics up to date.
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
                waiting_for: job.waiting_for().unwrap_or_default(),
                job_id: 0,
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
        for job in &stats.jobs {
            metrics.epoch.with_label_values(&[&job.job]).set(job.epoch as i64);
            if let Some(version) = job.version {
                metrics.version.with_label_values(&[&job.job]).set(version as i64);
            }
        }
    }

    fn jobs(&self) -> Vec<Arc<Job<B>>> {
        self.jobs.read().expect("no holder of the lock panics").values().cloned().collect()
    }
}
