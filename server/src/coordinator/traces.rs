//! The coordinator's spans in the trace of a step. The state machine does not know them.

use std::time::Duration;

use zeroshard_coordinator::{
    operators::{history::Step, metrics_view::Waits},
    vocabulary::ids::{JobRef, Now},
};
use zeroshard_model::Attempt;
use zeroshard_net::trace::{Span, SpanKind, Trace};

fn trace_of(job: &JobRef, attempt: Attempt) -> Trace {
    Trace::of_step(job.id, attempt.epoch, attempt.step)
}

/// The root span of a step that took this time until now.
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

/// Records a step that is decided `now`.
pub(super) fn decided(job: &JobRef, step: &Step, now: Now) {
    let trace = trace_of(job, step.attempt);
    let root = root(trace, job, step.attempt, now.saturating_sub(step.began));
    drop(root.with("zeroshard.applied", step.applied).with("zeroshard.gradient_norm", step.norm));
    let Waits { ranks, servers, .. } = step.waits;
    let wait = |name, before, took| {
        trace.span(name, SpanKind::Internal).since(before).end_after(took);
    };
    wait("wait for ranks", ranks + servers, ranks);
    wait("wait for servers", servers, servers);
}

/// Records a step that took this time until now, and continues in another epoch.
pub(super) fn interrupted(job: &JobRef, attempt: Attempt, took: Duration) {
    let mut root = root(trace_of(job, attempt), job, attempt, took);
    root.fail(&"the step continues in another epoch");
}
