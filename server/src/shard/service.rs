//! The gRPC service `zeroshard.v1.ShardService`.

use std::{sync::Arc, thread};

use futures_util::{StreamExt, stream::BoxStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    pb::{self, shard_service_server},
    status::to_status,
};

use super::{
    capture::Capture,
    changes, contributions,
    measure::{self, measure},
    pin,
    store::Store,
};
use crate::access::Caller;

type MeasureStream = BoxStream<'static, Result<pb::MeasureResponse, Status>>;
type ChangesStream = BoxStream<'static, Result<pb::ChangesResponse, Status>>;
type CaptureStream = BoxStream<'static, Result<pb::CaptureResponse, Status>>;
type PinStream = BoxStream<'static, Result<pb::PinResponse, Status>>;

/// The number of slices, of up to 256 MiB together, that are read in one turn. Between turns, the
/// call ends if the caller has cancelled it.
const SLICES_AT_ONCE: usize = 16;

pub(super) struct Service<B: Backend> {
    store: Arc<Store<B>>,
    /// Turns to hash slices, as many at a time as there are cores, because all ranks of a job may
    /// ask for its hash.
    digests: Arc<Semaphore>,
    measurements: measure::Gate,
    shutdown: CancellationToken,
}

impl<B: Backend> Service<B> {
    pub(super) fn new(store: Arc<Store<B>>, shutdown: CancellationToken) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let digests = Arc::new(Semaphore::new(cores));
        Self { store, digests, measurements: measure::Gate::default(), shutdown }
    }

    fn deadline<T>(&self, request: &Request<T>) -> Deadline {
        self.store.deadline(Deadline::of_call(request.metadata().as_ref()))
    }

    /// Answers a call, unless the server shuts down before.
    async fn answer<T>(
        &self,
        work: impl Future<Output = Result<T>>,
    ) -> Result<Response<T>, Status> {
        tokio::select! {
            answer = work => Ok(Response::new(answer.map_err(to_status)?)),
            () = self.shutdown.cancelled() => {
                Err(Status::unavailable("this shard server is shutting down"))
            }
        }
    }

    /// Hashes the slices of which this server is the primary, on threads that serve no calls.
    async fn digests(&self, request: Request<pb::DigestRequest>) -> Result<pb::DigestResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let pb::DigestRequest { job, job_id, version, line } = request.into_inner();
        let job = self.store.job(&job, job_id)?;
        // A call for a later version must not keep others from their turn.
        job.check_line(line, version)?;
        job.wait_for_version(version, deadline).await?;
        let primaries: Vec<u32> = job.primary_slices().map(|(slice, _)| slice).collect();
        let name = &job.spec.name;
        let waiting_for = || format!("other calls that hash all slices, at job {name:?}");
        let mut slices = Vec::with_capacity(primaries.len());
        for part in primaries.chunks(SLICES_AT_ONCE) {
            let turn = self.digests.clone().acquire_owned();
            let turn = deadline.limit(waiting_for, turn).await?;
            let (job, part) = (job.clone(), part.to_vec());
            let work = move || {
                // The turn lasts until this thread has finished, even if the call has ended.
                let _turn = turn.expect("the semaphore is never closed");
                let digest = |slice| {
                    let digest = job.primary_slice(slice)?.digest(&job.spec.name, version)?;
                    Ok(pb::SliceDigest { slice, digest: digest.to_vec().into() })
                };
                part.into_iter().map(digest).collect::<Result<Vec<_>>>()
            };
            slices.extend(self.store.failure.blocking("hash slices", work).await?);
        }
        Ok(pb::DigestResponse { slices })
    }

    async fn captured(&self, request: Request<pb::CaptureRequest>) -> Result<CaptureStream> {
        // A spike may be days away. The caller says for how long it waits.
        let deadline = Deadline::of_call(request.metadata().as_ref());
        let deadline = deadline.unwrap_or_else(|| Deadline::after(self.store.limits.wait));
        Caller::of(request.extensions())?.check_train(&request.get_ref().job)?;
        let request = request.into_inner();
        let job = self.store.job(&request.job, request.job_id)?;
        job.captures.until_free().await;
        let store = self.store.clone();
        let begin = move || Capture::begin(&store, job, &request, deadline);
        let capture = self.store.failure.blocking("begin a capture", begin).await?;
        let shutdown = self.shutdown.clone().cancelled_owned();
        let messages = capture.messages().map(|message| message.map_err(to_status));
        Ok(messages.take_until(shutdown).boxed())
    }

    async fn pinned(&self, request: Request<pb::PinRequest>) -> Result<PinStream> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let request = request.into_inner();
        let job = self.store.job(&request.job, request.job_id)?;
        let held = pin::hold(&self.store.pinned, &job, &request, deadline).await?;
        let shutdown = self.shutdown.clone().cancelled_owned();
        Ok(held.until_released().take_until(shutdown).boxed())
    }

    async fn changed(&self, request: Request<pb::ChangesRequest>) -> Result<ChangesStream> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let request = request.into_inner();
        let job = self.store.job(&request.job, request.job_id)?;
        let changes = changes::changes(&self.store, &self.digests, job, request, deadline).await?;
        let shutdown = self.shutdown.clone().cancelled_owned();
        Ok(changes.map(|message| message.map_err(to_status)).take_until(shutdown).boxed())
    }

    fn window(&self, request: Request<pb::OpenWindowRequest>) -> Result<pb::OpenWindowResponse> {
        let caller = Caller::of(request.extensions())?;
        let pb::OpenWindowRequest { job, job_id, rank, lease, pin } = request.into_inner();
        if pin != 0 {
            caller.check_read(&job)?;
            let job = self.store.job(&job, job_id)?;
            return match job.pins.get(pin) {
                Some(_) => self.store.windows.prepare(&job, None),
                None => Err(Error::refused("the pin has ended; pin the version again")),
            };
        }
        caller.check_train(&job)?;
        let job = self.store.job(&job, job_id)?;
        if rank >= job.spec.world {
            let expected = format!("less than the world size, {}", job.spec.world);
            return Err(Error::invalid("rank", rank, expected));
        }
        job.check_lease(rank, lease)?;
        self.store.windows.prepare(&job, Some(rank))
    }

    async fn contributed(
        &self,
        request: Request<pb::ContributionsRequest>,
    ) -> Result<pb::ContributionsResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let pb::ContributionsRequest { job, job_id, step, line } = request.into_inner();
        let job = self.store.job(&job, job_id)?;
        let version = step.saturating_add(1);
        job.check_line(line, version)?;
        job.wait_for_version(version, deadline).await?;
        Ok(contributions::message(&job.contributions(step)?))
    }

    async fn applied_steps(&self, request: Request<pb::StepsRequest>) -> Result<pb::StepsResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let request = request.into_inner();
        let job = self.store.job(&request.job, request.job_id)?;
        job.check_line(request.line, request.version)?;
        job.wait_for_version(request.version, deadline).await?;
        let mut response = pb::StepsResponse::default();
        for (index, slice) in job.primary_slices().filter(|(_, slice)| slice.group.is_some()) {
            response.slices.push(pin::steps_of(&job, index, slice, request.version)?);
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl<B: Backend> shard_service_server::ShardService for Service<B> {
    async fn digest(
        &self,
        request: Request<pb::DigestRequest>,
    ) -> Result<Response<pb::DigestResponse>, Status> {
        self.answer(self.digests(request)).await
    }

    type CaptureStream = CaptureStream;

    async fn capture(
        &self,
        request: Request<pb::CaptureRequest>,
    ) -> Result<Response<CaptureStream>, Status> {
        self.answer(self.captured(request)).await
    }

    type PinStream = PinStream;

    async fn pin(&self, request: Request<pb::PinRequest>) -> Result<Response<PinStream>, Status> {
        self.answer(self.pinned(request)).await
    }

    type ChangesStream = ChangesStream;

    async fn changes(
        &self,
        request: Request<pb::ChangesRequest>,
    ) -> Result<Response<ChangesStream>, Status> {
        self.answer(self.changed(request)).await
    }

    async fn open_window(
        &self,
        request: Request<pb::OpenWindowRequest>,
    ) -> Result<Response<pb::OpenWindowResponse>, Status> {
        self.answer(async { self.window(request) }).await
    }

    async fn steps(
        &self,
        request: Request<pb::StepsRequest>,
    ) -> Result<Response<pb::StepsResponse>, Status> {
        self.answer(self.applied_steps(request)).await
    }

    async fn contributions(
        &self,
        request: Request<pb::ContributionsRequest>,
    ) -> Result<Response<pb::ContributionsResponse>, Status> {
        self.answer(self.contributed(request)).await
    }

    type MeasureStream = MeasureStream;

    async fn measure(
        &self,
        request: Request<pb::MeasureRequest>,
    ) -> Result<Response<MeasureStream>, Status> {
        let messages = measure(&self.measurements, request.get_ref().bytes).map_err(to_status)?;
        let shutdown = self.shutdown.clone().cancelled_owned();
        Ok(Response::new(messages.map(Ok).take_until(shutdown).boxed()))
    }
}
