//! A job on this server as its calls and its task see it: the state of the job
//! ([`zeroshard_shard::job`]) with its metrics, traces and pins, and with the messages that
//! describe it to a coordinator.

use std::{
    ops::Deref,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, Error, LineVersion, Result};
use zeroshard_net::trace::{SpanKind, Trace};
use zeroshard_proto::pb;
use zeroshard_shard::{
    events::JobEvent,
    job::{self, Host, Opening, Phase},
    slice::Apply,
};

use super::{captures::Captures, events::Events, lasting::Lasting, pins::Pins};
use crate::metrics::{self, StoredJob};
#[cfg(test)]
use crate::simulation::{Safeguard, is_missing};
pub(crate) use report::being_restored;

mod report;
mod wait;

/// Where the state of a new job comes from.
#[derive(Debug, Clone, Default)]
pub(crate) struct Origin {
    /// A version of another job.
    pub(crate) from: Option<pb::JobVersion>,
    pub(crate) fresh_state: bool,
    /// A checkpoint.
    pub(crate) restore: Option<pb::Restore>,
    /// The line of the job's versions.
    pub(crate) line: pb::Line,
    /// The figures of the steps before the first version, for the policy on spikes.
    pub(crate) recent: Option<pb::RecentSteps>,
}

/// A job on this server.
pub(crate) struct Job<B: Backend> {
    state: job::Job<B, pb::Decision>,
    origin: Origin,
    reports: Arc<Reports>,
    /// The versions that readers have pinned.
    pub(super) pins: Pins<B>,
    /// The capture that waits for its step.
    pub(super) captures: Captures,
    /// The versions that processes on this host map.
    pub(super) lasting: Arc<Lasting>,
}

impl<B: Backend> Deref for Job<B> {
    type Target = job::Job<B, pb::Decision>;

    fn deref(&self) -> &Self::Target {
        &self.state
    }
}

impl<B: Backend> Job<B> {
    /// Opens the job. `events`: those to the coordinator.
    ///
    /// # Errors
    /// Those of [`job::Job::open`].
    pub(crate) fn open(opening: Opening<B>, origin: Origin, events: Events) -> Result<Self> {
        let (job, id) = (opening.spec.name.clone(), opening.id);
        let reports = Arc::new(Reports { job, id, events, series: OnceLock::new() });
        let state = job::Job::open(opening, reports.clone())?;
        let (pins, captures, lasting) = (Pins::default(), Captures::default(), Arc::default());
        Ok(Self { state, origin, reports, pins, captures, lasting })
    }

    /// Takes every slice to the next version; without `apply`, with the same state. Captures the
    /// step if somebody waits for it.
    ///
    /// # Errors
    /// Those of [`job::Job::decide`].
    pub(crate) fn decide(
        &self,
        decision: &Arc<pb::Decision>,
        attempt: Attempt,
        apply: Option<Apply<'_>>,
    ) -> Result<()> {
        self.captures.decide(&self.state, decision, attempt, apply)
    }

    /// The trace of the step of an attempt.
    pub(super) fn trace(&self, attempt: Attempt) -> Trace {
        self.reports.trace(attempt)
    }

    /// The trace of the step that begins with a version.
    pub(super) fn trace_at(&self, version: u64) -> Trace {
        Trace::of_step(self.id, self.epoch(), version)
    }

    /// Shows the job in the metrics.
    pub(super) fn show_in(&self, metrics: &metrics::Shard) {
        self.reports.series.get_or_init(|| metrics.job(&self.spec.name));
        metrics.show_job(&self.spec.name, self.epoch(), self.version());
    }

    /// Counts something in the metrics of the job, if it is shown there.
    pub(super) fn count(&self, count: impl FnOnce(&StoredJob)) {
        self.reports.count(count);
    }

    /// The numbers of payload bytes that the job has sent and received.
    pub(super) fn transferred(&self) -> [u64; 2] {
        self.reports.series.get().map_or([0; 2], |series| series.transferred())
    }

    /// The readers that have asked for changes lately. Also shows their number in the metrics.
    pub(super) fn readers(&self) -> Vec<pb::JobReader> {
        let readers = self.behind();
        self.count(|series| series.show_followers(readers.len()));
        readers.into_iter().map(|(id, lag)| pb::JobReader { id, lag }).collect()
    }

    /// Tells the coordinator that this server's part of a checkpoint is written.
    pub(crate) fn tell_written(&self, save: u64, files: Vec<pb::CheckpointFile>) {
        let Reports { job, id, events, .. } = &*self.reports;
        events.tell_written(job, *id, (save, self.origin.line.number), files);
    }

    /// A version on the line of the job.
    pub(super) fn on_line(&self, version: u64) -> LineVersion {
        LineVersion { version, line: self.origin.line.number }
    }

    /// Checks the line of a version that a caller asks for; `None` stands for any.
    ///
    /// # Errors
    /// [`Error::VersionGone`].
    pub(crate) fn check_line(&self, line: Option<u64>, version: u64) -> Result<()> {
        if line.is_none_or(|line| line == self.origin.line.number) {
            return Ok(());
        }
        let (job, current) = (self.spec.name.clone(), self.version().unwrap_or_default());
        Err(Error::VersionGone { job, version, current })
    }
}

/// Passes on what happens in a job: to the coordinator, the metrics and the trace of the step.
struct Reports {
    /// The name of the job.
    job: String,
    id: u64,
    events: Events,
    /// The metrics of the job, once it is shown there.
    series: OnceLock<StoredJob>,
}

impl Reports {
    fn trace(&self, attempt: Attempt) -> Trace {
        Trace::of_step(self.id, attempt.epoch, attempt.step)
    }

    fn count(&self, count: impl FnOnce(&StoredJob)) {
        if let Some(series) = self.series.get() {
            count(series);
        }
    }
}

impl Host for Reports {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn tell(&self, event: JobEvent) {
        self.events.tell_of(&self.job, self.id, event);
    }

    #[cfg(test)]
    fn lacks(&self, safeguard: job::Safeguard) -> bool {
        is_missing(Safeguard::State(safeguard))
    }

    fn measured(&self, phase: Phase, attempt: Attempt, took: Duration, failed: Option<&Error>) {
        let name = match phase {
            Phase::Reduce => Some("reduce"),
            // It has no span: the server only waits.
            Phase::Decide => None,
            Phase::Apply => Some("apply"),
        };
        if let Some(name) = name {
            let mut span = self.trace(attempt).span(name, SpanKind::Internal).since(took);
            failed.into_iter().for_each(|error| span.fail(error));
        }
        if failed.is_some() {
            return;
        }
        self.count(|series| {
            let times = match phase {
                Phase::Reduce => &series.reduce,
                Phase::Decide => &series.decide,
                Phase::Apply => &series.apply,
            };
            times.observe(took.as_secs_f64());
        });
    }
}
