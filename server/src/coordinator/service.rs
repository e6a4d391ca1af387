//! The gRPC service: converts requests into events that cannot be wrong, and answers into messages.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::Stream;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use zeroshard_proto::{
    Error, JobSpec, Result,
    job::optimizers,
    pb::{self, coordinator_server, server_event},
};

use super::{
    driver::Driver,
    state::{Commit, Event, Lease, Reduce, Reply, ServerId, Worker},
};
use crate::config::{Address, MAX_WAIT};

/// The longest address of a server or worker, in bytes: the longest name that DNS has, and a port.
const MAX_ADDRESS: usize = 253 + 6;

/// Serves a [`Driver`].
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) driver: Arc<Driver>,
    /// Of callers that do not say how long they wait.
    pub(crate) default_wait: Duration,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl coordinator_server::Coordinator for Service {
    async fn create_job(&self, request: Request<pb::CreateJobRequest>) -> Answer<pb::CreateJobResponse> {
        let request = request.into_inner();
        let wait = self.wait(request.wait_ms)?;
        let spec = Box::new(job_spec(request.spec)?);
        match self.driver.call(|caller| Event::Create { caller, spec, wait }).await? {
            Reply::Created { epoch } => Ok(Response::new(pb::CreateJobResponse { epoch, job_id: 0 })),
            other => Err(unexpected(&other)),
        }
    }

    async fn delete_job(&self, request: Request<pb::DeleteJobRequest>) -> Answer<pb::DeleteJobResponse> {
        let job = request.into_inner().job;
        self.driver.call(|caller| Event::Delete { caller, job }).await?;
        Ok(Response::new(pb::DeleteJobResponse {}))
    }

    async fn describe_job(
        &self,
        request: Request<pb::DescribeJobRequest>,
    ) -> Answer<pb::DescribeJobResponse> {
        let job = request.into_inner().job;
        Ok(Response::new(self.driver.read(|cluster| cluster.describe(&job))?))
    }

    type JoinStream = Memberships;

    async fn join(&self, request: Request<pb::JoinRequest>) -> Answer<Memberships> {
        let pb::JoinRequest { job, rank, address, .. } = request.into_inner();
        let address = match address.as_str() {
            "" => None,
            text => Some(dialled(&format!("address of rank {rank}"), text)?.to_string()),
        };
        let worker = Worker { rank, address };
        let (lease, memberships) = self.driver.add_lease();
        // From here on the lease ends with the stream, also when the caller goes away while we wait.
        let stream = Memberships {
            stream: UnboundedReceiverStream::new(memberships),
            driver: self.driver.clone(),
            job: job.clone(),
            lease,
        };
        self.driver.call(|caller| Event::Join { caller, lease, job, worker }).await?;
        Ok(Response::new(stream))
    }

    async fn commit(&self, request: Request<pb::CommitRequest>) -> Answer<pb::StepReport> {
        let commit = Box::new(self.to_commit(request.into_inner())?);
        match self.driver.call(|caller| Event::Commit { caller, commit }).await? {
            Reply::Report(report) => Ok(Response::new(report)),
            other => Err(unexpected(&other)),
        }
    }

    async fn reduce(&self, request: Request<pb::ReduceRequest>) -> Answer<pb::ReduceReport> {
        let reduce = Box::new(self.to_reduce(request.into_inner())?);
        match self.driver.call(|caller| Event::Reduce { caller, reduce }).await? {
            Reply::Reduced(report) => Ok(Response::new(report)),
            other => Err(unexpected(&other)),
        }
    }

    async fn discard(&self, _: Request<pb::DiscardRequest>) -> Answer<pb::DiscardResponse> {
        Err(Status::unimplemented("discard"))
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Answer<pb::LeaveResponse> {
        let pb::LeaveRequest { job, lease, .. } = request.into_inner();
        self.driver.call(|caller| Event::Leave { caller, job, lease: Lease(lease) }).await?;
        Ok(Response::new(pb::LeaveResponse {}))
    }

    async fn status(&self, _: Request<pb::StatusRequest>) -> Answer<pb::StatusResponse> {
        Ok(Response::new(self.driver.read(|cluster| cluster.status())))
    }

    type ServeStream = UnboundedReceiverStream<Result<pb::ServerCommand, Status>>;

    async fn serve(&self, request: Request<Streaming<pb::ServerEvent>>) -> Answer<Self::ServeStream> {
        let mut events = request.into_inner();
        let address = hello(events.message().await?)?;
        let control = self.driver.add_server(address.to_string())?;
        let (driver, server) = (self.driver.clone(), control.server);
        tokio::spawn(async move {
            let ended = control.dismissed.run_until_cancelled(listen(&driver, server, &mut events)).await;
            if let Some(Err(status)) = ended {
                tracing::warn!(server, %status, "control stream broke");
            }
            driver.tell(Event::ServerLost { server });
        });
        Ok(Response::new(UnboundedReceiverStream::new(control.commands)))
    }
}

impl Service {
    fn wait(&self, wait_ms: u32) -> Result<Duration> {
        let wait = Duration::from_millis(wait_ms.into());
        match wait {
            Duration::ZERO => Ok(self.default_wait),
            wait if wait <= MAX_WAIT => Ok(wait),
            _ => Err(Error::invalid("wait_ms", wait_ms, format!("at most {}", MAX_WAIT.as_millis()))),
        }
    }

    fn to_commit(&self, request: pb::CommitRequest) -> Result<Commit> {
        let (rank, step) = (request.rank, request.step);
        let positive = |what, number| positive(what, number, rank, step);
        let groups = request.groups;
        Ok(Commit {
            loss_scale: positive("loss_scale", or_one(request.loss_scale))?,
            max_norm: request.max_norm.map(|norm| positive("max_norm", norm)).transpose()?,
            groups: if groups.is_empty() { None } else { Some(optimizers(groups)?) },
            wait: self.wait(request.wait_ms)?,
            job: request.job,
            lease: Lease(request.lease),
            epoch: request.epoch,
            rank: request.rank,
            step: request.step,
            loss: request.loss,
            discard: request.discard,
        })
    }

    fn to_reduce(&self, request: pb::ReduceRequest) -> Result<Reduce> {
        let (rank, step) = (request.rank, request.step);
        Ok(Reduce {
            loss_scale: positive("loss_scale", or_one(request.loss_scale), rank, step)?,
            wait: self.wait(request.wait_ms)?,
            job: request.job,
            lease: Lease(request.lease),
            epoch: request.epoch,
            rank,
            step,
        })
    }
}

/// A loss scale that is not said is 1.
fn or_one(loss_scale: f64) -> f64 {
    if loss_scale == 0.0 { 1.0 } else { loss_scale }
}

fn positive(what: &str, number: f64, rank: u32, step: u64) -> Result<f64> {
    if number.is_finite() && number > 0.0 {
        return Ok(number);
    }
    Err(Error::invalid(format!("{what} of rank {rank} at step {step}"), number, "finite and more than 0"))
}

fn job_spec(spec: Option<pb::JobSpec>) -> Result<JobSpec> {
    let spec = spec.ok_or_else(|| Error::invalid("spec", "absent", "the job's spec"))?;
    let spec = JobSpec::try_from(spec)?;
    if spec.replicas > 1 {
        // To accept it would promise what nobody keeps.
        return Err(Error::invalid("replicas", spec.replicas, "1: this version does not replicate slices"));
    }
    Ok(spec)
}

fn unexpected(reply: &Reply) -> Status {
    Error::Internal { cause: format!("{reply:?} answers another call") }.into()
}

/// The address of a server that says hello.
fn hello(first: Option<pb::ServerEvent>) -> Result<Address> {
    let Some(server_event::Event::Hello(hello)) = first.and_then(|message| message.event) else {
        return Err(Error::invalid("first message of the control stream", "something else", "Hello"));
    };
    dialled("address of the server", &hello.address)
}

/// An address that others dial.
fn dialled(what: &str, text: &str) -> Result<Address> {
    let wrong = |found: String, expected: &str| Err(Error::invalid(what, found, expected));
    if text.len() > MAX_ADDRESS {
        return wrong(format!("{} bytes", text.len()), &format!("HOST:PORT of at most {MAX_ADDRESS} bytes"));
    }
    match text.parse::<Address>() {
        Ok(address) if address.port() == 0 => {
            wrong(format!("{text:?}"), "a port that others can dial, not 0")
        }
        Ok(address) => Ok(address),
        Err(malformed) => wrong(format!("{text:?}"), malformed.expected()),
    }
}

/// Hands over what the server says, until its stream ends.
async fn listen(
    driver: &Driver,
    server: ServerId,
    events: &mut Streaming<pb::ServerEvent>,
) -> Result<(), Status> {
    use server_event::Event as Said;
    while let Some(message) = events.message().await? {
        let event = match message.event {
            Some(Said::Opened(pb::JobOpened { job, epoch, .. })) => Event::Opened { server, job, epoch },
            Some(Said::Initialised(pb::JobInitialised { job, epoch, .. })) => {
                Event::Initialised { server, job, epoch }
            }
            Some(Said::Ready(report)) => Event::Ready { server, report },
            Some(Said::Stats(stats)) => Event::Stats { server, stats },
            Some(Said::Failed(pb::JobFailed { job, epoch, reason, .. })) => {
                Event::Failed { server, job, epoch, reason }
            }
            Some(Said::Hello(_)) => {
                return Err(
                    Error::invalid("message of the control stream", "a second Hello", "an event").into()
                );
            }
            Some(Said::Granted(_) | Said::Stored(_)) => continue,
            // An event of a newer server.
            None => continue,
        };
        driver.tell(event);
    }
    Ok(())
}

/// The stream of a worker's memberships; its lease lasts as long.
#[derive(Debug)]
pub(crate) struct Memberships {
    stream: UnboundedReceiverStream<Result<pb::Membership, Status>>,
    driver: Arc<Driver>,
    job: String,
    lease: Lease,
}

impl Stream for Memberships {
    type Item = Result<pb::Membership, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.stream).poll_next(cx)
    }
}

impl Drop for Memberships {
    fn drop(&mut self) {
        self.driver.end_lease(std::mem::take(&mut self.job), self.lease);
    }
}
