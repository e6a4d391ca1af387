//! The gRPC service `zeroshard.v1.ShardService`.

use std::{sync::Arc, thread};

use futures_util::{StreamExt, stream::BoxStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use zeroshard_kernels::Backend;
use zeroshard_model::Result;
use zeroshard_net::Deadline;
use zeroshard_proto::{
    pb::{self, shard_service_server},
    status::to_status,
};

use super::{
    job::Job,
    measure::{self, measure},
    pin,
    store::Store,
};
use crate::access::Caller;

type MeasureStream = BoxStream<'static, Result<pb::MeasureResponse, Status>>;
type PinStream = BoxStream<'static, Result<pb::PinResponse, Status>>;

/// The number of slices, of up to 256 MiB together, that are read in one turn. Between turns, the
/// call ends if the caller has cancelled it.
const SLICES_AT_ONCE: usize = 16;

pub(super) struct Service<B: Backend> {
    store: Arc<Store<B>>,
    /// Turns to sum squares, one at a time, which uses one core and one version of a slice beside
    /// training.
    sums: Arc<Semaphore>,
    /// Turns to hash slices, as many at a time as there are cores, because all ranks of a job may
    /// ask for its hash.
    digests: Arc<Semaphore>,
    measurements: measure::Gate,
    shutdown: CancellationToken,
}

impl<B: Backend> Service<B> {
    pub(super) fn new(store: Arc<Store<B>>, shutdown: CancellationToken) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let [sums, digests] = [1, cores].map(|turns| Arc::new(Semaphore::new(turns)));
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
            answer = work => Ok(Response::new(answer.map_err(to_status)?)),
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
        let digest = move |job: &Job<B>, slice| {
            let digest = job.primary_slice(slice)?.digest(&job.spec.name, version)?;
            Ok(Some(pb::SliceDigest { slice, digest: digest.to_vec().into() }))
        };
        let slices = self.read_slices(&self.digests, job, version, deadline, digest).await?;
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
        let sum = move |job: &Job<B>, slice: u32| {
            let manifest = &job.spec.manifest;
            if manifest.tensors()[manifest.slices()[slice as usize].tensor].buffer {
                return Ok(None);
            }
            let held = job.primary_slice(slice)?;
            let sum_of_squares = held.sum_of_squares(&job.spec.name, version)?;
            Ok(Some(pb::SliceNorm { slice, sum_of_squares }))
        };
        let slices = self.read_slices(&self.sums, job, version, deadline, sum).await?;
        Ok(pb::NormsResponse { slices })
    }

    /// Calls `read` for the slices of which this server is the primary, on threads that serve no
    /// calls, and takes turns with other calls. Returns what it has found.
    ///
    /// # Errors
    /// [`Error::Timeout`](zeroshard_model::Error::Timeout), and those of `read`.
    async fn read_slices<T: Send + 'static>(
        &self,
        turns: &Arc<Semaphore>,
        job: Arc<Job<B>>,
        version: u64,
        deadline: Deadline,
        read: impl Fn(&Job<B>, u32) -> Result<Option<T>> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        // A call for a later version must not keep others from their turn.
        job.wait_for_version(version, deadline).await?;
        let slices: Vec<u32> = job.primary_slices().map(|(slice, _)| slice).collect();
        let name = &job.spec.name;
        let waiting_for = || format!("other calls that read all slices, at job {name:?}");
        let mut found = Vec::with_capacity(slices.len());
        for part in slices.chunks(SLICES_AT_ONCE) {
            let turn = deadline.limit(waiting_for, turns.clone().acquire_owned()).await?;
            let (job, part, read) = (job.clone(), part.to_vec(), read.clone());
            let work = move || {
                // The turn lasts until this thread has finished, even if the call has ended.
                let _turn = turn.expect("the semaphore is never closed");
                let each = part.into_iter().filter_map(|slice| read(&job, slice).transpose());
                each.collect::<Result<Vec<_>>>()
            };
            found.extend(self.store.failure.blocking("read slices", work).await?);
        }
        Ok(found)
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
        let messages = measure(&self.measurements, request.get_ref().bytes).map_err(to_status)?;
        let shutdown = self.shutdown.clone().cancelled_owned();
        Ok(Response::new(messages.map(Ok).take_until(shutdown).boxed()))
    }
}
