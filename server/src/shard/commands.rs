//! The task of a job on this server: opens the job, and carries out the coordinator's commands in
//! order until it is closed.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use zeroshard_proto::{JobSpec, Optimizer, Placement, Result, Token, job::optimizers, pb};

use super::{
    carry::carry_over,
    events::{Events, JobEvent},
    job::{Context, Job, Opening},
    slice::Apply,
    store::Store,
};
use crate::{attempt::Attempt, backend::Backend};

/// A command of the coordinator for an open job.
#[derive(Debug)]
pub(super) enum Command {
    /// Publish version 0.
    Publish { epoch: u64 },
    /// A worker holds the rank with this lease.
    Grant { rank: u32, lease: u64 },
    /// The lease of the rank has ended.
    NewEpoch { epoch: u64, rank: u32 },
    /// All ranks have discarded the previous attempt.
    NewAttempt(Attempt),
    /// The rank has no more data.
    RankDone { rank: u32 },
    /// Apply the attempt's gradients, or skip the step.
    Decide { attempt: Attempt, update: Option<Update> },
}

/// The update that a decision applies.
#[derive(Debug)]
pub(super) struct Update {
    groups: Vec<Optimizer>,
    coefficient: f64,
    unclipped: f64,
}

impl Command {
    /// Converts a decision.
    ///
    /// # Errors
    /// [`zeroshard_proto::Error::Invalid`] for an unknown optimizer.
    pub(super) fn decide(decision: pb::Decision) -> Result<Self> {
        let pb::Decision { epoch, step, attempt: number, .. } = decision;
        let update = |pb::Update { groups, coefficient, unclipped }| {
            Ok(Update { groups: optimizers(groups)?, coefficient, unclipped })
        };
        let update = decision.update.map(update).transpose()?;
        Ok(Self::Decide { attempt: Attempt { epoch, step, number }, update })
    }
}

/// The context for opening a job.
pub(super) struct Opener<B: Backend> {
    pub(super) store: Arc<Store<B>>,
    pub(super) events: Events,
    /// This server's id in placements.
    pub(super) server: u64,
    /// The cluster's, for calls to other servers.
    pub(super) token: Token,
    /// Cancelled when the coordinator closes the job, or is lost.
    pub(super) closed: CancellationToken,
}

/// Opens a job and carries out `commands`, each of which may be malformed. An error is reported to
/// the coordinator and ends the job here.
pub(super) async fn serve_job<B: Backend>(
    opener: Opener<B>,
    mut open: pb::OpenJob,
    commands: mpsc::Receiver<Result<Command>>,
) {
    let name = open.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let (job_id, epoch) = (open.job_id, open.epoch);
    let (store, events, closed) =
        (opener.store.clone(), opener.events.clone(), opener.closed.clone());
    let (server, token, succession) = (opener.server, opener.token.clone(), open.succession.take());
    let served = async {
        let opened = store.failure.blocking("open a job", move || open_job(&opener, open));
        let job = Arc::new(opened.await?);
        if let Some(succession) = succession {
            carry_over(&store, &token, server, &job, succession).await?;
        }
        store.insert(job.clone());
        tracing::info!(job = name, epoch, slices = job.slices().count(), "job opened");
        events.tell_of(&name, job_id, JobEvent::Opened { epoch });
        job.finish_upload(job.attempt(), 0);
        obey(&store, &job, commands).await
    };
    if let Err(error) = served.await
        && !closed.is_cancelled()
    {
        tracing::error!(job = name, epoch, %error, "job failed");
        store.close(&name, job_id);
        events.tell_of(&name, job_id, JobEvent::Failed { epoch, reason: error.to_string() });
    }
}

fn open_job<B: Backend>(opener: &Opener<B>, open: pb::OpenJob) -> Result<Job<B>> {
    let context = Context {
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
    Job::open(opening, opener.closed.clone(), context)
}

/// Carries out the commands of the coordinator until the job is closed.
async fn obey<B: Backend>(
    store: &Store<B>,
    job: &Arc<Job<B>>,
    mut commands: mpsc::Receiver<Result<Command>>,
) -> Result<()> {
    while let Some(Some(command)) = job.closed().run_until_cancelled(commands.recv()).await {
        match command? {
            // This command is fast.
            Command::Grant { rank, lease } => job.grant(rank, lease),
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
    match *command {
        Command::Publish { epoch } => job.publish(epoch),
        Command::Decide { attempt, ref update } => {
            let apply = update.as_ref().map(|update| Apply {
                groups: &update.groups,
                coefficient: update.coefficient,
                unclipped: update.unclipped,
            });
            job.decide(attempt, apply)
        }
        Command::NewEpoch { epoch, rank } => {
            tracing::info!(job = job.spec.name, epoch, rank, "new epoch");
            job.new_epoch(epoch, rank)
        }
        Command::NewAttempt(attempt) => job.open_attempt(attempt),
        Command::RankDone { rank } => job.rank_done(rank),
        Command::Grant { rank, lease } => {
            job.grant(rank, lease);
            Ok(())
        }
    }
}
