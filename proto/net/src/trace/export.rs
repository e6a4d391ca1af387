//! Export of spans to a collector over OTLP/gRPC, from threads of their own.

use std::{
    env, process,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use opentelemetry::{InstrumentationScope, KeyValue, SpanId, TraceId, trace::SpanKind};
use opentelemetry_otlp::{
    SpanExporter, WithExportConfig, WithTonicConfig, tonic_types::transport::ClientTlsConfig,
};
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{
        BatchSpanProcessor, IdGenerator, RandomIdGenerator, Sampler, SamplingDecision,
        ShouldSample, SpanData, SpanExporter as SendSpans, SpanProcessor as _,
    },
};
use tokio::runtime::{Builder, Runtime};
use zeroshard_model::{Error, Result};

/// The environment variable with the URL of the collector.
const ENDPOINT_VARIABLE: &str = "ZEROSHARD_OTLP_ENDPOINT";
/// The environment variable with the fraction of the steps whose traces are exported.
const RATIO_VARIABLE: &str = "ZEROSHARD_TRACE_RATIO";

static EXPORTER: OnceLock<Exporter> = OnceLock::new();

/// Exports the spans of this process.
pub(super) struct Exporter {
    /// The process that has started the threads: they do not survive a fork.
    process: u32,
    sampler: Sampler,
    batches: BatchSpanProcessor,
}

/// The exporter, if [`start`] has been called.
pub(super) fn exporter() -> Option<&'static Exporter> {
    EXPORTER.get().filter(|exporter| exporter.process == process::id())
}

pub(super) fn new_id() -> SpanId {
    RandomIdGenerator::default().new_span_id()
}

/// The library that records the spans.
pub(super) fn scope() -> InstrumentationScope {
    static SCOPE: OnceLock<InstrumentationScope> = OnceLock::new();
    let scope = || {
        InstrumentationScope::builder("zeroshard").with_version(env!("CARGO_PKG_VERSION")).build()
    };
    SCOPE.get_or_init(scope).clone()
}

impl Exporter {
    fn new(endpoint: &str, ratio: f64, service: &'static str, instance: String) -> Result<Self> {
        let cause = |cause: &dyn ToString| Error::Internal {
            cause: format!("cannot start to export traces: {}", cause.to_string()),
        };
        let built = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .thread_name("zeroshard-trace")
            .build();
        let runtime = built.map_err(|error| cause(&error))?;
        let exporter = {
            let _entered = runtime.enter();
            let tls = ClientTlsConfig::new().with_enabled_roots();
            let builder = SpanExporter::builder().with_tonic().with_endpoint(endpoint);
            let builder = match endpoint.starts_with("https:") {
                true => builder.with_tls_config(tls),
                false => builder,
            };
            builder.build().map_err(|error| cause(&error))?
        };
        let outgoing = Outgoing {
            exporter: Arc::new(exporter),
            endpoint: endpoint.to_owned(),
            is_failing: AtomicBool::new(false),
            runtime: Some(runtime),
        };
        let mut batches = BatchSpanProcessor::builder(outgoing).build();
        let version = env!("CARGO_PKG_VERSION");
        let resource = Resource::builder().with_attributes([
            KeyValue::new("service.version", version),
            KeyValue::new("service.instance.id", instance),
        ]);
        // The standard variable takes precedence.
        let resource = match env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => resource,
            None => resource.with_service_name(service),
        };
        batches.set_resource(&resource.build());
        Ok(Self { process: process::id(), sampler: Sampler::TraceIdRatioBased(ratio), batches })
    }

    /// Returns whether the sample contains the trace. All processes with the same ratio decide
    /// equally.
    pub(super) fn is_sampled(&self, trace: TraceId) -> bool {
        is_sampled(&self.sampler, trace)
    }

    pub(super) fn end(&self, span: SpanData) {
        self.batches.on_end(span);
    }
}

fn is_sampled(sampler: &Sampler, trace: TraceId) -> bool {
    let result = sampler.should_sample(None, trace, "step", &SpanKind::Internal, &[], &[]);
    result.decision == SamplingDecision::RecordAndSample
}

/// Starts to export the traces of steps to the collector at `endpoint`, such as
/// `http://localhost:4317`, over OTLP/gRPC. `ratio` is the fraction of the steps, from 0 to 1, and
/// `service` the name of the program in traces, unless `OTEL_SERVICE_NAME` is set. `instance` tells
/// the processes of the program apart: the address of a server. The variables
/// `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_TIMEOUT` and
/// `OTEL_BSP_*` have their standard meaning. Further calls in the same process change nothing.
///
/// # Errors
/// [`Error::Invalid`] for an invalid endpoint or ratio.
pub fn start(endpoint: &str, ratio: f64, service: &'static str, instance: &str) -> Result<()> {
    check(endpoint, ratio)?;
    if EXPORTER.get().is_none() {
        let _ = EXPORTER.set(Exporter::new(endpoint, ratio, service, instance.to_owned())?);
    }
    Ok(())
}

/// Checks the arguments of [`start`].
///
/// # Errors
/// [`Error::Invalid`].
pub fn check(endpoint: &str, ratio: f64) -> Result<()> {
    let uri: Option<http::Uri> = endpoint.parse().ok();
    let is_url = uri.is_some_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.port_u16().is_some()
    });
    if !is_url {
        let expected = "the URL of a collector for OTLP/gRPC, such as http://localhost:4317";
        return Err(Error::invalid("OTLP endpoint", format!("{endpoint:?}"), expected));
    }
    if !(0.0..=1.0).contains(&ratio) {
        return Err(Error::invalid("trace ratio", ratio, "a number from 0 to 1"));
    }
    Ok(())
}

/// The name of a process that is not a server: the host and the number of the process.
pub fn this_process() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}:{}", host.trim(), process::id())
}

/// Starts to export traces if `ZEROSHARD_OTLP_ENDPOINT` is set. `ZEROSHARD_TRACE_RATIO` is the
/// fraction of the steps; its default is 1.
///
/// # Errors
/// Those of [`start`].
pub fn start_from_environment(service: &'static str) -> Result<()> {
    // A flag may have named another collector.
    if exporter().is_some() {
        return Ok(());
    }
    let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
    let Some(endpoint) = variable(ENDPOINT_VARIABLE) else { return Ok(()) };
    let ratio = match variable(RATIO_VARIABLE) {
        None => 1.0,
        Some(text) => text
            .parse()
            .map_err(|_| Error::invalid(RATIO_VARIABLE, text, "a number from 0 to 1"))?,
    };
    start(&endpoint, ratio, service, &this_process())
}

/// Sends the spans that have ended, and waits for at most five seconds. Programs call it before
/// they end.
pub fn flush() {
    if let Some(exporter) = exporter() {
        // `Outgoing` reports errors.
        let _ = exporter.batches.force_flush();
    }
}

/// Sends batches of spans on its own runtime, because the library polls the exporter on a thread
/// without one, and the runtime of a caller may end earlier. It reports the first of consecutive
/// errors.
#[derive(Debug)]
struct Outgoing {
    exporter: Arc<SpanExporter>,
    endpoint: String,
    is_failing: AtomicBool,
    runtime: Option<Runtime>,
}

impl Outgoing {
    fn note(&self, sent: &OTelSdkResult) {
        let was_failing = self.is_failing.swap(sent.is_err(), Ordering::Relaxed);
        match sent {
            Err(error) if !was_failing => {
                let endpoint = &self.endpoint;
                report(&format!("cannot send traces to {endpoint}, spans are lost: {error}"));
            }
            Ok(()) if was_failing => tracing::info!("traces are sent to {} again", self.endpoint),
            _ => {}
        }
    }
}

/// Writes a warning, also in a program without logs.
fn report(warning: &str) {
    use std::io::Write as _;
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{warning}"),
        // Standard error may be closed.
        false => _ = writeln!(std::io::stderr(), "zeroshard: {warning}"),
    }
}

impl SendSpans for Outgoing {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let exporter = self.exporter.clone();
        let sent = runtime.spawn(async move { exporter.export(batch).await }).await;
        let sent =
            sent.unwrap_or_else(|error| Err(OTelSdkError::InternalFailure(error.to_string())));
        self.note(&sent);
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        // The thread that drops it may be one of a runtime, which must not wait.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_url_with_a_port() {
        for good in ["http://localhost:4317", "https://collector.observe:4317", "http://[::1]:1"] {
            check(good, 1.0).unwrap();
        }
        for bad in ["localhost:4317", "grpc://localhost:4317", "http://localhost", "", "http://"] {
            assert!(matches!(check(bad, 1.0), Err(Error::Invalid { .. })), "{bad}");
        }
        for ratio in [-0.1, 1.1, f64::NAN] {
            assert!(matches!(check("http://localhost:1", ratio), Err(Error::Invalid { .. })));
        }
    }

    #[test]
    fn the_sample_has_the_fraction_of_the_ratio() {
        let count = |ratio| {
            let sampler = Sampler::TraceIdRatioBased(ratio);
            let ids = (0..1000).map(|step| super::super::Ids::of_step(1, 1, step).trace);
            ids.filter(|&trace| is_sampled(&sampler, trace)).count()
        };
        assert_eq!((count(0.0), count(1.0)), (0, 1000));
        let quarter = count(0.25);
        assert!((200..300).contains(&quarter), "{quarter}");
    }
}
