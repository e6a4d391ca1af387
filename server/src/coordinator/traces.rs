//! The coordinator's spans in the trace of a step. The state machine does not know them.

use std::time::Duration;

use zeroshard_proto::trace::{Span, SpanKind, Trace};

use super::{events::JobRef, history::Step};
use crate::{attempt::Attempt, metrics::Waits};

fn trace_of(job: &JobRef, attempt: Attempt) -> Trace {
    Trace::of_step(job.id, attempt.epoch, attempt.step)
}

/// The root span of a step that took until now.
fn root(trace: Trace, job: &JobRef, attempt: Attempt, took: Duration) -> Span {
    let Attempt { epoch, step, number } = attempt;
    trace
        .root("step")
        .since(took)
        .with("zeroshard.job", job.name.clone())
        .with("zeroshard.epoch", epoch as i64)
        .with("zeroshard.step", step as i64)
        .with("zeroshard.attempt", i64::from(number))
}

/// A step was decided. `since_last`: the time since the decision before it.
pub(super) fn decided(job: &JobRef, step: &Step, since_last: Option<Duration>) {
    let trace = trace_of(job, step.attempt);
    let Waits { ranks, servers, .. } = step.waits;
    let waited = ranks + servers;
    let root = root(trace, job, step.attempt, since_last.unwrap_or(waited).max(waited));
    drop(root.with("zeroshard.applied", step.applied).with("zeroshard.gradient_norm", step.norm));
    let wait = |name, before, took| {
        trace.span(name, SpanKind::Internal).since(before).end_after(took);
    };
    wait("wait for ranks", waited, ranks);
    wait("wait for servers", servers, servers);
}

/// A step was aborted, and will be run again in another epoch.
pub(super) fn aborted(job: &JobRef, attempt: Attempt, since_last: Option<Duration>) {
    let took = since_last.unwrap_or_default();
    let mut root = root(trace_of(job, attempt), job, attempt, took);
    root.fail(&"the step was aborted");
}
