//! Backups: this server copies slices from their primaries, and receives the reduced gradient of
//! each step from them.

use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, DType, Error, JobVersion, Result, Server};
use zeroshard_net::{
    trace::SpanKind,
    transport::{Connection, Credentials},
};
use zeroshard_proto::{
    pb::{self, data_service_client::DataServiceClient, state_selector},
    status::from_status,
};
use zeroshard_shard::events::JobEvent;

use super::{
    fork::{Copier, SliceCopy},
    job::Job,
    store::Store,
};

/// The pause before another try to reach a primary. If it has died, the coordinator replaces it.
const PAUSE: Duration = Duration::from_millis(100);
/// The number of slices that one pull requests.
const PULLED_SLICES: usize = 4096;

/// The copies of a job's slices on this server. When it is dropped, they are given up.
pub(super) struct Copies<B: Backend> {
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    credentials: Credentials,
    current: CancellationToken,
}

impl<B: Backend> Copies<B> {
    pub(super) fn new(store: Arc<Store<B>>, job: Arc<Job<B>>, credentials: Credentials) -> Self {
        Self { store, job, credentials, current: CancellationToken::new() }
    }

    /// Begins to copy slices from their primaries, and gives up an earlier copy.
    ///
    /// # Errors
    /// Those of [`Job::begin_copy`].
    pub(super) async fn begin(&mut self, request: pb::CopySlices) -> Result<()> {
        self.cancel();
        let pb::CopySlices { number, version, slices, .. } = request;
        let job = self.job.clone();
        let begin = move || job.begin_copy(number, &slices);
        let begun = self.store.failure.blocking("begin a copy of slices", begin).await?;
        let Some(slices) = begun else { return Ok(()) };
        let cancelled = self.job.closed().child_token();
        self.current = cancelled.clone();
        let (store, job) = (self.store.clone(), self.job.clone());
        let credentials = self.credentials.clone();
        tokio::spawn(async move {
            let failure = store.failure.clone();
            let copy = async {
                let span = job
                    .trace_at(version)
                    .span("copy", SpanKind::Internal)
                    .with("zeroshard.version", version as i64)
                    .with("zeroshard.slices", slices.len() as i64);
                let copied = span.over(copy(&store, &job, &credentials, version, slices));
                match cancelled.run_until_cancelled(copied).await {
                    Some(Ok(())) => job.tell(JobEvent::Copied { number }),
                    Some(Err(error)) => job.fail(&error),
                    None => {}
                }
            };
            failure.guard("a copy of slices", copy).await;
        });
        Ok(())
    }

    /// Gives up the copy.
    pub(super) fn cancel(&self) {
        self.current.cancel();
    }
}

impl<B: Backend> Drop for Copies<B> {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Copies slices at `version`, until their primaries have sent them.
///
/// # Errors
/// Those that are not transient.
async fn copy<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    credentials: &Credentials,
    version: u64,
    slices: Vec<u32>,
) -> Result<()> {
    let placement = job.placement();
    let mut shares: Vec<Vec<SliceCopy>> = placement.servers().iter().map(|_| Vec::new()).collect();
    for &index in &slices {
        shares[placement.primary(index as usize)].push(SliceCopy::whole(job, index)?);
    }
    let from = JobVersion { job: job.spec.name.clone(), job_id: job.id, version };
    let from = Arc::new(from);
    let shares = placement.servers().iter().zip(shares).filter(|(_, share)| !share.is_empty());
    let copies = shares.map(|(primary, share)| {
        let (from, holder) = (from.clone(), pb::Server::from(primary.clone()));
        async move {
            loop {
                let copier = Copier { store: store.clone(), job: job.clone(), from: from.clone() };
                match copier.copy_remote(&holder, credentials, &share).await {
                    Err(error) if !is_final(&error) => {
                        tracing::debug!(job = job.spec.name, %error, "slices are not copied yet");
                        tokio::time::sleep(PAUSE).await;
                    }
                    copied => return copied,
                }
            }
        }
    });
    join_all(copies).await.into_iter().collect::<Result<()>>()?;
    let job = job.clone();
    let end = move || slices.iter().try_for_each(|&index| job.slice(index)?.end_copy());
    store.failure.blocking("end a copy of slices", end).await
}

/// Returns whether a call to a primary cannot succeed later. A primary that does not know yet that
/// it is one refuses the call, and one that is gone is replaced by the coordinator.
fn is_final(error: &Error) -> bool {
    use Error::{Internal, Invalid, Refused, Storage};
    matches!(error, Invalid { .. } | Refused { .. } | Internal { .. } | Storage { .. })
}

/// Receives the reduced gradients of the slices of which this server is a backup, until the job is
/// closed.
pub(super) async fn follow<B: Backend>(
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    credentials: Credentials,
) {
    let mut changed = job.subscribe();
    let mut peers = Peers::new();
    loop {
        let state = || (job.attempt(), job.copies_begun(), job.version().is_some());
        let (before, placement) = (state(), job.placement());
        let (attempt, missing) = job.missing_reduced();
        peers.retain(|server, _| placement.servers().contains(server));
        let mut pulls = Vec::new();
        for (primary, slices) in missing {
            let Some(primary) = placement.servers().get(primary) else { continue };
            let connection = match peers.get(primary) {
                Some(known) => Ok(known.clone()),
                None => connect(primary, &credentials),
            };
            let Ok(connection) = connection else { continue };
            peers.insert(primary.clone(), connection.clone());
            let peer = Peer { name: format!("shard server {}", primary.address), connection };
            pulls.push(receive(&store, &job, attempt, peer, slices));
        }
        let ended = async {
            while state() == before {
                if changed.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = job.closed().cancelled() => return,
            () = ended => {}
            never = run(pulls) => match never {},
        }
    }
}

/// Runs the pulls, and never returns: after them there is nothing to pull until the state of the
/// job changes.
async fn run(pulls: Vec<impl Future<Output = ()>>) -> Infallible {
    join_all(pulls).await;
    std::future::pending().await
}

/// The connections to the primaries of the job.
type Peers = HashMap<Server, Connection>;

fn connect(server: &Server, credentials: &Credentials) -> Result<Connection> {
    Connection::lazy(&server.address, credentials)
}

/// A primary.
struct Peer {
    name: String,
    connection: Connection,
}

/// Receives the reduced gradients of slices from their primary, until all have arrived or the
/// attempt has ended.
async fn receive<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    attempt: Attempt,
    primary: Peer,
    slices: Vec<(u32, usize)>,
) {
    for slices in slices.chunks(PULLED_SLICES) {
        let mut rest: VecDeque<(u32, usize)> = slices.iter().copied().collect();
        while let Err(error) = pull(store, job, attempt, &primary, &mut rest).await {
            if job.attempt() != attempt {
                return;
            }
            if is_final(&error) {
                return job.fail(&error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Pulls reduced gradients, in order, and removes the slices that have arrived.
async fn pull<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    attempt: Attempt,
    primary: &Peer,
    rest: &mut VecDeque<(u32, usize)>,
) -> Result<()> {
    let peer = &primary.name;
    let sum = state_selector::GradientSum { attempt: Some(attempt.number) };
    let extent =
        |&(slice, arrived): &(u32, usize)| pb::Extent { slice, offset: arrived as u64, length: 0 };
    let request = pb::PullRequest {
        job: job.spec.name.clone(),
        job_id: job.id,
        epoch: attempt.epoch,
        version: attempt.step,
        dtype: pb::Dtype::from(DType::F32).into(),
        extents: rest.iter().map(extent).collect(),
        part: Some(pb::StateSelector { part: Some(state_selector::Part::GradientSum(sum)) }),
        ..Default::default()
    };
    let failed = |status: tonic::Status| from_status(&status, peer);
    let mut client = DataServiceClient::new(primary.connection.clone());
    let mut answer = client.pull(request).await.map_err(failed)?.into_inner();
    while let Some(pb::PullResponse { slice, offset, payload, .. }) =
        answer.message().await.map_err(failed)?
    {
        let Some((_, arrived)) = rest.front_mut().filter(|next| **next == (slice, offset as usize))
        else {
            let cause = format!("{peer} sent slice {slice} from position {offset} unasked");
            return Err(Error::Internal { cause });
        };
        // The slice may not have applied the last step yet.
        let there = || Ok((job.slice(slice)?.version() == Some(attempt.step)).then_some(()));
        let waiting_for = || format!("version {} of slice {slice}", attempt.step);
        job.wait_for(store.deadline(None), there, waiting_for).await?;
        let offset = *arrived;
        job.store_reduced(attempt, slice, offset, &payload)?;
        *arrived += payload.len() / DType::F32.size();
        if *arrived >= job.slice(slice)?.spec.numel {
            rest.pop_front();
        }
    }
    match rest.front() {
        None => Ok(()),
        Some((slice, _)) => {
            let cause = format!("the stream ended before slice {slice}");
            Err(Error::Unavailable { peer: peer.clone(), cause })
        }
    }
}
