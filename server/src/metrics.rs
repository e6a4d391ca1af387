//! The metrics of `/metrics`. All of them are registered here; the code that counts only updates
//! plain fields.
//!
//! A process shows only the series of its own roles, and of jobs that exist: a role creates its
//! series when it begins, and removes those of a job when the job is deleted.
//! `docs/reference/metrics.md` lists all families.

mod coordinator;
mod families;
mod shard;
#[cfg(test)]
mod table;

use std::{collections::HashSet, sync::Arc, time::Duration};

use prometheus::{Encoder, Registry, TextEncoder, proto::MetricFamily};
use prost::Message;
use zeroshard_proto::pb;

pub use coordinator::Coordinator;
use families::{Families, families};
pub use shard::Shard;
pub(crate) use {coordinator::JobSeries as CoordinatedJob, shard::JobSeries as StoredJob};

/// All metrics of a process. Updates are cheap from any thread.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    methods: HashSet<String>,
    process: Process,
    /// The metrics of the coordinator role.
    pub coordinator: Coordinator,
    /// The metrics of the shard role.
    pub shard: Shard,
}

families! {
    /// The metrics of a process, whatever its role.
    struct Process();
    requests: counters("requests_total", ["method", "code"]) = "Number of completed gRPC calls.";
    request_seconds: histograms("request_seconds", ["method"]) =
        "Seconds of gRPC calls, to the end of the response.";
    in_flight: gauges("requests_in_flight", ["method"]) = "Number of open gRPC calls.";
    build_info: gauges("build_info", ["version", "role"]) =
        "1, with the version of the program and its role: coordinator, shard or all.";
    expiry: gauges("certificate_expiry_timestamp_seconds", []) =
        "Time at which the certificate of this server expires, in seconds since 1970. Only with \
         TLS.";
}

families! {
    /// The figures of jobs that both roles know, by job and role.
    struct JobGauges();
    version: gauges("job_version", ["job", "role"]) = "Version of the parameters of the job.";
    epoch: gauges("job_epoch", ["job", "role"]) = "Epoch (membership generation) of the job.";
}

impl JobGauges {
    fn forget(&self, job: &str, role: &str) {
        for gauges in [&self.version, &self.epoch] {
            // An error means that the job never had this series.
            let _ = gauges.remove_label_values(&[job, role]);
        }
    }
}

impl Metrics {
    /// Creates all metrics, of which none has a series yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::describe(&mut Families::default()))
    }

    fn describe(families: &mut Families) -> Self {
        let gauges = JobGauges::new(families);
        let metrics = Self {
            methods: known_methods(),
            process: Process::new(families),
            coordinator: Coordinator::new(families, gauges.clone()),
            shard: Shard::new(families, gauges),
            registry: families.registry.clone(),
        };
        metrics.watch_process();
        metrics
    }

    #[cfg(target_os = "linux")]
    fn watch_process(&self) {
        let process = prometheus::process_collector::ProcessCollector::for_self();
        self.registry.register(Box::new(process)).expect("registered once");
    }

    #[cfg(not(target_os = "linux"))]
    fn watch_process(&self) {}

    /// Shows the role of this process: `coordinator`, `shard` or `all`.
    pub(crate) fn show_role(&self, role: &str) {
        self.process.build_info.with_label_values(&[env!("CARGO_PKG_VERSION"), role]).set(1);
    }

    /// Shows when the certificate of this process expires, in seconds since 1970.
    pub(crate) fn show_expiry(&self, expiry: Option<i64>) {
        if let Some(expiry) = expiry {
            self.process.expiry.with_label_values::<&str>(&[]).set(expiry);
        }
    }

    /// The label of a request's path: the path itself, or `other` for a path that no service here
    /// has, so that callers cannot create series.
    pub(crate) fn method<'a>(&self, path: &'a str) -> &'a str {
        if self.methods.contains(path) { path } else { "other" }
    }

    pub(crate) fn request_started(&self, method: &str) {
        self.process.in_flight.with_label_values(&[method]).inc();
    }

    pub(crate) fn request_ended(&self, method: &str, code: &str, took: Duration) {
        self.process.in_flight.with_label_values(&[method]).dec();
        self.process.requests.with_label_values(&[method, code]).inc();
        self.process.request_seconds.with_label_values(&[method]).observe(took.as_secs_f64());
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
    use zeroshard_coordinator::operators::metrics_view::{JobMetrics, JobState, Waits};

    const FIGURES: JobMetrics = JobMetrics {
        state: JobState::Open,
        epoch: 2,
        version: Some(3),
        workers: 4,
        degraded: 0,
        broken_links: 0,
        slowest: Some((1, 0.25)),
    };

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
    fn a_process_without_a_role_shows_only_its_process() {
        let names = metrics_names(&Metrics::new());
        assert!(names.contains("process_resident_memory_bytes"));
        assert!(!names.iter().any(|name| name.starts_with("zeroshard_")), "{names:?}");
    }

    #[test]
    fn a_shard_server_shows_no_series_of_a_coordinator() {
        let metrics = Metrics::new();
        metrics.shard.begin();
        metrics.shard.job("a");
        metrics.shard.show_job("a", 1, Some(3));
        let names = metrics_names(&metrics);
        for name in ["zeroshard_servers", "zeroshard_leader", "zeroshard_steps_total"] {
            assert!(!names.contains(name), "{name}");
        }
        let text = metrics.text();
        assert!(text.contains("zeroshard_job_version{job=\"a\",role=\"shard\"} 3"));
        assert!(text.contains("zeroshard_coordinator_connected 0"));
    }

    #[test]
    fn a_coordinator_shows_no_series_of_a_shard_server() {
        let metrics = Metrics::new();
        metrics.coordinator.lead();
        let mut series = metrics.coordinator.job("a");
        metrics.coordinator.show(&mut series, &FIGURES);
        let names = metrics_names(&metrics);
        for name in ["memory_bytes", "coordinator_connected", "payload_bytes_total"] {
            assert!(!names.contains(&format!("zeroshard_{name}")), "{name}");
        }
        let text = metrics.text();
        assert!(text.contains("zeroshard_leader 1") && text.contains("zeroshard_servers 0"));
    }

    #[test]
    fn a_standby_shows_that_it_is_one_and_nothing_of_the_cluster() {
        let metrics = Metrics::new();
        metrics.coordinator.lead();
        metrics.coordinator.show_servers(3, 0);
        metrics.coordinator.stand_by();
        let text = metrics.text();
        assert!(text.contains("zeroshard_leader 0"));
        assert!(!text.contains("zeroshard_servers") && !text.contains("zeroshard_degraded"));
    }

    #[test]
    fn a_job_has_one_state_and_one_slowest_rank() {
        let metrics = Metrics::new();
        let mut series = metrics.coordinator.job("a");
        metrics.coordinator.show(&mut series, &FIGURES);
        let text = metrics.text();
        assert!(text.contains("zeroshard_job_state{job=\"a\",state=\"open\"} 1"));
        assert!(text.contains("zeroshard_job_slowest_rank_seconds{job=\"a\",rank=\"1\"} 0.25"));
        let failed =
            JobMetrics { state: JobState::Failed, version: None, slowest: None, ..FIGURES };
        metrics.coordinator.show(&mut series, &failed);
        let text = metrics.text();
        assert!(text.contains("zeroshard_job_state{job=\"a\",state=\"open\"} 0"));
        assert!(text.contains("zeroshard_job_state{job=\"a\",state=\"failed\"} 1"));
        assert!(!text.contains("slowest_rank") && !text.contains("zeroshard_job_version"));
    }

    #[test]
    fn each_role_forgets_its_own_series_of_a_job() {
        let metrics = Metrics::new();
        let mut series = metrics.coordinator.job("a");
        metrics.coordinator.show(&mut series, &FIGURES);
        let waits = Waits {
            lateness: vec![Duration::from_millis(1)],
            ranks: Duration::ZERO,
            servers: Duration::ZERO,
        };
        series.decided(true, &waits);
        metrics.coordinator.saved(&series, 3, Duration::from_secs(1));
        metrics.shard.job("a").sent(1);
        metrics.shard.show_job("a", 2, Some(3));
        metrics.shard.forget("a");
        assert!(!metrics.text().contains("role=\"shard\""));
        assert!(metrics.text().contains("zeroshard_job_version{job=\"a\",role=\"coordinator\"} 3"));
        metrics.coordinator.forget(series);
        assert!(!metrics.text().contains("job=\"a\""), "{}", metrics.text());
    }

    #[test]
    fn a_budget_without_a_limit_has_no_series() {
        let metrics = Metrics::new();
        metrics.shard.show_limit("snapshot", u64::MAX);
        metrics.shard.show_limit("parked", 7);
        let text = metrics.text();
        assert!(text.contains("zeroshard_memory_limit_bytes{kind=\"parked\"} 7"));
        assert!(!text.contains("kind=\"snapshot\""));
    }

    fn metrics_names(metrics: &Metrics) -> HashSet<String> {
        metrics.gather().iter().map(|family| family.name().to_owned()).collect()
    }
}
