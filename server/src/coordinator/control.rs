//! Control streams: the messages from shard servers, and the commands to them.

use futures_util::{Stream, StreamExt};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use zeroshard_proto::{
    Error, Result, Server,
    pb::{self, serve_request, serve_response::Command},
};

use super::{
    driver::{Control, Driver},
    events::{Event, JobRef, Lease, Link, OpenJob, Said},
    reduce::Reduced,
    requests::dialled,
};
use crate::failure::Failure;

/// A command that waits to be sent to its server.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Command(Box<Command>),
    /// Converted when it is sent, because the spec and the placement may be large.
    Open(OpenJob),
}

/// The commands of a control stream, until the server is dismissed.
pub(super) fn commands(
    control: Control,
    term: u64,
    failure: Failure,
) -> impl Stream<Item = Result<pb::ServeResponse, Status>> + Send {
    let message = move |command| pb::ServeResponse { command: Some(command), term };
    let convert = move |outgoing| {
        let failure = failure.clone();
        async move {
            match outgoing {
                Outgoing::Command(command) => Ok(message(*command)),
                Outgoing::Open(open) => {
                    let open = failure
                        .blocking("convert a job to be opened", move || Ok(open.into()))
                        .await?;
                    Ok(message(Command::Open(open)))
                }
            }
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

pub(super) fn said(event: serve_request::Event) -> Result<Said> {
    use serve_request::Event as Wire;
    let job = |name, id| JobRef { name, id };
    Ok(match event {
        Wire::Opened(pb::JobOpened { job: name, job_id, .. }) => Said::Opened(job(name, job_id)),
        Wire::Initialised(pb::JobInitialised { job: name, epoch, job_id }) => {
            Said::Initialised { job: job(name, job_id), epoch }
        }
        Wire::Ready(ready) => {
            let pb::StepReady { job: name, job_id, epoch, step, attempt, .. } = ready;
            let pb::StepReady { slices, overflow, absent, .. } = ready;
            let reduced = Reduced { slices, overflow, absent };
            Said::Ready { job: job(name, job_id), epoch, step, attempt, reduced }
        }
        Wire::Stats(stats) => Said::Stats(stats),
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
