//! The gRPC service: passes requests to the driver as events, and converts its answers to messages.

use std::{
    ops::Range,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};
use zeroshard_coordinator::{
    cluster::Cluster,
    job::Job,
    vocabulary::{
        calls::{Attach, Join, Leave, Reply, Rewind, Saved},
        events::{Event, Target},
        ids::{self, JobRef, Lease},
    },
};
use zeroshard_model::{
    Attempt, Error, JobSpec, Line, Result,
    version::{self, VERSION},
};
use zeroshard_proto::{
    pb::{self, coordinator_service_server},
    status::to_status,
};

use super::{
    control::{commands, listen, registration},
    driver::Driver,
    requests::{Waits, attached_data, create, dialled, link, rank_data},
    responses::{Message, reduced, status},
    storage,
    urls::UrlPrefix,
};
use crate::{
    access::Caller,
    audit::{self, Audited},
    identity,
};

/// Serves the calls to a [`Driver`].
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) driver: Arc<Driver>,
    pub(crate) waits: Waits,
    pub(crate) urls: UrlPrefix,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl coordinator_service_server::CoordinatorService for Service {
    async fn create_job(
        &self,
        request: Request<pb::CreateJobRequest>,
    ) -> Answer<pb::CreateJobResponse> {
        answer(async {
            let (deadline, job_id) = (self.waits.of(&request), identity::random()?);
            let (caller, audited) = (Caller::of(request.extensions())?, Audited::of(&request));
            let holder = request.extensions().get().cloned();
            let request = request.into_inner();
            let (spec, from) = (request.spec.as_ref(), request.from.as_ref());
            let name = spec.map_or("", |spec| &spec.name);
            audited.is("create job", name);
            caller.check_train(name)?;
            self.urls.check_job(&request)?;
            from.map_or(Ok(()), |from| caller.check_read(&from.job))?;
            request.restore.as_ref().map_or(Ok(()), |saved| caller.check_read(&saved.job))?;
            let convert = move || Ok(Box::new(create(request, holder)?));
            let create = self.driver.failure.blocking("convert a job's spec", convert).await?;
            let wait = deadline.left();
            match self.driver.call(|caller| Event::Create { caller, job_id, create, wait }).await? {
                Reply::Created { epoch, job_id } => Ok(pb::CreateJobResponse { epoch, job_id }),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn delete_job(
        &self,
        request: Request<pb::DeleteJobRequest>,
    ) -> Answer<pb::DeleteJobResponse> {
        answer(async {
            let wait = self.waits.of(&request).left();
            Audited::of(&request).is("delete job", &request.get_ref().job);
            let caller = Caller::of(request.extensions())?;
            let pb::DeleteJobRequest { job: name, job_id: id } = request.into_inner();
            caller.check_train(&name)?;
            let job = JobRef { name, id };
            self.driver.call(|caller| Event::Delete { caller, job, wait }).await?;
            Ok(pb::DeleteJobResponse {})
        })
        .await
    }

    async fn describe_job(
        &self,
        request: Request<pb::DescribeJobRequest>,
    ) -> Answer<pb::DescribeJobResponse> {
        answer(async {
            let caller = Caller::of(request.extensions())?;
            let job = request.into_inner().job;
            caller.check_read(&job)?;
            let description =
                self.driver.read(|cluster| cluster.job(&job).and_then(Job::describe))??;
            let driver = &self.driver;
            let convert = move || Ok(description.message());
            driver.failure.blocking("convert a job's description", convert).await
        })
        .await
    }

    type JoinStream = Memberships;

    async fn join(&self, request: Request<pb::JoinRequest>) -> Answer<Memberships> {
        answer(async {
            let caller = Caller::of(request.extensions())?;
            let mut request = request.into_inner();
            caller.check_train(&request.job)?;
            let user_data = attached_data(&mut request)?;
            let pb::JoinRequest { job, rank, address, wait_ms, lease, job_id, .. } = request;
            let dialled = |text: String| dialled(&format!("address of rank {rank}"), &text);
            let address = address.map(dialled).transpose()?.map(|address| address.to_string());
            if lease != 0 {
                let (job, lease) = (JobRef { name: job, id: job_id }, Lease(lease));
                let pb::JoinRequest { epoch, step, attempt: number, .. } = request;
                let attempt = Attempt { epoch, step, number };
                return self.attach(Attach { job, rank, address, lease, attempt, user_data }).await;
            }
            let (wait, lease) = (self.waits.of_join(wait_ms), Lease(identity::random()?));
            let call = self.driver.next_caller();
            self.driver.add_lease(lease, call);
            // From now on the lease ends with the stream, also if the caller disconnects while
            // the call waits.
            let mut stream = Memberships {
                driver: self.driver.clone(),
                job: job.clone(),
                rank,
                lease,
                opened_by: call,
                first: None,
            };
            let rank_wait = wait.min(self.waits.rank);
            let join = Join { job, rank, address, lease, rank_wait, wait };
            self.driver.call_as(call, Event::Join { caller: call, join }).await?;
            stream.begin().await?;
            Ok(stream)
        })
        .await
    }

    async fn commit(&self, request: Request<pb::CommitRequest>) -> Answer<pb::CommitResponse> {
        answer(async {
            check_turn(&request, |request| &request.turn)?;
            let commit = Box::new(self.waits.commit(request)?);
            match self.driver.call(|caller| Event::Commit { caller, commit }).await? {
                Reply::Report(report, next_epoch) => {
                    Ok(pb::CommitResponse { next_epoch, ..report.message() })
                }
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn reduce(&self, request: Request<pb::ReduceRequest>) -> Answer<pb::ReduceResponse> {
        answer(async {
            check_turn(&request, |request| &request.turn)?;
            let reduce = Box::new(self.waits.reduce(request)?);
            match self.driver.call(|caller| Event::Reduce { caller, reduce }).await? {
                Reply::Reduced { norm, absent, resting } => Ok(reduced(norm, absent, resting)),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn discard(&self, request: Request<pb::DiscardRequest>) -> Answer<pb::DiscardResponse> {
        answer(async {
            check_turn(&request, |request| &request.turn)?;
            let discard = self.waits.discard(request)?;
            match self.driver.call(|caller| Event::Discard { caller, discard }).await? {
                Reply::Discarded { attempt } => Ok(pb::DiscardResponse { attempt }),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn save_checkpoint(
        &self,
        request: Request<pb::SaveCheckpointRequest>,
    ) -> Answer<pb::SaveCheckpointResponse> {
        answer(async {
            Audited::of(&request).is("save job", &request.get_ref().job);
            Caller::of(request.extensions())?.check_train(&request.get_ref().job)?;
            self.urls.check(&request.get_ref().url)?;
            let save = self.waits.save(request)?;
            let job = &save.job.name;
            let place = |cluster: &Cluster| cluster.jobs().get(job)?.saved_at(&save);
            if let Some((url, job, line, start)) = self.driver.read(place)? {
                self.driver.claim(&url, &job, &line, start).await?;
            }
            match self.driver.call(|caller| Event::Save { caller, save }).await? {
                Reply::Saved(Saved { version, bytes }) => {
                    Ok(pb::SaveCheckpointResponse { version, bytes })
                }
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn rewind_job(
        &self,
        request: Request<pb::RewindJobRequest>,
    ) -> Answer<pb::RewindJobResponse> {
        answer(async {
            let pb::RewindJobRequest { job, version, .. } = request.get_ref();
            Audited::of(&request).is("rewind job", &format!("{job} to version {version}"));
            Caller::of(request.extensions())?.check_train(&request.get_ref().job)?;
            self.urls.check(&request.get_ref().url)?;
            let (wait, request) = self.waits.rewind(request)?;
            let known = self.driver.read(|cluster| {
                let known = rewound(cluster.job(&request.job)?, &request)?;
                Ok::<_, Error>((known, cluster.common().saves.number_completed()))
            })?;
            let ((job, spec, line, url), completed) = known?;
            let skips: Vec<_> = request.skips.iter().copied().map(Range::from).collect();
            let to = (url.as_str(), request.version);
            let Target { to, skips } = storage::target((&job, &spec, &line), to, &skips).await?;
            let from = request.from_line;
            let rewind = Rewind { job, from, to, completed, skips, wait };
            match self.driver.call(|caller| Event::Rewind { caller, rewind }).await? {
                Reply::Rewound { line } => Ok(pb::RewindJobResponse { line }),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn send_user_data(
        &self,
        request: Request<pb::SendUserDataRequest>,
    ) -> Answer<pb::SendUserDataResponse> {
        answer(async {
            Caller::of(request.extensions())?.check_train(&request.get_ref().job)?;
            let data = rank_data(request.into_inner())?;
            self.driver.call(|caller| Event::UserData { caller, data }).await?;
            Ok(pb::SendUserDataResponse {})
        })
        .await
    }

    async fn report_link(
        &self,
        request: Request<pb::ReportLinkRequest>,
    ) -> Answer<pb::ReportLinkResponse> {
        answer(async {
            check_turn(&request, |request| &request.turn)?;
            let report = link(request.into_inner())?;
            match self.driver.call(|caller| Event::Link { caller, report }).await? {
                Reply::LinkNoted => Ok(pb::ReportLinkResponse {}),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn rest(&self, request: Request<pb::RestRequest>) -> Answer<pb::RestResponse> {
        answer(async {
            check_turn(&request, |request| &request.turn)?;
            let rest = self.waits.rest(request)?;
            match self.driver.call(|caller| Event::Rest { caller, rest }).await? {
                Reply::Rested(rested) => Ok(rested.message()),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Answer<pb::LeaveResponse> {
        answer(async {
            Caller::of(request.extensions())?.check_train(&request.get_ref().job)?;
            let wait = self.waits.of(&request).left();
            let pb::LeaveRequest { job: name, lease, job_id: id, done } = request.into_inner();
            let leave = Leave { job: JobRef { name, id }, lease: Lease(lease), done };
            self.driver.call(|caller| Event::Leave { caller, leave, wait }).await?;
            Ok(pb::LeaveResponse {})
        })
        .await
    }

    async fn status(&self, request: Request<pb::StatusRequest>) -> Answer<pb::StatusResponse> {
        answer(async {
            let caller = Caller::of(request.extensions())?;
            version::check("the client", &request.get_ref().version, VERSION)?;
            let now = self.driver.now();
            let mut status = self.driver.read(|cluster| status(cluster, now))?;
            status.jobs.retain(|job| caller.sees(&job.name));
            for stats in status.servers.iter_mut().filter_map(|server| server.stats.as_mut()) {
                stats.jobs.retain(|job| caller.sees(&job.job));
            }
            Ok(status)
        })
        .await
    }

    async fn cordon_server(
        &self,
        request: Request<pb::CordonServerRequest>,
    ) -> Answer<pb::CordonServerResponse> {
        answer(async {
            let verb = if request.get_ref().cordoned { "cordon server" } else { "uncordon server" };
            Audited::of(&request).is(verb, &request.get_ref().server);
            Caller::of(request.extensions())?.check_operate("cordon shard servers")?;
            let pb::CordonServerRequest { server, cordoned } = request.into_inner();
            match self.driver.call(|caller| Event::Cordon { caller, server, cordoned }).await? {
                Reply::Cordoned(server) => {
                    Ok(pb::CordonServerResponse { server: Some(server.into()) })
                }
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn drain_server(
        &self,
        request: Request<pb::DrainServerRequest>,
    ) -> Answer<pb::DrainServerResponse> {
        answer(async {
            Audited::of(&request).is("drain server", &request.get_ref().server);
            Caller::of(request.extensions())?.check_operate("drain shard servers")?;
            let pb::DrainServerRequest { server, restore } = request.into_inner();
            match self.driver.call(|caller| Event::Drain { caller, server, restore }).await? {
                Reply::Drained(drained) => Ok(drained.message()),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    async fn evict_rank(
        &self,
        request: Request<pb::EvictRankRequest>,
    ) -> Answer<pb::EvictRankResponse> {
        answer(async {
            let pb::EvictRankRequest { job, rank } = request.get_ref();
            Audited::of(&request).is("evict rank", &format!("rank {rank} of job {job}"));
            Caller::of(request.extensions())?.check_operate("evict ranks")?;
            let pb::EvictRankRequest { job, rank } = request.into_inner();
            match self.driver.call(|caller| Event::Evict { caller, job, rank }).await? {
                Reply::Evicted { epoch } => Ok(pb::EvictRankResponse { epoch }),
                other => Err(unexpected(&other)),
            }
        })
        .await
    }

    type ServeStream = Pin<Box<dyn Stream<Item = Result<pb::ServeResponse, Status>> + Send>>;

    async fn serve(
        &self,
        request: Request<Streaming<pb::ServeRequest>>,
    ) -> Answer<Self::ServeStream> {
        let audited = Audited::of(&request);
        audited.is("register server", "");
        Caller::of(request.extensions()).map_err(to_status)?.check_serve().map_err(to_status)?;
        let mut events = request.into_inner();
        let registration = registration(&mut events, &self.driver.failure).await?;
        let address = registration.server.address.clone();
        audited.is("register server", &address);
        self.driver.check_incumbent(&registration.server).await.map_err(to_status)?;
        let control = self.driver.add_server(registration).map_err(to_status)?;
        let (driver, from, heard, dismissal) =
            (self.driver.clone(), control.link, control.heard.clone(), control.dismissal.clone());
        tokio::spawn(async move {
            let ended = dismissal.until(listen(&driver, from, &heard, &mut events)).await;
            // A server that is stopped may close its connection before the streams on it.
            let was_stopped =
                driver.read(|cluster| cluster.common().servers.is_departing(from.server));
            let cause = match ended {
                _ if was_stopped == Ok(true) => "it was stopped".to_owned(),
                Ok(Ok(())) => "its control stream ended".to_owned(),
                Ok(Err(status)) => {
                    tracing::warn!(address, %status, "the control stream failed");
                    format!("its control stream failed: {}", status.message())
                }
                Err(cause) => cause,
            };
            audit::lost(&address, &cause);
            driver.tell(Event::ServerLost { from, cause });
        });
        Ok(Response::new(
            commands(control, self.driver.term(), self.driver.failure.clone()).boxed(),
        ))
    }
}

impl Service {
    /// Continues a lease with a new stream.
    async fn attach(&self, attach: Attach) -> Result<Memberships> {
        let (job, rank, lease) = (attach.job.name.clone(), attach.rank, attach.lease);
        let (driver, caller) = (self.driver.clone(), self.driver.next_caller());
        self.driver.call_as(caller, Event::Attach { caller, attach }).await?;
        let mut stream = Memberships { driver, job, rank, lease, opened_by: caller, first: None };
        stream.begin().await?;
        Ok(stream)
    }
}

/// Answers a call: the errors of the work become its status.
async fn answer<T>(work: impl Future<Output = Result<T>>) -> Answer<T> {
    work.await.map(Response::new).map_err(to_status)
}

/// Checks that the caller may train the job of its turn.
fn check_turn<T>(request: &Request<T>, turn: impl Fn(&T) -> &Option<pb::Turn>) -> Result<()> {
    let job = turn(request.get_ref()).as_ref().map_or("", |turn| &turn.job);
    Caller::of(request.extensions())?.check_train(job)
}

/// Returns the job, its specification and line, and the place of the checkpoint to return to.
///
/// # Errors
/// [`Error::Refused`] without a place; [`Error::JobReplaced`].
fn rewound(
    job: &Job,
    request: &pb::RewindJobRequest,
) -> Result<(JobRef, Arc<JobSpec>, Arc<Line>, String)> {
    let name = job.spec.name.clone();
    if request.job_id != 0 && request.job_id != job.id {
        return Err(Error::JobReplaced { job: name });
    }
    let url = job.place(Some(request.url.as_str()).filter(|url| !url.is_empty()))?;
    Ok((JobRef { name, id: job.id }, job.spec.clone(), job.line.clone(), url))
}

fn unexpected(reply: &Reply) -> Error {
    Error::Internal { cause: format!("{reply:?} answers another call") }
}

/// The stream of a worker's memberships, which lasts as long as its lease.
#[derive(Debug)]
pub(crate) struct Memberships {
    driver: Arc<Driver>,
    job: String,
    rank: u32,
    lease: Lease,
    /// The call that has opened the stream.
    opened_by: ids::Caller,
    /// The first message, which is large.
    first: Option<pb::JoinResponse>,
}

impl Memberships {
    /// Reads the first message, if the lease is still valid.
    async fn begin(&mut self) -> Result<()> {
        if let Some(first) = self.driver.first_membership(&self.job, self.lease) {
            let convert = move || Ok(first.message());
            let failure = &self.driver.failure;
            self.first = Some(failure.blocking("convert a membership", convert).await?);
        }
        Ok(())
    }
}

impl Stream for Memberships {
    type Item = Result<pb::JoinResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let stream = (self.lease, self.opened_by);
        let next = self.driver.poll_membership(&self.job, stream, cx);
        next.map(|next| next.map(|change| Ok(change.map_err(to_status)?.message())))
    }
}

impl Drop for Memberships {
    fn drop(&mut self) {
        let Self { driver, job, rank, lease, opened_by, .. } = self;
        driver.end_lease(std::mem::take(job), *rank, *lease, *opened_by);
    }
}
