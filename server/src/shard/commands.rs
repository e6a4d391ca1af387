//! A job's own task on this server: opens it, and does what the coordinator says of it, in order,
//! until it is closed.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use zeroshard_proto::{
    JobSpec, Placement, Result,
    pb::{self, serve_request::Event, serve_response::Command},
};

use super::{
    events::Events,
    job::{Job, Opening, Surroundings},
    store::Store,
};
use crate::backend::Backend;

/// What opening a job needs.
pub(super) struct Opener<B: Backend> {
    pub(super) store: Arc<Store<B>>,
    pub(super) events: Events,
    /// This server's id in placements.
    pub(super) server: u64,
    /// Cancelled when the coordinator closes the job, or is lost.
    pub(super) closed: CancellationToken,
}

/// Opens a job and obeys `commands`. An error is told to the coordinator, and ends the job here.
pub(super) async fn serve_job<B: Backend>(
    opener: Opener<B>,
    open: pb::OpenJob,
    commands: mpsc::Receiver<Command>,
) {
    let name = open.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let (job_id, epoch) = (open.job_id, open.epoch);
    let (store, events, closed) =
        (opener.store.clone(), opener.events.clone(), opener.closed.clone());
    let served = async {
        let opened = store.failure.blocking("open a job", move || open_job(&opener, open));
        let job = Arc::new(opened.await?);
        store.insert(job.clone());
        tracing::info!(job = name, epoch, slices = job.slices().count(), "job opened");
        events.tell(Event::Opened(pb::JobOpened { job: name.clone(), epoch, job_id }));
        job.finish_upload(job.attempt(), 0);
        obey(&store, &job, commands).await
    };
    if let Err(error) = served.await
        && !closed.is_cancelled()
    {
        tracing::error!(job = name, epoch, %error, "job failed");
        store.close(&name, job_id);
        events.tell(Event::Failed(pb::JobFailed {
            job: name,
            job_id,
            epoch,
            reason: error.to_string(),
        }));
    }
}

fn open_job<B: Backend>(opener: &Opener<B>, open: pb::OpenJob) -> Result<Job<B>> {
    let surroundings = Surroundings {
        backend: opener.store.backend.clone(),
        budget: opener.store.budget.clone(),
        metrics: opener.store.metrics.clone(),
        events: opener.events.clone(),
    };
    let opening = Opening {
        id: open.job_id,
        spec: JobSpec::try_from(open.spec.unwrap_or_default())?,
        epoch: open.epoch,
        placement: &Placement::try_from(open.placement.unwrap_or_default())?,
        server: opener.server,
    };
    Job::open(opening, opener.closed.clone(), surroundings)
}

/// Does what the coordinator says, until the job is closed.
async fn obey<B: Backend>(
    store: &Store<B>,
    job: &Arc<Job<B>>,
    mut commands: mpsc::Receiver<Command>,
) -> Result<()> {
    while let Some(Some(command)) = job.closed().run_until_cancelled(commands.recv()).await {
        match command {
            Command::Grant(grant) => job.grant(grant.rank, grant.lease),
            other => {
                let job = job.clone();
                store
                    .failure
                    .blocking("a command about a job", move || execute(&job, &other))
                    .await?;
            }
        }
    }
    Ok(())
}

fn execute<B: Backend>(job: &Job<B>, command: &Command) -> Result<()> {
    match command {
        Command::Publish(publish) => job.publish(publish.epoch),
        Command::Decide(decision) => job.decide(decision),
        Command::NewEpoch(new) => {
            tracing::info!(job = new.job, epoch = new.epoch, rank = new.rank, "new epoch");
            job.new_epoch(new.epoch, new.rank)
        }
        Command::NewAttempt(new) => job.new_attempt(new),
        Command::Done(done) => job.rank_done(done.rank),
        // Leases are granted, and jobs opened and closed, elsewhere.
        Command::Welcome(_) | Command::Open(_) | Command::Grant(_) | Command::Close(_) => Ok(()),
    }
}
