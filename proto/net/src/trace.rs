//! Traces of steps for OpenTelemetry: one tree of spans per step, from the push of each worker to
//! the decision. Pulls, saves and copies of a version belong to the step that begins with it.
//! Nothing is recorded before [`start`].
//!
//! The trace id and the id of the root span are computed from the job, the epoch and the step.
//! Workers, shard servers and the coordinator therefore agree on them without a message, and an
//! error can name the trace of its step. A push carries the W3C header `traceparent`, so that the
//! span of the shard server becomes a child of the span of the worker.

mod export;

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    KeyValue, SpanId, TraceFlags, TraceId, Value,
    trace::{SpanContext, Status, TraceState},
};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

pub use opentelemetry::trace::SpanKind;

use zeroshard_model::Error;

pub use export::{check, flush, start, start_from_environment, this_process};

/// The header that carries the parent of a span: <https://www.w3.org/TR/trace-context/>.
pub(crate) const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");
/// The hash of the ids must differ from other uses of the hash.
const CONTEXT: &str = "zeroshard.v1 trace of a step";

/// The trace of a step in one epoch. Its spans are recorded if traces are exported and the sample
/// contains this one; otherwise all methods do nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trace(Option<Ids>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ids {
    trace: TraceId,
    /// The span of the whole step.
    root: SpanId,
    /// The parent of new spans.
    parent: SpanId,
}

impl Ids {
    fn of_step(job_id: u64, epoch: u64, step: u64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        for number in [job_id, epoch, step] {
            hasher.update(&number.to_le_bytes());
        }
        let hash = hasher.finalize();
        let bytes = hash.as_bytes();
        let root = SpanId::from_bytes(std::array::from_fn(|at| bytes[16 + at]));
        Self { trace: TraceId::from_bytes(std::array::from_fn(|at| bytes[at])), root, parent: root }
    }

    /// The ids with the parent that `headers` name, if they belong to the same trace.
    fn within(self, headers: &HeaderMap) -> Self {
        let parent = || {
            let header = headers.get(TRACE_PARENT)?.to_str().ok()?;
            let mut parts = header.split('-').skip(1);
            let (trace, span) = (parts.next()?, parts.next()?);
            let is_same = TraceId::from_hex(trace).ok()? == self.trace;
            SpanId::from_hex(span).ok().filter(|&span| is_same && span != SpanId::INVALID)
        };
        Self { parent: parent().unwrap_or(self.parent), ..self }
    }
}

impl Trace {
    /// The trace of a step.
    pub fn of_step(job_id: u64, epoch: u64, step: u64) -> Self {
        let Some(exporter) = export::exporter() else { return Self(None) };
        let ids = Ids::of_step(job_id, epoch, step);
        Self(exporter.is_sampled(ids.trace).then_some(ids))
    }

    /// The trace id, as 32 hexadecimal digits.
    pub fn id(&self) -> Option<String> {
        self.0.map(|ids| ids.trace.to_string())
    }

    /// The trace whose new spans are children of the caller's span, if `headers` name one of this
    /// trace.
    #[must_use]
    pub fn within(self, headers: &HeaderMap) -> Self {
        Self(self.0.map(|ids| ids.within(headers)))
    }

    /// Starts a span.
    pub fn span(&self, name: &'static str, kind: SpanKind) -> Span {
        self.open(name, kind, |ids| (export::new_id(), ids.parent))
    }

    /// Starts the span of the whole step, of which all other spans are descendants. Only the
    /// coordinator does this.
    pub fn root(&self, name: &'static str) -> Span {
        self.open(name, SpanKind::Internal, |ids| (ids.root, SpanId::INVALID))
    }

    fn open(
        &self,
        name: &'static str,
        kind: SpanKind,
        ids: impl FnOnce(&Ids) -> (SpanId, SpanId),
    ) -> Span {
        Span(self.0.map(|of| {
            let (id, parent) = ids(&of);
            Box::new(Open {
                trace: of.trace,
                parent,
                id,
                name,
                kind,
                start: SystemTime::now(),
                end: None,
                attributes: Vec::new(),
                status: Status::Unset,
            })
        }))
    }

    /// Adds the trace id to the message of an error, if the error has a text for it.
    #[must_use]
    pub fn name_in(&self, mut error: Error) -> Error {
        let Some(id) = self.id() else { return error };
        if let Error::Timeout { waiting_for: text, .. }
        | Error::StepAborted { cause: text, .. }
        | Error::Unavailable { cause: text, .. }
        | Error::Storage { cause: text, .. }
        | Error::Device { cause: text, .. }
        | Error::Internal { cause: text } = &mut error
            && !text.contains(&id)
        {
            text.push_str(&format!(" (trace {id})"));
        }
        error
    }
}

/// A part of a step. It ends, and is exported, when it is dropped.
#[derive(Debug)]
#[must_use = "a span ends when it is dropped"]
pub struct Span(Option<Box<Open>>);

#[derive(Debug)]
struct Open {
    trace: TraceId,
    parent: SpanId,
    id: SpanId,
    name: &'static str,
    kind: SpanKind,
    start: SystemTime,
    /// `None`: when it is dropped.
    end: Option<SystemTime>,
    attributes: Vec<KeyValue>,
    status: Status,
}

impl Span {
    /// Moves the start of the span to this duration before now.
    pub fn since(mut self, before: Duration) -> Self {
        if let Some(open) = &mut self.0 {
            open.start = SystemTime::now().checked_sub(before).unwrap_or(open.start);
        }
        self
    }

    /// Ends the span, this duration after its start.
    pub fn end_after(mut self, took: Duration) {
        if let Some(open) = &mut self.0 {
            open.end = open.start.checked_add(took);
        }
    }

    /// Adds an attribute.
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        if let Some(open) = &mut self.0 {
            open.attributes.push(KeyValue::new(key, value));
        }
        self
    }

    /// Runs `work`, and ends the span with it. The span fails if `work` does.
    pub async fn over<T, E: ToString>(
        mut self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        work.await.inspect_err(|error| self.fail(error))
    }

    /// Marks the span as failed.
    pub fn fail(&mut self, error: &impl ToString) {
        if let Some(open) = &mut self.0 {
            open.status = Status::error(error.to_string());
        }
    }

    /// The value of the header that makes this span the parent of the spans of the callee.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let Open { trace, id, .. } = **self.0.as_ref()?;
        HeaderValue::try_from(format!("00-{trace}-{id}-01")).ok()
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let (Some(open), Some(exporter)) = (self.0.take(), export::exporter()) {
            exporter.end(open.ended());
        }
    }
}

impl Open {
    fn ended(self) -> SpanData {
        let context =
            SpanContext::new(self.trace, self.id, TraceFlags::SAMPLED, false, TraceState::NONE);
        SpanData {
            span_context: context,
            parent_span_id: self.parent,
            parent_span_is_remote: self.kind == SpanKind::Server,
            span_kind: self.kind,
            name: self.name.into(),
            start_time: self.start,
            end_time: self.end.unwrap_or_else(SystemTime::now),
            attributes: self.attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: self.status,
            instrumentation_scope: export::scope(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_computes_the_same_ids_and_steps_and_epochs_differ() {
        let ids = Ids::of_step(1, 2, 3);
        assert_eq!(ids, Ids::of_step(1, 2, 3));
        assert_eq!(ids.trace.to_string().len(), 32);
        for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4)] {
            let other = Ids::of_step(other.0, other.1, other.2);
            assert_ne!(ids.trace, other.trace);
            assert_ne!(ids.root, other.root);
        }
    }

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(TRACE_PARENT, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn a_header_of_the_same_trace_names_the_parent_and_other_headers_are_ignored() {
        let ids = Ids::of_step(1, 2, 3);
        let (trace, other) = (ids.trace, Ids::of_step(1, 2, 4).trace);
        let named = ids.within(&headers(&format!("00-{trace}-00f067aa0ba902b7-01")));
        assert_eq!(named.parent, SpanId::from_hex("00f067aa0ba902b7").unwrap());
        assert_eq!((named.trace, named.root), (ids.trace, ids.root));
        for ignored in [
            format!("00-{other}-00f067aa0ba902b7-01"),
            format!("00-{trace}-0000000000000000-01"),
            format!("00-{trace}"),
            "00-xyz-00f067aa0ba902b7-01".to_owned(),
            String::new(),
        ] {
            assert_eq!(ids.within(&headers(&ignored)), ids, "{ignored:?}");
        }
        assert_eq!(ids.within(&HeaderMap::new()), ids);
    }

    #[test]
    fn without_an_exporter_nothing_is_recorded_and_errors_are_unchanged() {
        let trace = Trace::of_step(1, 2, 3);
        let error = Error::Timeout { waiting_for: "rank 1".to_owned(), waited_ms: 5 };
        assert_eq!(trace.id(), None);
        assert_eq!(trace.name_in(error.clone()), error);
        let span = trace.span("push", SpanKind::Client).with("zeroshard.rank", 1);
        assert_eq!(span.header(), None);
    }

    #[test]
    fn an_error_names_the_trace_once() {
        let trace = Trace(Some(Ids::of_step(1, 2, 3)));
        let id = trace.id().unwrap();
        let error = Error::Timeout { waiting_for: "rank 1 to commit".to_owned(), waited_ms: 5 };
        let named = trace.name_in(trace.name_in(error));
        let expected = format!("timed out after 5 ms waiting for rank 1 to commit (trace {id})");
        assert_eq!(named.to_string(), expected);
    }

    #[test]
    fn a_span_has_its_parent_times_and_status() {
        let ids = Ids::of_step(1, 2, 3);
        let trace = Trace(Some(ids));
        let mut span = trace.span("push", SpanKind::Client).since(Duration::from_secs(5));
        let header = span.header().unwrap();
        span.fail(&"lost");
        let child = trace.within(&HeaderMap::from_iter([(TRACE_PARENT, header)]));
        let child = child.span("receive", SpanKind::Server).0.take().unwrap().ended();
        let span = span.0.take().unwrap().ended();
        assert_eq!(child.parent_span_id, span.span_context.span_id());
        assert_eq!(child.span_context.trace_id(), span.span_context.trace_id());
        assert_eq!(span.parent_span_id, ids.root);
        assert_eq!(span.status, Status::error("lost"));
        let took = span.end_time.duration_since(span.start_time).unwrap();
        assert!(took >= Duration::from_secs(5) && took < Duration::from_secs(60), "{took:?}");
        let root = trace.root("step").0.take().unwrap().ended();
        assert_eq!(root.span_context.span_id(), ids.root);
        assert_eq!(root.parent_span_id, SpanId::INVALID);
    }
}
