//! `Pin`: keeps a version of the parameters for a reader, while steps produce later ones.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt, stream};
use tonic::Status;
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};
use zeroshard_net::Deadline;
use zeroshard_proto::{pb, status::to_status};
use zeroshard_shard::{budget::Budget, part::Part};

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
}

impl<B: Backend> Drop for HeldPin<B> {
    fn drop(&mut self) {
        self.job.pins.remove(self.number);
    }
}

impl<B: Backend> HeldPin<B> {
    /// The response: its only message, and its end when the pin ends.
    pub(super) fn until_released(
        self,
    ) -> impl Stream<Item = Result<pb::PinResponse, Status>> + Send {
        let held = stream::iter([Ok(pb::PinResponse { pin: self.number })]);
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
/// [`Error::OutOfMemory`] if the budget for pinned versions is exhausted; [`Error::Timeout`].
pub(super) async fn hold<B: Backend>(
    budget: &Arc<Budget>,
    job: &Arc<Job<B>>,
    request: &pb::PinRequest,
    deadline: Deadline,
) -> Result<HeldPin<B>> {
    let content = Content { version: request.version, part: Part::Parameters, attempt: None };
    let mut missing: Vec<u32> = match request.slices.is_empty() {
        true => job.primary_slices().map(|(index, _)| index).collect(),
        false => request.slices.clone(),
    };
    missing.sort_unstable();
    missing.dedup();
    let mut slices = HashMap::with_capacity(missing.len());
    let all_held = || {
        // Each slice is held as soon as it has the version: the next step may follow at once.
        for index in std::mem::take(&mut missing) {
            let slice = job.primary_slice(index)?;
            let Some(buffer) = content.read(job, slice)? else {
                missing.push(index);
                continue;
            };
            let bytes = bytes_of(job, slice, Part::Parameters);
            let space = budget.take(bytes).ok_or_else(|| exhausted(budget, content.version))?;
            slices.insert(index, (buffer, space));
        }
        Ok(missing.is_empty().then_some(()))
    };
    let waiting_for = || format!("version {} of job {:?}", content.version, job.spec.name);
    job.wait_for(deadline, all_held, waiting_for).await?;
    let number = identity::random()?;
    job.pins.insert(number, Pin { version: content.version, slices });
    let limit = match request.limit_ms {
        0 => LIMIT,
        limit => Duration::from_millis(limit.into()).min(MAX_WAIT),
    };
    Ok(HeldPin { job: job.clone(), number, limit })
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
