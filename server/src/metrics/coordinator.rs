//! The metrics of a coordinator. A standby shows no jobs and no servers.

use std::time::{Duration, SystemTime};

use prometheus::{Gauge, Histogram, IntCounter, IntGauge};
use zeroshard_coordinator::operators::metrics_view::{JobMetrics, JobState, Waits};

use super::{JobGauges, families::families};

/// The value of the label `role`.
const ROLE: &str = "coordinator";
const OUTCOMES: [&str; 3] = ["applied", "skipped", "aborted"];
const SAVES: [&str; 2] = ["succeeded", "failed"];

families! {
    /// The metrics of a coordinator about servers and jobs.
    pub struct Coordinator(gauges: JobGauges);
    leader: gauges("leader", []) = "1 if this coordinator is the leader, 0 if it is a standby.";
    servers: gauges("servers", []) = "Number of connected shard servers.";
    missing: gauges("servers_missing", []) =
        "Number of shard servers that were connected, and were not drained before they left.";
    loss: real_gauges("job_loss", ["job"]) =
        "Mean loss of the ranks in the last step, a number without a unit, if each of them passed \
         one.";
    norm: real_gauges("job_gradient_norm", ["job"]) =
        "L2 norm of the mean gradient of the last step before it was clipped, a number without a \
         unit. Not finite after an overflow.";
    degraded: histograms("degraded_seconds", []) =
        "Seconds from the loss of a server until a job has all its replicas again.";
    state: gauges("job_state", ["job", "state"]) =
        "1 for the current state of the job, 0 for the other states.";
    workers: gauges("job_workers", ["job"]) = "Number of workers with a lease.";
    degraded_slices: gauges("job_degraded_slices", ["job"]) =
        "Number of slices with fewer replicas than the job asks for.";
    broken_links: gauges("job_broken_links", ["job"]) =
        "Number of pairs of a rank and a shard server that the rank cannot reach, although the \
         coordinator can.";
    steps: counters("steps_total", ["outcome"]) =
        "Number of steps of all jobs, also of deleted ones, that were applied, skipped (overflow) \
         or aborted (a rank or a server was lost).";
    job_steps: counters("job_steps_total", ["job", "outcome"]) =
        "Number of steps that were applied, skipped (overflow) or aborted (a rank or a server was \
         lost).";
    spikes: counters("job_spikes_total", ["job"]) =
        "Number of steps that the policy of the job found to be spikes, and for which it skipped \
         the step, rewound the job or stopped it.";
    wait: histograms("job_step_wait_seconds", ["job", "for"]) =
        "Seconds of each step in which the coordinator waited for ranks (from the first to the \
         last commit) and then for servers (until the decision).";
    lateness: histograms("job_rank_lateness_seconds", ["job"]) =
        "Seconds from the first rank's commit of a step to that of each other rank.";
    slowest: real_gauges("job_slowest_rank_seconds", ["job", "rank"]) =
        "Lateness in seconds of the slowest rank, which the label names: the average over about \
         the last 10 steps.";
    checkpoints: counters("checkpoints_total", ["outcome"]) =
        "Number of saves of all jobs, also of deleted ones, that succeeded or failed.";
    job_checkpoints: counters("job_checkpoints_total", ["job", "outcome"]) =
        "Number of saves that succeeded or failed.";
    checkpoint_version: gauges("job_last_checkpoint_version", ["job"]) =
        "Version of the last checkpoint that this coordinator has completed.";
    checkpoint_seconds: real_gauges("job_last_checkpoint_duration_seconds", ["job"]) =
        "Seconds from the start of the last completed save to its end.";
    checkpoint_time: real_gauges("job_last_checkpoint_timestamp_seconds", ["job"]) =
        "Time at which the last save was completed, in seconds since 1970.";
}

impl Coordinator {
    /// This process is a coordinator. Until [`Self::lead`] it is a standby.
    pub(crate) fn stand_by(&self) {
        let Self { leader, servers, missing, degraded, steps, checkpoints, .. } = self;
        servers.reset();
        missing.reset();
        degraded.reset();
        steps.reset();
        checkpoints.reset();
        leader.with_label_values::<&str>(&[]).set(0);
    }

    /// This coordinator decides.
    pub(crate) fn lead(&self) {
        self.leader.with_label_values::<&str>(&[]).set(1);
        self.show_servers(0, 0);
        // A counter that begins at 0 shows its first increase.
        OUTCOMES.iter().for_each(|outcome| drop(self.steps.with_label_values(&[outcome])));
        SAVES.iter().for_each(|outcome| drop(self.checkpoints.with_label_values(&[outcome])));
        self.degraded.with_label_values::<&str>(&[]);
    }

    /// Shows the numbers of connected and of missing servers.
    pub(crate) fn show_servers(&self, connected: usize, missing: usize) {
        self.servers.with_label_values::<&str>(&[]).set(connected as i64);
        self.missing.with_label_values::<&str>(&[]).set(missing as i64);
    }

    /// Shows the loss and the gradient norm of the last step.
    pub(crate) fn show_step(&self, series: &JobSeries, loss: Option<f64>, norm: f64) {
        let job = &[series.job.as_str()];
        self.norm.with_label_values(job).set(norm);
        match loss {
            Some(loss) => self.loss.with_label_values(job).set(loss),
            None => _ = self.loss.remove_label_values(job),
        }
    }

    /// Counts the time for which a job had too few replicas.
    pub(crate) fn redundant(&self, after: Duration) {
        self.degraded.with_label_values::<&str>(&[]).observe(after.as_secs_f64());
    }

    /// The series of a job.
    pub(crate) fn job(&self, job: &str) -> JobSeries {
        let steps = |outcome| Counted {
            all: self.steps.with_label_values(&[outcome]),
            of_job: self.job_steps.with_label_values(&[job, outcome]),
        };
        let saves = |outcome| Counted {
            all: self.checkpoints.with_label_values(&[outcome]),
            of_job: self.job_checkpoints.with_label_values(&[job, outcome]),
        };
        let ([applied, skipped, aborted], [saved, not_saved]) =
            (OUTCOMES.map(steps), SAVES.map(saves));
        JobSeries {
            job: job.to_owned(),
            states: JobState::ALL.map(|of| self.state.with_label_values(&[job, of.label()])),
            epoch: self.gauges.epoch.with_label_values(&[job, ROLE]),
            version: None,
            workers: self.workers.with_label_values(&[job]),
            degraded: self.degraded_slices.with_label_values(&[job]),
            broken_links: self.broken_links.with_label_values(&[job]),
            applied,
            skipped,
            aborted,
            spikes: self.spikes.with_label_values(&[job]),
            ranks: self.wait.with_label_values(&[job, "ranks"]),
            servers: self.wait.with_label_values(&[job, "servers"]),
            lateness: self.lateness.with_label_values(&[job]),
            slowest: None,
            saved,
            not_saved,
        }
    }

    /// Removes the series of a job.
    pub(crate) fn forget(&self, series: JobSeries) {
        let JobSeries { job, slowest, .. } = series;
        let job = job.as_str();
        self.gauges.forget(job, ROLE);
        // An error means that the job never had this series.
        for state in JobState::ALL {
            let _ = self.state.remove_label_values(&[job, state.label()]);
        }
        let _ = self.spikes.remove_label_values(&[job]);
        for outcome in OUTCOMES {
            let _ = self.job_steps.remove_label_values(&[job, outcome]);
        }
        for waited_for in ["ranks", "servers"] {
            let _ = self.wait.remove_label_values(&[job, waited_for]);
        }
        for outcome in SAVES {
            let _ = self.job_checkpoints.remove_label_values(&[job, outcome]);
        }
        let Self { workers, degraded_slices, broken_links, checkpoint_version, .. } = self;
        for gauges in [workers, degraded_slices, broken_links, checkpoint_version] {
            let _ = gauges.remove_label_values(&[job]);
        }
        for gauges in [&self.checkpoint_seconds, &self.checkpoint_time, &self.loss, &self.norm] {
            let _ = gauges.remove_label_values(&[job]);
        }
        let _ = self.lateness.remove_label_values(&[job]);
        self.forget_slowest(job, slowest);
    }

    fn forget_slowest(&self, job: &str, slowest: Option<(u32, Gauge)>) {
        if let Some((rank, _)) = slowest {
            let _ = self.slowest.remove_label_values(&[job, &rank.to_string()]);
        }
    }

    /// Shows the current metrics of a job.
    pub(crate) fn show(&self, series: &mut JobSeries, metrics: &JobMetrics) {
        for (state, gauge) in JobState::ALL.iter().zip(&series.states) {
            gauge.set((*state == metrics.state).into());
        }
        series.epoch.set(metrics.epoch as i64);
        series.workers.set(metrics.workers as i64);
        series.degraded.set(metrics.degraded as i64);
        series.broken_links.set(metrics.broken_links as i64);
        self.show_version(series, metrics.version);
        self.show_slowest(series, metrics.slowest);
    }

    fn show_version(&self, series: &mut JobSeries, version: Option<u64>) {
        let (labels, gauges) = ([series.job.as_str(), ROLE], &self.gauges.version);
        match version {
            Some(version) => series
                .version
                .get_or_insert_with(|| gauges.with_label_values(&labels))
                .set(version as i64),
            // A job that returns to a checkpoint has no version meanwhile.
            None if series.version.take().is_some() => {
                let _ = gauges.remove_label_values(&labels);
            }
            None => {}
        }
    }

    fn show_slowest(&self, series: &mut JobSeries, slowest: Option<(u32, f64)>) {
        let job = series.job.as_str();
        let shown = series.slowest.as_ref().map(|(rank, _)| *rank);
        if shown != slowest.map(|(rank, _)| rank) {
            self.forget_slowest(job, series.slowest.take());
        }
        if let Some((rank, seconds)) = slowest {
            let gauge = || (rank, self.slowest.with_label_values(&[job, &rank.to_string()]));
            series.slowest.get_or_insert_with(gauge).1.set(seconds);
        }
    }

    /// A checkpoint of `version` was completed, `took` after its begin.
    pub(crate) fn saved(&self, series: &JobSeries, version: u64, took: Duration) {
        series.saved.inc();
        let job = &[series.job.as_str()];
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.checkpoint_version.with_label_values(job).set(version as i64);
        self.checkpoint_seconds.with_label_values(job).set(took.as_secs_f64());
        self.checkpoint_time.with_label_values(job).set(now.as_secs_f64());
    }
}

/// The series of one job.
#[derive(Debug)]
pub(crate) struct JobSeries {
    job: String,
    /// In the order of [`JobState::ALL`].
    states: [IntGauge; 6],
    epoch: IntGauge,
    version: Option<IntGauge>,
    workers: IntGauge,
    degraded: IntGauge,
    broken_links: IntGauge,
    applied: Counted,
    skipped: Counted,
    aborted: Counted,
    spikes: IntCounter,
    ranks: Histogram,
    servers: Histogram,
    lateness: Histogram,
    /// The slowest rank.
    slowest: Option<(u32, Gauge)>,
    saved: Counted,
    not_saved: Counted,
}

/// A counter of a job, and the same one of all jobs.
#[derive(Debug)]
struct Counted {
    all: IntCounter,
    of_job: IntCounter,
}

impl Counted {
    fn inc(&self) {
        self.all.inc();
        self.of_job.inc();
    }
}

impl JobSeries {
    /// Counts a step that was applied or skipped.
    pub(crate) fn decided(&self, applied: bool, waits: &Waits) {
        if applied {
            self.applied.inc()
        } else {
            self.skipped.inc()
        }
        self.ranks.observe(waits.ranks.as_secs_f64());
        self.servers.observe(waits.servers.as_secs_f64());
        for late in &waits.lateness {
            self.lateness.observe(late.as_secs_f64());
        }
    }

    /// Counts a step that was aborted.
    pub(crate) fn aborted(&self) {
        self.aborted.inc();
    }

    /// Counts a spike.
    pub(crate) fn spiked(&self) {
        self.spikes.inc();
    }

    /// Counts a save that was given up.
    pub(crate) fn not_saved(&self) {
        self.not_saved.inc();
    }
}
