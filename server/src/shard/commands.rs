//! The task of a job on this server: opens the job, and carries out the coordinator's commands in
//! order until it is closed.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, Error, JobSpec, Optimizer, Placement, Result};
use zeroshard_net::transport::Credentials;
use zeroshard_proto::{convert::optimizers, pb};
use zeroshard_shard::{
    events::JobEvent,
    job::{Opening, Rest},
    slice::Apply,
};

use super::{
    events::Events,
    fork::copy_fork,
    job::{Job, Origin},
    replicate::{Copies, follow},
    restore,
    save::{SaveGate, Saves},
    store::Store,
};

/// How long a job that does not fit waits for the memory of jobs that were closed before.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);
const RELEASE_INTERVAL: Duration = Duration::from_millis(20);

/// A command of the coordinator for an open job.
#[derive(Debug)]
pub(crate) enum Command {
    /// Publish version 0.
    Publish { epoch: u64 },
    /// A worker holds the rank with this lease.
    Grant { rank: u32, lease: u64 },
    /// The lease of the rank has ended.
    NewEpoch { epoch: u64, rank: u32, left: bool },
    /// All ranks have discarded the previous attempt, or have rested.
    NewAttempt { attempt: Attempt, rested: Option<u32> },
    /// The rank has no more data.
    RankDone { rank: u32 },
    /// The rank rests, or takes part again from the next attempt on.
    RankRests(pb::RankRests),
    /// Apply the attempt's gradients, or skip the step.
    Decide { attempt: Attempt, update: Option<Update>, message: Arc<pb::Decision> },
    /// The slices are on other servers, in a new epoch.
    NewPlacement { epoch: u64, placement: Placement },
    /// Copy slices from their primaries.
    Copy(pb::CopySlices),
    /// All servers have the decisions that lead to a version.
    Serve { version: u64 },
    /// Write the slices of the current version.
    Write(pb::WriteCheckpoint),
    /// Give up a save.
    CancelSave { save: u64 },
    /// Describe the job to a new coordinator.
    Describe(oneshot::Sender<pb::JobReport>),
}

/// The update that a decision applies.
#[derive(Debug)]
pub(crate) struct Update {
    groups: Vec<Optimizer>,
    coefficient: f64,
    unclipped: f64,
    gradient_factors: Vec<f64>,
}

impl Command {
    /// Converts a decision.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for an unknown optimizer.
    pub(crate) fn decide(decision: pb::Decision) -> Result<Self> {
        let pb::Decision { epoch, step, attempt: number, .. } = decision;
        let update = |pb::Update { groups, coefficient, unclipped, gradient_factors }| {
            Ok::<_, Error>(Update {
                groups: optimizers(groups)?,
                coefficient,
                unclipped,
                gradient_factors,
            })
        };
        let update = decision.update.clone().map(update).transpose()?;
        let message = Arc::new(decision);
        Ok(Self::Decide { attempt: Attempt { epoch, step, number }, update, message })
    }

    /// Converts a placement.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for one that is invalid.
    pub(crate) fn new_placement(next: pb::NewPlacement) -> Result<Self> {
        let placement = Placement::try_from(next.placement.unwrap_or_default())?;
        Ok(Self::NewPlacement { epoch: next.epoch, placement })
    }
}

/// The task of a job.
pub(super) struct Task<B: Backend> {
    pub(super) store: Arc<Store<B>>,
    pub(super) events: Events,
    /// This server's id in placements.
    pub(super) server: u64,
    /// The credentials for calls to other servers.
    pub(super) credentials: Credentials,
    /// The commands for the job, each of which may be malformed.
    pub(super) commands: mpsc::Receiver<Result<Command>>,
    /// Cancelled when the coordinator closes the job.
    pub(super) closed: CancellationToken,
    pub(super) gate: SaveGate,
}

impl<B: Backend> Task<B> {
    /// Opens the job, and carries out its commands until it is closed. An error is reported to the
    /// coordinator and ends the job here.
    pub(super) async fn run(mut self, open: pb::OpenJob) {
        let name = open.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
        let (job_id, epoch) = (open.job_id, open.epoch);
        if let Err(error) = self.serve(open).await
            && !self.closed.is_cancelled()
        {
            tracing::error!(job = name, epoch, %error, "job failed");
            self.store.close(&name, job_id);
            self.events.tell_of(&name, job_id, JobEvent::failed(epoch, &error));
        }
    }

    async fn serve(&mut self, mut open: pb::OpenJob) -> Result<()> {
        let (epoch, fork) = (open.epoch, open.fork.take());
        let (restore, requested) = (open.restore.take(), open.requested.take());
        let saved = open.restore_job_id;
        let (leases, done, left) = (
            std::mem::take(&mut open.leases),
            std::mem::take(&mut open.done),
            std::mem::take(&mut open.left),
        );
        let decision = open.decision.take();
        let from = fork.as_ref().and_then(|fork| fork.from.clone());
        let fresh_state = fork.as_ref().is_some_and(|fork| fork.fresh_state);
        let line = open.line.take().unwrap_or_default();
        let recent = open.recent.take();
        let origin = Origin { from, fresh_state, restore: requested, line, recent };
        let job = Arc::new(self.open(open, origin, restore.is_some()).await?);
        if let Some(fork) = fork {
            copy_fork(&self.store, &self.credentials, self.server, &job, fork).await?;
        }
        let returns = !leases.is_empty();
        for lease in leases {
            job.grant(lease.rank, lease.lease);
        }
        if let Some(decision) = decision {
            job.remember(decision);
        }
        if let Some(checkpoint) = restore {
            restore::restore(&self.store, &job, (checkpoint, saved), returns).await?;
        }
        left.into_iter().for_each(|rank| job.rank_left(rank));
        let absent = {
            let job = job.clone();
            move || done.into_iter().try_for_each(|rank| job.rank_done(rank))
        };
        self.store.failure.blocking("note the ranks of a job", absent).await?;
        self.store.insert(job.clone());
        if job.spec.replicas > 1 {
            let failure = self.store.failure.clone();
            let follow = follow(self.store.clone(), job.clone(), self.credentials.clone());
            tokio::spawn(async move { failure.guard("the backups of a job", follow).await });
        }
        tracing::info!(job = job.spec.name, epoch, slices = job.slices().count(), "job opened");
        self.events.tell_of(&job.spec.name, job.id, JobEvent::Opened { epoch });
        job.finish_upload(job.attempt(), 0);
        self.obey(&job).await
    }

    /// Opens the job. Jobs that were closed before may not have returned their memory yet.
    async fn open(&self, open: pb::OpenJob, origin: Origin, is_restored: bool) -> Result<Job<B>> {
        let (open, deadline) = (Arc::new(open), Instant::now() + RELEASE_LIMIT);
        loop {
            // Asked before the attempt, during which the missing memory may be freed.
            let is_releasing = self.store.is_releasing();
            let opened = self.try_open(open.clone(), origin.clone(), is_restored).await;
            let is_full = matches!(opened, Err(Error::OutOfMemory { .. }));
            if !is_full || !is_releasing || Instant::now() > deadline {
                return opened;
            }
            tokio::time::sleep(RELEASE_INTERVAL).await;
        }
    }

    async fn try_open(
        &self,
        open: Arc<pb::OpenJob>,
        origin: Origin,
        is_restored: bool,
    ) -> Result<Job<B>> {
        let (store, events, closed) =
            (self.store.clone(), self.events.clone(), self.closed.clone());
        let server = self.server;
        let open = move || {
            // The specification may be large.
            let open = pb::OpenJob::clone(&open);
            let opening = Opening {
                id: open.job_id,
                spec: JobSpec::try_from(open.spec.unwrap_or_default())?,
                epoch: open.epoch,
                placement: Placement::try_from(open.placement.unwrap_or_default())?,
                server,
                version: open.version,
                is_restored,
                closed,
                devices: store.devices.clone(),
                shares: store.resources.shares(),
                budget: store.budget.part(store.budget.limit() / 4 * 3),
            };
            Job::open(opening, origin, events)
        };
        self.store.failure.blocking("open a job", open).await
    }

    /// Carries out the commands of the coordinator until the job is closed.
    async fn obey(&mut self, job: &Arc<Job<B>>) -> Result<()> {
        let commands = &mut self.commands;
        let mut saves = Saves::new(self.store.clone(), job.clone(), self.server, self.gate.clone());
        let mut copies = Copies::new(self.store.clone(), job.clone(), self.credentials.clone());
        while let Some(Some(command)) = job.closed().run_until_cancelled(commands.recv()).await {
            match command? {
                // These commands are fast.
                Command::Grant { rank, lease } => job.grant(rank, lease),
                Command::Write(write) => saves.begin(write).await,
                Command::CancelSave { save } => saves.cancel(save),
                Command::Copy(copy) => copies.begin(copy).await?,
                Command::Serve { version } => job.serve(version),
                Command::Describe(answer) => {
                    saves.end_all();
                    // The session has ended if nobody receives the description.
                    drop(answer.send(job.report()));
                }
                other => {
                    if matches!(other, Command::NewPlacement { .. }) {
                        copies.cancel();
                    }
                    let (job, failure) = (job.clone(), &self.store.failure);
                    let execute = move || execute(&job, &other);
                    failure.blocking("a command about a job", execute).await?;
                }
            }
        }
        Ok(())
    }
}

/// Carries out a command that takes time.
///
/// # Errors
/// Those of the method of [`Job`], after which the job cannot continue.
pub(crate) fn execute<B: Backend>(job: &Job<B>, command: &Command) -> Result<()> {
    match *command {
        Command::Publish { epoch } => job.publish(epoch),
        Command::Decide { attempt, ref update, ref message } => {
            let apply = update.as_ref().map(|update| Apply {
                groups: &update.groups,
                coefficient: update.coefficient,
                unclipped: update.unclipped,
                gradient_factors: &update.gradient_factors,
            });
            job.decide(message, attempt, apply)
        }
        Command::NewEpoch { epoch, rank, left } => {
            tracing::info!(job = job.spec.name, epoch, rank, "new epoch");
            job.new_epoch(epoch, rank, left)
        }
        Command::NewPlacement { epoch, ref placement } => {
            tracing::info!(job = job.spec.name, epoch, "new placement");
            job.new_placement(epoch, placement.clone())
        }
        Command::NewAttempt { attempt, rested } => job.open_attempt(attempt, rested),
        Command::RankDone { rank } => job.rank_done(rank),
        Command::RankRests(pb::RankRests { rank, ends, since, excluded, .. }) => {
            job.rank_rests(Rest { rank, since, excluded }, ends)
        }
        Command::Grant { .. }
        | Command::Write(_)
        | Command::Copy(_)
        | Command::Serve { .. }
        | Command::CancelSave { .. }
        | Command::Describe(_) => Ok(()),
    }
}
