//! The commands to shard servers, and the events that shard servers send.

use std::{collections::BTreeMap, sync::Arc};

use zeroshard_model::{
    Attempt, Error, Fork, JobSpec, Line, LineVersion, Placement, RecentSteps, Restore,
    memory::Capacity,
};

use crate::{
    placement::fork::Source,
    vocabulary::{
        decision::Decision,
        gradient::Reduced,
        ids::{JobRef, Lease, ServerId},
        reports::{Files, Stats},
    },
};

/// Why a job has failed on a server.
#[derive(Debug, Clone, PartialEq)]
pub struct FailedThere {
    pub reason: String,
    /// `true` if the server may be able to open the job later.
    pub transient: bool,
}

/// The properties that a shard server reports when it registers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct About {
    /// The name that the operator gave the server. Empty: none.
    pub name: String,
    /// The zone of the server. Empty: the server is a zone of its own.
    pub zone: String,
    /// The memory for the arrays of slices; `None` without a known limit.
    pub capacity: Option<Capacity>,
    /// Why jobs have failed on the server, by job id.
    pub failed: BTreeMap<u64, FailedThere>,
    /// The version of the server; empty if it is unknown.
    pub version: String,
    /// `true` if the server is cordoned.
    pub cordoned: bool,
}

/// A message from a shard server.
#[derive(Debug)]
pub enum ServerEvent {
    /// The server has allocated memory for the job.
    Opened { job: JobRef, epoch: u64 },
    /// The server has all initial parameters of its slices.
    Initialised { job: JobRef, epoch: u64 },
    /// The server has all gradients of the attempt.
    Ready { job: JobRef, attempt: Attempt, reduced: Reduced },
    /// The server accepts pushes with the lease.
    Granted { job: JobRef, rank: u32, lease: Lease },
    /// The server has stored the decision about the step.
    Stored { job: JobRef, epoch: u64, step: u64 },
    /// The server cannot hold or continue the job, which it has opened in this epoch or an earlier
    /// one. `transient`: it may be able to open the job later.
    Failed { job: JobRef, epoch: u64, reason: String, transient: bool },
    /// The server has copied slices.
    Copied { job: JobRef, number: u64 },
    /// The server has no memory for the slices that it was told to copy.
    CopyRefused { job: JobRef, number: u64, reason: String },
    /// The hashes of the server's slices at a version.
    Hashes { job: JobRef, epoch: u64, version: u64, slices: Vec<(u32, u64)> },
    /// The server has written its part of a checkpoint, of a version on this line.
    Written { job: JobRef, save: u64, line: u64, files: Files },
    /// The server could not write its part of a checkpoint.
    SaveFailed { job: JobRef, save: u64, cause: Error },
    /// The server has received all commands up to [`Command::Confirm`].
    Confirmed { number: u64 },
    /// The server is about to stop.
    Departing,
    /// The memory and jobs of the server.
    Stats(Stats),
}

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    pub url: String,
    /// The name of the job that was saved.
    pub job: String,
    /// Its id.
    pub job_id: u64,
    pub version: LineVersion,
}

/// A command to a shard server.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// The server is registered.
    Welcome,
    /// Allocate memory for slices of a job.
    Open(OpenJob),
    /// Free the slices of the job.
    Close(JobRef),
    /// Publish version 0, because every server has its initial parameters.
    Publish { job: JobRef, epoch: u64 },
    /// Accept pushes with the lease.
    Grant { job: JobRef, rank: u32, lease: Lease },
    /// The lease of the rank has ended, in order if it has `left`.
    NewEpoch { job: JobRef, epoch: u64, rank: u32, left: bool },
    /// All ranks have discarded the previous attempt or have rested; then `rested` is the highest
    /// rank that took part in the last step.
    NewAttempt { job: JobRef, attempt: Attempt, rested: Option<u32> },
    /// The rank has no more data.
    RankDone { job: JobRef, rank: u32 },
    /// The rank rests or, without `begins`, takes part again from the next attempt on.
    RankRests { job: JobRef, rank: u32, begins: Option<Begins> },
    /// Apply or skip the step.
    Decide { job: JobRef, decision: Decision },
    /// The slices are on other servers, in a new epoch.
    NewPlacement { job: JobRef, epoch: u64, placement: Arc<Placement> },
    /// Copy slices from their primaries.
    Copy { job: JobRef, number: u64, version: u64, slices: Vec<u32> },
    /// Send a version to those who ask for it.
    ServeVersion { job: JobRef, version: u64 },
    /// The server is cordoned or uncordoned.
    Cordon { cordoned: bool },
    /// Write the slices of a version.
    Write { job: JobRef, plan: SavePlan },
    /// Give up a save.
    CancelSave { job: JobRef, save: u64 },
    /// State that all earlier commands have been received.
    Confirm { number: u64 },
    /// The server may stop, because none of its jobs is being saved.
    Release,
}

impl Command {
    /// Returns whether the command changes a job, so that its coordinator has led.
    pub fn decides(&self) -> bool {
        match self {
            Self::Welcome
            | Self::Cordon { .. }
            | Self::CancelSave { .. }
            | Self::Confirm { .. }
            | Self::Release => false,
            Self::Open(_)
            | Self::Close(_)
            | Self::Publish { .. }
            | Self::Grant { .. }
            | Self::NewEpoch { .. }
            | Self::NewAttempt { .. }
            | Self::RankDone { .. }
            | Self::RankRests { .. }
            | Self::Decide { .. }
            | Self::NewPlacement { .. }
            | Self::Copy { .. }
            | Self::ServeVersion { .. }
            | Self::Write { .. } => true,
        }
    }
}

/// A job that a server is to open. The spec and the placement are shared, because they may be
/// large.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenJob {
    pub spec: Arc<JobSpec>,
    pub placement: Arc<Placement>,
    pub job_id: u64,
    pub epoch: u64,
    /// The line of its versions.
    pub line: Arc<Line>,
    /// The server that opens the job.
    pub server: ServerId,
    /// The predecessor that the job was created from, if it has one.
    pub fork: Option<Arc<Fork>>,
    /// Where its slices come from, if the server copies them from the predecessor.
    pub source: Option<Source>,
    /// The checkpoint that it reads, if it does.
    pub checkpoint: Option<Checkpoint>,
    /// The checkpoint as the creator of the job has requested it.
    pub requested: Option<Arc<Restore>>,
    /// The leases of the ranks, if the job is restored while they wait.
    pub leases: Vec<(u32, Lease)>,
    /// The ranks of such a job that have no more data, and those that have left in order.
    pub done: Vec<u32>,
    pub left: Vec<u32>,
    /// The current version of a running job, if the server becomes a backup.
    pub version: Option<u64>,
    /// The decision that has led to this version.
    pub decision: Option<Box<Decision>>,
    /// The figures that the policy on spikes starts with.
    pub recent: RecentSteps,
}

/// The beginning of a rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begins {
    /// The step that is open.
    pub since: u64,
    /// `true` if mean gradients are over the other ranks.
    pub excluded: bool,
}

/// The content and the place of a save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePlan {
    /// A number that no other save has.
    pub save: u64,
    pub version: LineVersion,
    pub url: String,
    /// The number of checkpoints to keep; 0: all.
    pub keep: u32,
}
