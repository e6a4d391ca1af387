//! The metrics of `/metrics`. All of them are registered here; the code that counts only updates
//! plain fields.

use std::{collections::HashSet, sync::Arc, time::Duration};

use prometheus::{
    CounterVec, Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder, core::Collector, proto::MetricFamily,
};
use prost::Message;
use zeroshard_proto::pb;

use crate::backend::{DeviceName, Usage};

/// The bounds of the histograms in seconds: 100 us to 100 s.
const SECONDS: [f64; 19] = [
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 25.0, 50.0, 100.0,
];

/// Memory by content, in bytes.
#[derive(Debug)]
pub struct Memory {
    /// f32 master weights.
    pub master: IntGauge,
    /// Optimizer state.
    pub state: IntGauge,
    /// Gradient accumulators.
    pub accumulator: IntGauge,
    /// Copies in the published dtype, if it is not f32.
    pub published: IntGauge,
    /// Early gradients.
    pub parked: IntGauge,
    /// Versions that readers have pinned.
    pub pinned: IntGauge,
    /// Second copies of slices that are being saved.
    pub snapshot: IntGauge,
}

/// The bytes of the arrays of slices, by the tier in which they are, on a server with budgets for
/// them.
#[derive(Debug)]
pub struct Tiers {
    /// In the memory of a GPU.
    pub device: IntGauge,
    /// In host memory.
    pub host: IntGauge,
    /// On disk.
    pub disk: IntGauge,
}

/// The bytes that were read from and written to a tier.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// Bytes read.
    pub read: IntCounter,
    /// Bytes written.
    pub written: IntCounter,
}

/// What GPUs do, by the name of the device.
#[derive(Debug)]
pub struct Devices {
    memory: IntGaugeVec,
    copied: IntCounterVec,
    kernel_seconds: CounterVec,
}

impl Devices {
    /// Shows what a GPU has done until now.
    pub(crate) fn show(&self, device: DeviceName, usage: &Usage) {
        let device = &*device.to_string();
        for (kind, bytes) in
            usage.memory.into_iter().flat_map(|(used, all)| [("used", used), ("total", all)])
        {
            self.memory.with_label_values(&[device, kind]).set(bytes as i64);
        }
        for (direction, bytes) in [("upload", usage.uploaded), ("download", usage.downloaded)] {
            let copied = self.copied.with_label_values(&[device, direction]);
            copied.inc_by(bytes.saturating_sub(copied.get()));
        }
        let seconds = self.kernel_seconds.with_label_values(&[device]);
        seconds.inc_by((usage.kernels.as_secs_f64() - seconds.get()).max(0.0));
    }
}

/// The duration of the phases of a step on a shard server, each observed once per step, in seconds.
#[derive(Debug)]
pub struct Phases {
    /// From the first gradient to the last completed sum of a slice.
    pub reduce: Histogram,
    /// From the report to the coordinator to its decision.
    pub decide: Histogram,
    /// The optimizer and the conversion to the published dtype. Each slice can be pulled as soon as
    /// it is done.
    pub apply: Histogram,
}

/// The coordinator's counts of steps.
#[derive(Debug)]
pub struct Steps {
    /// Steps decided as applied.
    pub applied: IntCounter,
    /// Steps decided as skipped, because of an overflow.
    pub skipped: IntCounter,
    /// Steps aborted, because a rank or a server was lost.
    pub aborted: IntCounter,
    /// From the first to the last rank's commit, in seconds: the imbalance of the workers.
    pub commit_spread: Histogram,
    /// From the last rank's commit to the decision, in seconds: the remaining work of the servers.
    pub ready_wait: Histogram,
}

/// The coordinator's counts of saves.
#[derive(Debug)]
pub struct Saves {
    /// Checkpoints that were completed.
    pub succeeded: IntCounter,
    /// Saves that were given up.
    pub failed: IntCounter,
}

/// All metrics of a process. Updates are cheap from any thread.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    methods: HashSet<String>,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    in_flight: IntGaugeVec,
    /// Bytes of parameters sent.
    pub pull_sent_bytes: IntCounter,
    /// Bytes of gradients and initial parameters received, including duplicates.
    pub push_received_bytes: IntCounter,
    /// Bytes that were received again and skipped.
    pub push_duplicate_bytes: IntCounter,
    /// Pulls that were ended because the client read nothing for the server's waiting time.
    pub stalled_reads: IntCounter,
    /// Memory by kind.
    pub memory: Memory,
    /// Slices by tier.
    pub tiers: Tiers,
    /// Bytes that slices move to and from host memory (on a server with a GPU), and the disk.
    pub(crate) tier_traffic: [Traffic; 2],
    /// The GPUs of a shard server.
    pub devices: Devices,
    /// Phases of a step on a shard server.
    pub phases: Phases,
    /// The coordinator's metrics of steps.
    pub steps: Steps,
    /// The coordinator's metrics of checkpoints.
    pub saves: Saves,
    /// Current version, by job.
    pub version: IntGaugeVec,
    /// Current epoch, by job.
    pub epoch: IntGaugeVec,
    /// Workers with a lease, by job.
    pub workers: IntGaugeVec,
    /// Slices with fewer replicas than the job asks for, by job.
    pub degraded_slices: IntGaugeVec,
    /// From the loss of a server until a job has all its replicas again, in seconds.
    pub degraded: Histogram,
    /// Connected shard servers.
    pub servers: IntGauge,
    /// On a shard server: 1 while it is connected to the coordinator.
    pub coordinator_connected: IntGauge,
}

impl Metrics {
    /// Creates all metrics with the value zero.
    pub fn new() -> Arc<Self> {
        let registry = Registry::new();
        let r = Registrar(&registry);
        let payload = r.counters(
            "payload_bytes_total",
            "Payload bytes transferred on the data plane.",
            &["operation", "direction"],
        );
        let memory = r.gauges("memory_bytes", "Memory of all jobs, by content.", &["kind"]);
        let tiers = r.gauges(
            "tier_bytes",
            "Arrays of slices, by the tier in which they are, on a server with budgets for them.",
            &["tier"],
        );
        let tier_traffic = r.counters(
            "tier_transferred_bytes_total",
            "Bytes read from and written to a tier.",
            &["tier", "direction"],
        );
        let phase =
            r.histograms("step_phase_seconds", "Duration of the phases of a step.", &["phase"]);
        let saves = r.counters(
            "checkpoints_total",
            "Checkpoints, by the outcome of the save.",
            &["outcome"],
        );
        let steps =
            r.counters("steps_total", "Steps, by the decision of the coordinator.", &["outcome"]);
        let wait = r.histograms("step_wait_seconds", "Time that the coordinator waited.", &["for"]);
        let metrics = Self {
            methods: known_methods(),
            requests: r.counters("requests_total", "Completed gRPC calls.", &["method", "code"]),
            request_seconds: r.histograms(
                "request_seconds",
                "Duration of gRPC calls, to the end of the response.",
                &["method"],
            ),
            in_flight: r.gauges("requests_in_flight", "Open gRPC calls.", &["method"]),
            pull_sent_bytes: payload.with_label_values(&["pull", "sent"]),
            push_received_bytes: payload.with_label_values(&["push", "received"]),
            push_duplicate_bytes: payload.with_label_values(&["push", "duplicate"]),
            stalled_reads: r
                .counters(
                    "stalled_reads_total",
                    "Pulls that were ended because their client read nothing.",
                    &[],
                )
                .with_label_values::<&str>(&[]),
            memory: Memory {
                master: memory.with_label_values(&["master"]),
                state: memory.with_label_values(&["state"]),
                accumulator: memory.with_label_values(&["accumulator"]),
                published: memory.with_label_values(&["published"]),
                parked: memory.with_label_values(&["parked"]),
                pinned: memory.with_label_values(&["pinned"]),
                snapshot: memory.with_label_values(&["snapshot"]),
            },
            tiers: Tiers {
                device: tiers.with_label_values(&["device"]),
                host: tiers.with_label_values(&["host"]),
                disk: tiers.with_label_values(&["disk"]),
            },
            tier_traffic: ["host", "disk"].map(|tier| Traffic {
                read: tier_traffic.with_label_values(&[tier, "read"]),
                written: tier_traffic.with_label_values(&[tier, "written"]),
            }),
            devices: Devices {
                memory: r.gauges(
                    "device_memory_bytes",
                    "Memory of a GPU that is in use by any process, and all of it.",
                    &["device", "kind"],
                ),
                copied: r.counters(
                    "device_copied_bytes_total",
                    "Bytes copied to a GPU and from it.",
                    &["device", "direction"],
                ),
                kernel_seconds: r.register(CounterVec::new(
                    Opts::new("device_kernel_seconds_total", "Time in kernels of a GPU.")
                        .namespace("zeroshard"),
                    &["device"],
                )),
            },
            phases: Phases {
                reduce: phase.with_label_values(&["reduce"]),
                decide: phase.with_label_values(&["decide"]),
                apply: phase.with_label_values(&["apply"]),
            },
            saves: Saves {
                succeeded: saves.with_label_values(&["succeeded"]),
                failed: saves.with_label_values(&["failed"]),
            },
            steps: Steps {
                applied: steps.with_label_values(&["applied"]),
                skipped: steps.with_label_values(&["skipped"]),
                aborted: steps.with_label_values(&["aborted"]),
                commit_spread: wait.with_label_values(&["ranks"]),
                ready_wait: wait.with_label_values(&["servers"]),
            },
            version: r.gauges("job_version", "Version of the job's parameters.", &["job"]),
            epoch: r.gauges("job_epoch", "Epoch of the job.", &["job"]),
            workers: r.gauges("job_workers", "Workers with a lease.", &["job"]),
            degraded_slices: r.gauges(
                "job_degraded_slices",
                "Slices with fewer replicas than the job asks for.",
                &["job"],
            ),
            degraded: r
                .histograms(
                    "degraded_seconds",
                    "From the loss of a server until a job has all its replicas again.",
                    &[],
                )
                .with_label_values::<&str>(&[]),
            servers: r
                .gauges("servers", "Connected shard servers.", &[])
                .with_label_values::<&str>(&[]),
            coordinator_connected: r
                .gauges(
                    "coordinator_connected",
                    "1 if this shard server is connected to the coordinator, else 0.",
                    &[],
                )
                .with_label_values::<&str>(&[]),
            registry,
        };
        metrics.watch_process();
        Arc::new(metrics)
    }

    #[cfg(target_os = "linux")]
    fn watch_process(&self) {
        let process = prometheus::process_collector::ProcessCollector::for_self();
        self.registry.register(Box::new(process)).expect("registered once");
    }

    #[cfg(not(target_os = "linux"))]
    fn watch_process(&self) {}

    /// Drops the series of a deleted job.
    pub fn forget_job(&self, job: &str) {
        for gauges in [&self.version, &self.epoch, &self.workers, &self.degraded_slices] {
            // An error means that the job never had this series.
            let _ = gauges.remove_label_values(&[job]);
        }
    }

    /// The label of a request's path: the path itself, or `other` for a path that no service here
    /// has, so that callers cannot create series.
    pub(crate) fn method<'a>(&self, path: &'a str) -> &'a str {
        if self.methods.contains(path) { path } else { "other" }
    }

    pub(crate) fn request_started(&self, method: &str) {
        self.in_flight.with_label_values(&[method]).inc();
    }

    pub(crate) fn request_ended(&self, method: &str, code: &str, took: Duration) {
        self.in_flight.with_label_values(&[method]).dec();
        self.requests.with_label_values(&[method, code]).inc();
        self.request_seconds.with_label_values(&[method]).observe(took.as_secs_f64());
    }

    /// The current values of all metrics.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// Prometheus' text format.
    pub fn text(&self) -> String {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.gather(), &mut text).expect("writing to a Vec succeeds");
        String::from_utf8(text).expect("the text format is UTF-8")
    }
}

struct Registrar<'a>(&'a Registry);

impl Registrar<'_> {
    fn register<C: Collector + Clone + 'static>(&self, collector: prometheus::Result<C>) -> C {
        let collector = collector.expect("names and labels are well-formed");
        self.0.register(Box::new(collector.clone())).expect("names are unique");
        collector
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(Opts::new(name, help).namespace("zeroshard"), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register(IntGaugeVec::new(Opts::new(name, help).namespace("zeroshard"), labels))
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str]) -> HistogramVec {
        let options =
            HistogramOpts::new(name, help).namespace("zeroshard").buckets(SECONDS.to_vec());
        self.register(HistogramVec::new(options, labels))
    }
}

/// The paths of all methods in ZeroShard's .proto files, and of health checks.
fn known_methods() -> HashSet<String> {
    let files = prost_types::FileDescriptorSet::decode(pb::FILE_DESCRIPTOR_SET)
        .expect("written by the build script");
    let ours = files.file.iter().flat_map(|file| {
        file.service.iter().flat_map(move |service| {
            service
                .method
                .iter()
                .map(move |m| format!("/{}.{}/{}", file.package(), service.name(), m.name()))
        })
    });
    let health = ["Check", "Watch"].map(|method| format!("/grpc.health.v1.Health/{method}"));
    ours.chain(health).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_cannot_create_series() {
        let metrics = Metrics::new();
        assert_eq!(
            metrics.method("/zeroshard.v1.DataService/Pull"),
            "/zeroshard.v1.DataService/Pull"
        );
        assert_eq!(metrics.method("/zeroshard.v1.DataService/Pul"), "other");
    }

    #[test]
    fn a_forgotten_job_is_not_shown() {
        let metrics = Metrics::new();
        metrics.version.with_label_values(&["a"]).set(3);
        assert!(metrics.text().contains("zeroshard_job_version{job=\"a\"} 3"));
        metrics.forget_job("a");
        assert!(!metrics.text().contains("job=\"a\""));
    }

    #[test]
    fn the_process_is_watched() {
        assert!(metrics_names().contains("process_resident_memory_bytes"));
    }

    fn metrics_names() -> HashSet<String> {
        Metrics::new().gather().iter().map(|family| family.name().to_owned()).collect()
    }
}
