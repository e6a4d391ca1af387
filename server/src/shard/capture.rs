//! `Capture`: waits for a step of a job, and sends it to a caller, who can apply it again.

use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::oneshot;
use zeroshard_kernels::Backend;
use zeroshard_model::Result;
use zeroshard_net::Deadline;
use zeroshard_proto::pb::{self, capture_response::Part};

use super::{captured::Captured, captures::Wanted, job::Job, store::Store};

/// A capture of a caller, which ends when this value is dropped.
pub(super) struct Capture<B: Backend> {
    job: Arc<Job<B>>,
    step: u64,
    deadline: Deadline,
    captured: oneshot::Receiver<Result<Captured>>,
}

impl<B: Backend> Drop for Capture<B> {
    fn drop(&mut self) {
        self.captured.close();
        self.job.captures.disarm(&self.job);
    }
}

impl<B: Backend> Capture<B> {
    /// Makes the slices of a request keep gradients.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if the step has begun, or the job is on another line;
    /// [`Error::NotHere`] for a slice of which another server is the primary; [`Error::Refused`] if
    /// another call captures a step of the job.
    ///
    /// [`Error::VersionGone`]: zeroshard_model::Error::VersionGone
    /// [`Error::NotHere`]: zeroshard_model::Error::NotHere
    /// [`Error::Refused`]: zeroshard_model::Error::Refused
    pub(super) fn begin(
        store: &Store<B>,
        job: Arc<Job<B>>,
        request: &pb::CaptureRequest,
        deadline: Deadline,
    ) -> Result<Self> {
        let pb::CaptureRequest { line, step, until_spike, .. } = *request;
        job.check_line(line, step)?;
        let mut slices = match request.slices.is_empty() {
            true => job.primary_slices().map(|(index, _)| index).collect(),
            false => request.slices.clone(),
        };
        slices.sort_unstable();
        slices.dedup();
        let wanted = Wanted { slices, step, until_spike };
        let captured = job.captures.arm(&job, &wanted, &store.pinned)?;
        Ok(Self { job, step, deadline, captured })
    }

    /// The messages of the response.
    pub(super) fn messages(
        self,
    ) -> impl Stream<Item = Result<pb::CaptureResponse>> + Send + use<B> {
        let begun = Part::Begun(pb::CaptureBegun {});
        let begun = stream::iter([Ok(pb::CaptureResponse { part: Some(begun) })]);
        let parts = stream::once(self.wait()).flat_map(|captured| match captured {
            Ok(captured) => captured.messages().map(Ok).left_stream(),
            Err(error) => stream::iter([Err(error)]).right_stream(),
        });
        begun.chain(parts)
    }

    /// Waits for the step.
    async fn wait(mut self) -> Result<Captured> {
        let job = self.job.clone();
        let captured = async {
            tokio::select! {
                captured = &mut self.captured => captured.unwrap_or_else(|_| Err(job.closed_error())),
                () = job.closed().cancelled() => Err(job.closed_error()),
            }
        };
        let (job, step) = (&job.spec.name, self.step);
        self.deadline.limit(|| format!("step {step} of job {job:?}"), captured).await?
    }
}
