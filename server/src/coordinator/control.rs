//! Control streams: the messages from shard servers, and the commands to them.

use futures_util::{Stream, StreamExt};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use zeroshard_proto::{
    Error, Result, Server,
    pb::{self, serve_request, serve_response},
};

use super::{
    decisions::Decision,
    driver::{Control, Driver},
    events::{Command, Event, JobRef, Lease, Link, OpenJob, Said},
    reduce::{Absent, Overflow, Reduced},
    requests::dialled,
    responses::Stats,
    succession::SliceCopy,
};
use crate::{attempt::Attempt, failure::Failure};

/// The commands of a control stream, until the server is dismissed.
pub(super) fn commands(
    control: Control,
    term: u64,
    failure: Failure,
) -> impl Stream<Item = Result<pb::ServeResponse, Status>> + Send {
    let convert = move |command| {
        let failure = failure.clone();
        async move {
            let command = match command {
                // The spec and the placement may be large.
                Command::Open(_) => {
                    let convert = move || Ok(command.into());
                    failure.blocking("convert a job to be opened", convert).await?
                }
                command => command.into(),
            };
            Ok(pb::ServeResponse { command: Some(command), term })
        }
    };
    ReceiverStream::new(control.commands)
        .take_until(control.dismissed.cancelled_owned())
        .then(convert)
}

/// The server that the first message of a control stream announces.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn hello(first: Option<pb::ServeRequest>) -> Result<Server> {
    let Some(serve_request::Event::Hello(hello)) = first.and_then(|message| message.event) else {
        return Err(Error::invalid(
            "first message of the control stream",
            "another message",
            "Hello",
        ));
    };
    let address = dialled("address of the server", &hello.address)?.to_string();
    for (what, number) in [("server_id", hello.server_id), ("incarnation", hello.incarnation)] {
        if number == 0 {
            return Err(Error::invalid(
                format!("{what} of shard server {address}"),
                0,
                "greater than 0",
            ));
        }
    }
    Ok(Server { id: hello.server_id, incarnation: hello.incarnation, address })
}

/// Passes on the messages of the server until its stream ends.
pub(super) async fn listen(
    driver: &Driver,
    from: Link,
    events: &mut Streaming<pb::ServeRequest>,
) -> Result<(), Status> {
    while let Some(message) = events.message().await? {
        // A message without a known event comes from a newer server.
        if let Some(event) = message.event {
            driver.tell(Event::Said { from, said: said(event)? });
        }
    }
    Ok(())
}

impl From<Command> for serve_response::Command {
    fn from(command: Command) -> Self {
        match command {
            Command::Welcome => Self::Welcome(pb::Welcome {}),
            Command::Open(open) => Self::Open(open_job(&open)),
            Command::Close(JobRef { name: job, id: job_id }) => {
                Self::Close(pb::CloseJob { job, job_id })
            }
            Command::Publish { job: JobRef { name: job, id: job_id }, epoch } => {
                Self::Publish(pb::Publish { job, job_id, epoch })
            }
            Command::Grant { job: JobRef { name: job, id: job_id }, rank, lease: Lease(lease) } => {
                Self::Grant(pb::GrantLease { job, job_id, rank, lease })
            }
            Command::NewEpoch { job: JobRef { name: job, id: job_id }, epoch, rank } => {
                Self::NewEpoch(pb::NewEpoch { job, job_id, epoch, rank })
            }
            Command::NewAttempt { job: JobRef { name: job, id: job_id }, attempt } => {
                let Attempt { epoch, step, number: attempt } = attempt;
                Self::NewAttempt(pb::NewAttempt { job, job_id, epoch, step, attempt })
            }
            Command::RankDone { job: JobRef { name: job, id: job_id }, rank } => {
                Self::Done(pb::RankDone { job, job_id, rank })
            }
            Command::RankRests { job: JobRef { name: job, id: job_id }, rank, ends } => {
                Self::Rests(pb::RankRests { job, job_id, rank, ends })
            }
            Command::Decide { job, decision } => Self::Decide(decide(job, decision)),
        }
    }
}

fn open_job(open: &OpenJob) -> pb::OpenJob {
    let OpenJob { spec, placement, job_id, epoch, server, source } = open;
    let succession = source.as_ref().map(|source| {
        let copy = |copy: SliceCopy| pb::SliceCopy {
            slice: copy.slice as u32,
            offset: copy.offset as u64,
            length: copy.length as u64,
            source: copy.source as u32,
            source_offset: copy.source_offset as u64,
            server: source.placement.primary(copy.source) as u32,
            state: copy.state,
        };
        pb::Succession {
            from: Some((&source.succession.from).into()),
            servers: source.placement.servers().iter().cloned().map(Into::into).collect(),
            copies: source.copies(spec, placement, *server).into_iter().map(copy).collect(),
        }
    });
    pb::OpenJob {
        spec: Some(spec.as_ref().into()),
        job_id: *job_id,
        epoch: *epoch,
        placement: Some(placement.as_ref().into()),
        succession,
    }
}

fn decide(JobRef { name: job, id: job_id }: JobRef, decision: Decision) -> pb::Decision {
    let Attempt { epoch, step, number: attempt } = decision.attempt;
    let update = decision.update.map(|update| pb::Update {
        groups: update.groups.iter().map(Into::into).collect(),
        coefficient: update.coefficient,
        unclipped: update.unclipped,
        gradient_factors: update.gradient_factors,
    });
    pb::Decision { job, job_id, epoch, step, attempt, update }
}

pub(super) fn said(event: serve_request::Event) -> Result<Said> {
    use serve_request::Event as Wire;
    let job = |name, id| JobRef { name, id };
    Ok(match event {
        Wire::Opened(pb::JobOpened { job: name, job_id, .. }) => Said::Opened(job(name, job_id)),
        Wire::Initialised(pb::JobInitialised { job: name, epoch, job_id }) => {
            Said::Initialised { job: job(name, job_id), epoch }
        }
        Wire::Ready(ready) => step_ready(ready),
        Wire::Stats(stats) => Said::Stats(Stats(stats)),
        Wire::Failed(pb::JobFailed { job: name, reason, job_id, .. }) => {
            Said::Failed { job: job(name, job_id), reason }
        }
        Wire::Granted(pb::LeaseGranted { job: name, job_id, rank, lease }) => {
            Said::Granted { job: job(name, job_id), rank, lease: Lease(lease) }
        }
        Wire::Stored(pb::DecisionStored { job: name, job_id, epoch, step }) => {
            Said::Stored { job: job(name, job_id), epoch, step }
        }
        Wire::Hello(_) => {
            return Err(Error::invalid(
                "message of the control stream",
                "a second Hello",
                "an event",
            ));
        }
    })
}

fn step_ready(ready: pb::StepReady) -> Said {
    let pb::StepReady { job: name, job_id: id, epoch, step, attempt: number, .. } = ready;
    let sum = |pb::ReducedSlice { slice, sum_of_squares }| (slice, sum_of_squares);
    let absent = |pb::Absent { slice, rank, everywhere }| Absent { slice, rank, everywhere };
    let reduced = Reduced {
        sums: ready.slices.into_iter().map(sum).collect(),
        overflow: ready.overflow.map(|pb::Overflow { slice, rank }| Overflow { slice, rank }),
        absent: ready.absent.into_iter().map(absent).collect(),
    };
    Said::Ready { job: JobRef { name, id }, attempt: Attempt { epoch, step, number }, reduced }
}
