//! `Pin`: keeps a version of the parameters, and of the optimizer state, for a reader, while steps
//! produce later ones.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt, stream};
use tonic::Status;
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result, average};
use zeroshard_net::Deadline;
use zeroshard_proto::{pb, status::to_status};
use zeroshard_shard::{budget::Budget, slice::Slice};

use super::{
    content::{Content, bytes_of},
    job::Job,
    pins::Pin,
};
use crate::{config::MAX_WAIT, identity};

/// The time limit of a pin for which the caller does not set one.
const LIMIT: Duration = Duration::from_secs(60);

/// A pin, which ends when this value is dropped.
pub(super) struct HeldPin<B: Backend> {
    job: Arc<Job<B>>,
    number: u64,
    limit: Duration,
    /// The steps that were applied to the slices whose optimizer state is pinned.
    steps: Vec<pb::SliceSteps>,
}

impl<B: Backend> Drop for HeldPin<B> {
    fn drop(&mut self) {
        self.job.pins.remove(self.number);
    }
}

impl<B: Backend> HeldPin<B> {
    /// The response: its only message, and its end when the pin ends.
    pub(super) fn until_released(
        mut self,
    ) -> impl Stream<Item = Result<pb::PinResponse, Status>> + Send {
        let steps = std::mem::take(&mut self.steps);
        let held = stream::iter([Ok(pb::PinResponse { pin: self.number, steps })]);
        let released = stream::once(async move {
            tokio::select! {
                () = tokio::time::sleep(self.limit) => None,
                () = self.job.closed().cancelled() => Some(Err(to_status(self.job.closed_error()))),
            }
        });
        held.chain(released.filter_map(std::future::ready))
    }
}

/// Waits for the version of a request, and keeps it.
///
/// # Errors
/// [`Error::VersionGone`]; [`Error::NotHere`] for a slice of which another server is the primary;
/// [`Error::OutOfMemory`] if the budget for pinned versions is exhausted; [`Error::Timeout`];
/// [`Error::Invalid`] for an average that the job does not have.
pub(super) async fn hold<B: Backend>(
    budget: &Arc<Budget>,
    job: &Arc<Job<B>>,
    request: &pb::PinRequest,
    deadline: Deadline,
) -> Result<HeldPin<B>> {
    let version = request.version;
    job.check_line(request.line, version)?;
    for name in &request.averages {
        job.spec.average(name)?;
    }
    let mut pin = Pin {
        version,
        slices: HashMap::new(),
        state: request.optimizer_state,
        averages: request.averages.iter().map(|name| average::values_of(name)).collect(),
    };
    let mut missing: Vec<u32> = match request.slices.is_empty() {
        true => job.primary_slices().map(|(index, _)| index).collect(),
        false => request.slices.clone(),
    };
    missing.sort_unstable();
    missing.dedup();
    let mut steps = Vec::new();
    let all_held = || {
        // Each slice is held as soon as it has the version: the next step may follow at once.
        for index in std::mem::take(&mut missing) {
            let slice = job.primary_slice(index)?;
            let mut parts = Vec::new();
            for part in pin.parts(slice) {
                let content = Content { version, part, attempt: None };
                let Some(buffer) = content.read(job, slice)? else {
                    parts.clear();
                    break;
                };
                parts.push((part, buffer));
            }
            if parts.is_empty() {
                missing.push(index);
                continue;
            }
            for (part, buffer) in parts {
                let bytes = bytes_of(job, slice, part);
                let kept = job.pins.keep((version, index, part), buffer, (budget, bytes));
                let kept = kept.ok_or_else(|| exhausted(budget, version))?;
                pin.slices.insert((index, part), kept);
            }
            if request.optimizer_state && slice.group.is_some() {
                steps.push(steps_of(job, index, slice, version)?);
            }
        }
        Ok(missing.is_empty().then_some(()))
    };
    let waiting_for = || format!("version {version} of job {:?}", job.spec.name);
    job.wait_for(deadline, all_held, waiting_for).await?;
    steps.sort_unstable_by_key(|of| of.slice);
    let number = identity::random()?;
    job.pins.insert(number, pin);
    let limit = match request.limit_ms {
        0 => LIMIT,
        limit => Duration::from_millis(limit.into()).min(MAX_WAIT),
    };
    Ok(HeldPin { job: job.clone(), number, limit, steps })
}

/// The steps that were applied to a slice at a version.
///
/// # Errors
/// [`Error::VersionGone`].
pub(super) fn steps_of<B: Backend>(
    job: &Job<B>,
    index: u32,
    slice: &Slice<B>,
    version: u64,
) -> Result<pb::SliceSteps> {
    let applied = slice.applied(&job.spec.name, version)?;
    Ok(pb::SliceSteps {
        slice: index,
        applied: applied.count,
        scalar_state: job.spec.scalar_state_of(slice.spec.tensor, &applied),
        averaged: applied.averaged,
    })
}

fn exhausted(budget: &Budget, version: u64) -> Error {
    Error::OutOfMemory {
        what: format!(
            "pinning version {version}: pins of this server may hold {} bytes \
             (--pinned-bytes), and hold {}",
            budget.limit(),
            budget.used()
        ),
        bytes: budget.limit(),
    }
}
