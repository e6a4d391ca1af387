//! The gRPC service `zeroshard.v1.ShardService`.

use std::sync::Arc;

use futures_util::{StreamExt, stream::BoxStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use zeroshard_proto::{
    Deadline, Result,
    pb::{self, shard_service_server},
};

use super::{
    measure::{self, measure},
    pin,
    store::Store,
};
use crate::{access::Caller, backend::Backend};

type MeasureStream = BoxStream<'static, Result<pb::MeasureResponse, Status>>;
type PinStream = BoxStream<'static, Result<pb::PinResponse, Status>>;

pub(super) struct Service<B: Backend> {
    store: Arc<Store<B>>,
    measurements: measure::Gate,
    shutdown: CancellationToken,
}

impl<B: Backend> Service<B> {
    pub(super) fn new(store: Arc<Store<B>>, shutdown: CancellationToken) -> Self {
        Self { store, measurements: measure::Gate::default(), shutdown }
    }

    fn deadline<T>(&self, request: &Request<T>) -> Deadline {
        self.store.deadline(Deadline::of_call(request.metadata().as_ref()))
    }

    async fn digests(&self, request: Request<pb::DigestRequest>) -> Result<pb::DigestResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let request = request.into_inner();
        let job = self.store.job(&request.job, request.job_id)?;
        job.wait_for_version(request.version, deadline).await?;
        // Hashing reads the whole state, so it does not run on a thread that serves other calls.
        let digests = move || {
            let digest = |(slice, held): (u32, &super::slice::Slice<B>)| {
                let digest = held.digest(&request.job, request.version)?;
                Ok(pb::SliceDigest { slice, digest: digest.to_vec().into() })
            };
            job.primary_slices().map(digest).collect::<Result<_>>()
        };
        let slices = self.store.failure.blocking("hash the slices", digests).await?;
        Ok(pb::DigestResponse { slices })
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

    async fn applied_steps(&self, request: Request<pb::StepsRequest>) -> Result<pb::StepsResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let request = request.into_inner();
        let job = self.store.job(&request.job, request.job_id)?;
        job.wait_for_version(request.version, deadline).await?;
        let mut response = pb::StepsResponse::default();
        for (index, slice) in job.primary_slices().filter(|(_, slice)| slice.group.is_some()) {
            let applied = slice.applied(&request.job, request.version)?;
            response.slices.push(pb::SliceSteps {
                slice: index,
                applied: applied.count,
                scalar_state: applied.scalar_state(&job.spec.groups[0]).to_vec(),
            });
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
        tokio::select! {
            digests = self.digests(request) => Ok(Response::new(digests?)),
            () = self.shutdown.cancelled() => Err(Status::unavailable("this shard server is shutting down")),
        }
    }

    type PinStream = PinStream;

    async fn pin(&self, request: Request<pb::PinRequest>) -> Result<Response<PinStream>, Status> {
        tokio::select! {
            pinned = self.pinned(request) => Ok(Response::new(pinned?)),
            () = self.shutdown.cancelled() => Err(Status::unavailable("this shard server is shutting down")),
        }
    }

    async fn steps(
        &self,
        request: Request<pb::StepsRequest>,
    ) -> Result<Response<pb::StepsResponse>, Status> {
        tokio::select! {
            steps = self.applied_steps(request) => Ok(Response::new(steps?)),
            () = self.shutdown.cancelled() => Err(Status::unavailable("this shard server is shutting down")),
        }
    }

    type MeasureStream = MeasureStream;

    async fn measure(
        &self,
        request: Request<pb::MeasureRequest>,
    ) -> Result<Response<MeasureStream>, Status> {
        let messages = measure(&self.measurements, request.get_ref().bytes)?;
        let shutdown = self.shutdown.clone().cancelled_owned();
        Ok(Response::new(messages.map(Ok).take_until(shutdown).boxed()))
    }
}
