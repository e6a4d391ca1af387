//! The control stream: registers with the coordinator, and does what it says, in order.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use zeroshard_proto::{
    Error, JobSpec, Placement, Result, Token,
    pb::{self, coordinator_client::CoordinatorClient, server_command::Command, server_event::Event},
    transport::{Connection, MAX_CONTROL_MESSAGE, endpoint},
};

use super::{
    job::{Job, Surroundings},
    store::Store,
};
use crate::{backend::Backend, health::Health};

/// How often the coordinator hears what this server holds.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

/// Whom to call, and as whom.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contact<'a> {
    pub(super) coordinator: &'a str,
    /// What others dial to reach this server.
    pub(super) advertised: &'a str,
    pub(super) token: &'a Token,
}

/// One connection to the coordinator, from the first greeting until it breaks: the reason.
pub(super) async fn session<B: Backend>(
    store: &Arc<Store<B>>,
    health: &Health,
    contact: Contact<'_>,
) -> Error {
    match Session::open(store, contact).await {
        Ok((mut session, commands)) => {
            store.metrics.coordinator_connected.set(1);
            health.set_ready(true).await;
            session.run(commands, contact.coordinator).await
        }
        Err(error) => error,
    }
}

struct Session<'a, B: Backend> {
    store: &'a Arc<Store<B>>,
    events: UnboundedSender<Event>,
    id: u64,
}

type Commands = tonic::Streaming<pb::ServerCommand>;

impl<'a, B: Backend> Session<'a, B> {
    async fn open(store: &'a Arc<Store<B>>, contact: Contact<'_>) -> Result<(Self, Commands)> {
        let Contact { coordinator, advertised, token } = contact;
        let peer = format!("coordinator {coordinator}");
        let unavailable = |cause: String| Error::Unavailable { peer: peer.clone(), cause };
        let channel = endpoint(coordinator)?.connect().await.map_err(|e| unavailable(chain(&e)))?;
        let mut client = CoordinatorClient::new(Connection::new(channel, token)?)
            .max_decoding_message_size(MAX_CONTROL_MESSAGE)
            .max_encoding_message_size(MAX_CONTROL_MESSAGE);
        let (events, outgoing) = unbounded_channel();
        let hello = Event::Hello(pb::Hello { address: advertised.to_owned(), ..Default::default() });
        events.send(hello).map_err(|_| unavailable("the stream ended".to_owned()))?;
        let outgoing = tokio_stream::StreamExt::map(UnboundedReceiverStream::new(outgoing), |event| {
            pb::ServerEvent { event: Some(event) }
        });
        let mut commands =
            client.serve(outgoing).await.map_err(|status| Error::from_status(&status, &peer))?.into_inner();
        match commands.message().await.map_err(|status| Error::from_status(&status, &peer))? {
            Some(pb::ServerCommand { command: Some(Command::Welcome(_)), .. }) => {
                tracing::info!(coordinator, "registered");
                Ok((Self { store, events, id: 0 }, commands))
            }
            other => Err(Error::Internal { cause: format!("{peer} greeted with {other:?}") }),
        }
    }

    async fn run(&mut self, mut commands: Commands, coordinator: &str) -> Error {
        let mut stats = tokio::time::interval(STATS_INTERVAL);
        let peer = || format!("coordinator {coordinator}");
        loop {
            let command = tokio::select! {
                command = commands.message() => command,
                _ = stats.tick() => {
                    self.tell(Event::Stats(self.store.stats()));
                    continue;
                }
            };
            match command {
                Ok(Some(pb::ServerCommand { command: Some(command), .. })) => self.obey(command).await,
                Ok(Some(_)) => tracing::warn!("a command of a later version was ignored"),
                Ok(None) => return Error::Unavailable { peer: peer(), cause: "it hung up".to_owned() },
                Err(status) => return Error::from_status(&status, &peer()),
            }
        }
    }

    async fn obey(&self, command: Command) {
        match command {
            Command::Welcome(_)
            | Command::Publish(_)
            | Command::Grant(_)
            | Command::NewAttempt(_)
            | Command::Done(_) => {}
            Command::Open(open) => self.open_job(open).await,
            Command::Decide(decision) => self.decide(decision).await,
            Command::NewEpoch(change) => {
                if let Ok(job) = self.store.job(&change.job) {
                    tracing::info!(job = change.job, epoch = change.epoch, "new epoch");
                    job.new_epoch(change.epoch, change.initialised);
                }
            }
            Command::Close(close) => {
                tracing::info!(job = close.job, "job closed");
                self.store.close(&close.job);
            }
        }
    }

    async fn open_job(&self, open: pb::OpenJob) {
        let name = open.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
        let epoch = open.epoch;
        let surroundings = Surroundings {
            backend: self.store.backend.clone(),
            budget: self.store.budget.clone(),
            metrics: self.store.metrics.clone(),
            events: self.events.clone(),
        };
        let id = self.id;
        let opened = blocking(move || {
            let spec = JobSpec::try_from(open.spec.unwrap_or_default())?;
            let placement = Placement::try_from(open.placement.unwrap_or_default())?;
            Job::open(spec, epoch, &placement, id, surroundings)
        });
        match opened.await {
            Ok(job) => {
                let job = Arc::new(job);
                self.store.insert(job.clone());
                tracing::info!(job = name, epoch, slices = job.slices().count(), "job opened");
                self.tell(Event::Opened(pb::JobOpened { job: name, epoch, ..Default::default() }));
                job.finish_upload(epoch, 0);
            }
            Err(error) => self.fail(name, epoch, &error),
        }
    }

    async fn decide(&self, decision: pb::Decision) {
        let (name, epoch) = (decision.job.clone(), decision.epoch);
        let decided = match self.store.job(&name) {
            Ok(job) => blocking(move || job.decide(&decision)).await,
            Err(error) => Err(error),
        };
        if let Err(error) = decided {
            self.fail(name, epoch, &error);
        }
    }

    fn fail(&self, job: String, epoch: u64, error: &Error) {
        tracing::error!(job, epoch, %error, "job failed");
        self.store.close(&job);
        self.tell(Event::Failed(pb::JobFailed {
            job,
            epoch,
            reason: error.to_string(),
            ..Default::default()
        }));
    }

    fn tell(&self, event: Event) {
        // The stream's end is seen where commands are read.
        let _ = self.events.send(event);
    }
}

/// Runs arithmetic where it does not hold up the network.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|e| Err(Error::Internal { cause: format!("a background task ended: {e}") }))
}

/// An error with what caused it: the transport's own message is only "transport error".
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |message, cause| format!("{message}: {cause}"))
}
