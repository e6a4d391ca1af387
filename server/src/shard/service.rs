//! The gRPC service `zeroshard.v1.ShardService`.

use std::{sync::Arc, thread};

use futures_util::{StreamExt, stream::BoxStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use zeroshard_proto::{
    Deadline, Result,
    pb::{self, shard_service_server},
};

use super::{
    job::Job,
    measure::{self, measure},
    pin,
    store::Store,
};
use crate::{access::Caller, backend::Backend};

type MeasureStream = BoxStream<'static, Result<pb::MeasureResponse, Status>>;
type PinStream = BoxStream<'static, Result<pb::PinResponse, Status>>;

/// The number of slices, of up to 256 MiB together, that are read before the server checks again
/// whether the caller has cancelled the call.
const READ: usize = 16;

pub(super) struct Service<B: Backend> {
    store: Arc<Store<B>>,
    /// Permits one call at a time to sum squares, so that it uses one core and one version of a
    /// slice beside training.
    sums: Arc<Semaphore>,
    /// Permits as many calls at a time to hash slices as there are cores. The ranks of a job may
    /// all ask for its hash.
    digests: Arc<Semaphore>,
    measurements: measure::Gate,
    shutdown: CancellationToken,
}

impl<B: Backend> Service<B> {
    pub(super) fn new(store: Arc<Store<B>>, shutdown: CancellationToken) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let [sums, digests] = [1, cores].map(|calls| Arc::new(Semaphore::new(calls)));
        Self { store, sums, digests, measurements: measure::Gate::default(), shutdown }
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
            answer = work => Ok(Response::new(answer?)),
            () = self.shutdown.cancelled() => {
                Err(Status::unavailable("this shard server is shutting down"))
            }
        }
    }

    async fn digests(&self, request: Request<pb::DigestRequest>) -> Result<pb::DigestResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let pb::DigestRequest { job, job_id, version } = request.into_inner();
        let job = self.store.job(&job, job_id)?;
        let slices = job.primary_slices().map(|(slice, _)| slice).collect();
        let digest = move |job: &Job<B>, slice| {
            let digest = job.slice(slice)?.digest(&job.spec.name, version)?;
            Ok(pb::SliceDigest { slice, digest: digest.to_vec().into() })
        };
        let slices = self.read(&self.digests, &job, version, deadline, slices, digest).await?;
        Ok(pb::DigestResponse { slices })
    }

    async fn sums_of_squares(
        &self,
        request: Request<pb::NormsRequest>,
    ) -> Result<pb::NormsResponse> {
        let deadline = self.deadline(&request);
        Caller::of(request.extensions())?.check_read(&request.get_ref().job)?;
        let pb::NormsRequest { job, job_id, version } = request.into_inner();
        let job = self.store.job(&job, job_id)?;
        let manifest = &job.spec.manifest;
        let is_buffer =
            |slice: u32| manifest.tensors()[manifest.slices()[slice as usize].tensor].buffer;
        let slices = job.primary_slices().map(|(slice, _)| slice);
        let slices = slices.filter(|&slice| !is_buffer(slice)).collect();
        let sum = move |job: &Job<B>, slice| {
            let held = job.primary_slice(slice)?;
            let sum_of_squares = held.sum_of_squares(&job.spec.name, version)?;
            Ok(pb::SliceNorm { slice, sum_of_squares })
        };
        let slices = self.read(&self.sums, &job, version, deadline, slices, sum).await?;
        Ok(pb::NormsResponse { slices })
    }

    /// Reads slices of a job at a version, on a thread that serves no calls, when it is the turn of
    /// the call among those of `turns`.
    ///
    /// # Errors
    /// [`Error::Timeout`](zeroshard_proto::Error::Timeout), and those of `read`.
    async fn read<T: Send + 'static>(
        &self,
        turns: &Arc<Semaphore>,
        job: &Arc<Job<B>>,
        version: u64,
        deadline: Deadline,
        slices: Vec<u32>,
        read: impl Fn(&Job<B>, u32) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        // A call for a later version must not keep others from their turn.
        job.wait_for_version(version, deadline).await?;
        let name = &job.spec.name;
        let waiting_for = || format!("earlier calls that read all slices, at job {name:?}");
        let turn = deadline.limit(waiting_for, turns.clone().acquire_owned()).await?;
        let mut turn = turn.expect("the semaphore is never closed");
        let mut results = Vec::with_capacity(slices.len());
        for part in slices.chunks(READ) {
            let (job, part, read) = (job.clone(), part.to_vec(), read.clone());
            // The turn lasts until the thread has finished, even if the caller cancels the call.
            let work = move || {
                let read = part.into_iter().map(|slice| read(&job, slice));
                Ok((read.collect::<Result<Vec<_>>>()?, turn))
            };
            let (part, kept) = self.store.failure.blocking("read slices", work).await?;
            results.extend(part);
            turn = kept;
        }
        Ok(results)
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
        self.answer(self.digests(request)).await
    }

    async fn norms(
        &self,
        request: Request<pb::NormsRequest>,
    ) -> Result<Response<pb::NormsResponse>, Status> {
        self.answer(self.sums_of_squares(request)).await
    }

    type PinStream = PinStream;

    async fn pin(&self, request: Request<pb::PinRequest>) -> Result<Response<PinStream>, Status> {
        self.answer(self.pinned(request)).await
    }

    async fn steps(
        &self,
        request: Request<pb::StepsRequest>,
    ) -> Result<Response<pb::StepsResponse>, Status> {
        self.answer(self.applied_steps(request)).await
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
