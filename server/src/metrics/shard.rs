//! The metrics of a shard server.

use std::sync::Arc;

use prometheus::{Histogram, IntCounter, IntGauge};
use zeroshard_kernels::{DeviceName, Usage};
use zeroshard_shard::tier::{Counter, Traffic};

use super::{JobGauges, families::families};

/// The value of the label `role`.
const ROLE: &str = "shard";
const PHASES: [&str; 3] = ["reduce", "decide", "apply"];
const OPERATIONS: [&str; 2] = ["pull", "push"];
/// Why a process cannot share memory.
const REFUSALS: [&str; 4] = ["not_connected", "memory", "limit", "unsupported"];
/// Operation and direction of the payload.
const PAYLOAD: [[&str; 2]; 3] = [["pull", "sent"], ["push", "received"], ["push", "duplicate"]];

families! {
    /// The metrics of a shard server: what it holds, receives and sends.
    pub struct Shard(gauges: JobGauges);
    payload: counters("payload_bytes_total", ["operation", "direction"]) =
        "Payload bytes of all jobs, also of deleted ones: of pulls (sent) and pushes (received, of \
         which duplicate bytes were skipped).";
    job_payload: counters("job_payload_bytes_total", ["job", "operation"]) =
        "Payload bytes of the job's pulls (sent) and pushes (received).";
    job_changes: counters("job_change_bytes_total", ["job"]) =
        "Bytes of the changes of the job's steps that readers who follow it have received.";
    followers: gauges("followers", ["job"]) =
        "Number of readers that have asked this server for changes of the job within the last minute.";
    phase: histograms("job_step_phase_seconds", ["job", "phase"]) =
        "Seconds of the phases of each step on this server: reduce (first gradient to last sum), \
         decide (report to decision), apply (optimizer).";
    stalled_reads: counters("stalled_reads_total", []) =
        "Number of pulls that were ended because their client read nothing.";
    memory: gauges("memory_bytes", ["kind"]) = "Memory of all jobs in bytes, by content.";
    limits: gauges("memory_limit_bytes", ["kind"]) =
        "Budgets of this server in bytes: memory is the whole of it (--memory); parked, pinned, \
         snapshot and history limit the kinds of zeroshard_memory_bytes; device, host and disk limit the tiers \
         of zeroshard_tier_bytes. A budget without a limit has no series.";
    tiers: gauges("tier_bytes", ["tier"]) =
        "Arrays of slices in bytes, by the tier in which they are, on a server with budgets for \
         tiers.";
    tier_traffic: counters("tier_transferred_bytes_total", ["tier", "direction"]) =
        "Bytes read from and written to a tier.";
    device_memory: gauges("device_memory_bytes", ["device", "kind"]) =
        "Memory of a GPU in bytes that is in use by any process, and all of it.";
    device_copied: counters("device_copied_bytes_total", ["device", "direction"]) =
        "Bytes copied to a GPU (upload) and from it (download).";
    device_seconds: seconds("device_kernel_seconds_total", ["device"]) =
        "Seconds in kernels of a GPU.";
    windows: gauges("windows", []) =
        "Number of processes of workers and readers on this host that share memory with this \
         server, once for each job and rank, or pin.";
    window_refusals: counters("window_refusals_total", ["reason"]) =
        "Number of processes of workers and readers that use gRPC because they could not share \
         memory: not_connected (on another host, or in another network namespace), memory (the \
         budget for outboxes), limit (too many windows), unsupported (the system).";
    window_bytes: counters("window_bytes_total", ["operation"]) =
        "Those of zeroshard_payload_bytes_total that were read in shared memory, instead of over a \
         connection.";
    connected: gauges("coordinator_connected", []) =
        "1 if this shard server is connected to the coordinator, else 0.";
}

/// A counter of bytes that are read from or written to a tier.
struct TierBytes(IntCounter);

impl Counter for TierBytes {
    fn inc_by(&self, bytes: u64) {
        self.0.inc_by(bytes);
    }

    fn get(&self) -> u64 {
        self.0.get()
    }
}

/// The series of one job.
#[derive(Debug)]
pub(crate) struct JobSeries {
    pull_sent: IntCounter,
    push_received: IntCounter,
    push_duplicate: IntCounter,
    job_pull_sent: IntCounter,
    job_push_received: IntCounter,
    window_pull: IntCounter,
    window_push: IntCounter,
    changes: IntCounter,
    followers: IntGauge,
    /// From the first gradient to the last completed sum of a slice, once per step, in seconds.
    pub(crate) reduce: Histogram,
    /// From the report to the coordinator to its decision, in seconds.
    pub(crate) decide: Histogram,
    /// The optimizer and the conversion to the published dtype, in seconds. Each slice can be
    /// pulled as soon as it is done.
    pub(crate) apply: Histogram,
}

impl Shard {
    /// This process is a shard server.
    pub(crate) fn begin(&self) {
        self.show_connected(false);
        self.stalled_reads.with_label_values::<&str>(&[]);
        self.show_windows(0);
        REFUSALS.iter().for_each(|of| drop(self.window_refusals.with_label_values(&[of])));
        OPERATIONS.iter().for_each(|of| drop(self.window_bytes.with_label_values(&[of])));
        // A counter that begins at 0 shows its first increase.
        PAYLOAD.iter().for_each(|labels| drop(self.payload.with_label_values(labels)));
    }

    /// Shows whether the server is connected to the coordinator.
    pub(crate) fn show_connected(&self, connected: bool) {
        self.connected.with_label_values::<&str>(&[]).set(connected.into());
    }

    /// Shows the number of windows.
    pub(crate) fn show_windows(&self, count: usize) {
        self.windows.with_label_values::<&str>(&[]).set(count as i64);
    }

    /// Counts a process that cannot share memory.
    pub(crate) fn window_refused(&self, reason: &str) {
        self.window_refusals.with_label_values(&[reason]).inc();
    }

    /// Counts a pull that was ended because its client read nothing.
    pub(crate) fn stalled_read(&self) {
        self.stalled_reads.with_label_values::<&str>(&[]).inc();
    }

    /// Shows the memory of one kind.
    pub(crate) fn show_memory(&self, kind: &str, bytes: u64) {
        self.memory.with_label_values(&[kind]).set(bytes as i64);
    }

    /// Shows the limit of a kind of memory or of a tier; [`u64::MAX`]: there is none.
    pub(crate) fn show_limit(&self, kind: &str, bytes: u64) {
        if let Ok(bytes) = i64::try_from(bytes) {
            self.limits.with_label_values(&[kind]).set(bytes);
        }
    }

    /// Shows the bytes in a tier.
    pub(crate) fn show_tier(&self, tier: &str, bytes: u64) {
        self.tiers.with_label_values(&[tier]).set(bytes as i64);
    }

    /// The counters of what slices move to and from host memory (on a server with a GPU), and the
    /// disk.
    pub(crate) fn tier_traffic(&self) -> [Traffic; 2] {
        let counter =
            |labels: [&str; 2]| Arc::new(TierBytes(self.tier_traffic.with_label_values(&labels)));
        ["host", "disk"].map(|tier| Traffic {
            read: counter([tier, "read"]),
            written: counter([tier, "written"]),
        })
    }

    /// Shows what a GPU has done until now.
    pub(crate) fn show_device(&self, device: DeviceName, usage: &Usage) {
        let device = &*device.to_string();
        for (kind, bytes) in
            usage.memory.into_iter().flat_map(|(used, all)| [("used", used), ("total", all)])
        {
            self.device_memory.with_label_values(&[device, kind]).set(bytes as i64);
        }
        for (direction, bytes) in [("upload", usage.uploaded), ("download", usage.downloaded)] {
            let copied = self.device_copied.with_label_values(&[device, direction]);
            copied.inc_by(bytes.saturating_sub(copied.get()));
        }
        let seconds = self.device_seconds.with_label_values(&[device]);
        seconds.inc_by((usage.kernels.as_secs_f64() - seconds.get()).max(0.0));
    }

    /// The series of a job.
    pub(crate) fn job(&self, job: &str) -> JobSeries {
        let [pull_sent, push_received, push_duplicate] =
            PAYLOAD.map(|labels| self.payload.with_label_values(&labels));
        let [job_pull_sent, job_push_received] =
            OPERATIONS.map(|operation| self.job_payload.with_label_values(&[job, operation]));
        let [window_pull, window_push] =
            OPERATIONS.map(|operation| self.window_bytes.with_label_values(&[operation]));
        let [reduce, decide, apply] =
            PHASES.map(|phase| self.phase.with_label_values(&[job, phase]));
        let changes = self.job_changes.with_label_values(&[job]);
        let followers = self.followers.with_label_values(&[job]);
        JobSeries {
            changes,
            followers,
            pull_sent,
            push_received,
            push_duplicate,
            job_pull_sent,
            job_push_received,
            window_pull,
            window_push,
            reduce,
            decide,
            apply,
        }
    }

    /// Shows the current figures of a job.
    pub(crate) fn show_job(&self, job: &str, epoch: u64, version: Option<u64>) {
        self.gauges.epoch.with_label_values(&[job, ROLE]).set(epoch as i64);
        match version {
            Some(version) => {
                self.gauges.version.with_label_values(&[job, ROLE]).set(version as i64);
            }
            // An earlier job of this name may have had one. An error means that it had none.
            None => {
                let _ = self.gauges.version.remove_label_values(&[job, ROLE]);
            }
        }
    }

    /// Removes the series of a job.
    pub(crate) fn forget(&self, job: &str) {
        self.gauges.forget(job, ROLE);
        // An error means that the job never had this series.
        for operation in OPERATIONS {
            let _ = self.job_payload.remove_label_values(&[job, operation]);
        }
        let _ = self.job_changes.remove_label_values(&[job]);
        let _ = self.followers.remove_label_values(&[job]);
        for phase in PHASES {
            let _ = self.phase.remove_label_values(&[job, phase]);
        }
    }
}

impl JobSeries {
    /// Counts bytes of parameters that were sent.
    pub(crate) fn sent(&self, bytes: u64) {
        self.pull_sent.inc_by(bytes);
        self.job_pull_sent.inc_by(bytes);
    }

    /// Counts bytes of changes that were sent to a reader.
    pub(crate) fn sent_changes(&self, bytes: u64) {
        self.changes.inc_by(bytes);
    }

    /// Shows the number of readers that follow the job.
    pub(crate) fn show_followers(&self, followers: usize) {
        self.followers.set(followers as i64);
    }

    /// Counts bytes of gradients and initial parameters that were received, including duplicates.
    pub(crate) fn received(&self, bytes: u64) {
        self.push_received.inc_by(bytes);
        self.job_push_received.inc_by(bytes);
    }

    /// Counts bytes of parameters that a worker reads in its window.
    pub(crate) fn shown(&self, bytes: u64) {
        self.sent(bytes);
        self.window_pull.inc_by(bytes);
    }

    /// Counts bytes that a worker has put into its outbox.
    pub(crate) fn found(&self, bytes: u64) {
        self.window_push.inc_by(bytes);
    }

    /// The numbers of bytes of the job that were sent and received.
    pub(crate) fn transferred(&self) -> [u64; 2] {
        [self.job_pull_sent.get(), self.job_push_received.get()]
    }

    /// Counts bytes that were received again and skipped.
    pub(crate) fn skipped(&self, bytes: u64) {
        self.push_duplicate.inc_by(bytes);
    }

    /// The bytes of parameters sent, and the bytes received again and skipped, of all jobs.
    #[cfg(test)]
    pub(crate) fn sent_and_skipped(&self) -> [u64; 2] {
        [self.pull_sent.get(), self.push_duplicate.get()]
    }
}
