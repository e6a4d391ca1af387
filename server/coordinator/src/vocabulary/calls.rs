//! The calls of workers, clients and operators, and their answers.

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use zeroshard_model::{
    Attempt, Error, Fork, JobSpec, Optimizer, Restore, Result, Server, quota::Holder,
};

use crate::vocabulary::{
    commands::Checkpoint,
    decision::Report,
    gradient::{Absent, Norm},
    ids::{JobRef, Lease, ServerId},
};

/// The progress of draining a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Drained {
    pub server: Server,
    pub stays: Vec<Stays>,
    /// The number of slices, over all jobs, with too few replicas.
    pub degraded: u64,
}

/// A job that has slices on a server that is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stays {
    pub job: String,
    pub reason: String,
    /// `true` if a later request can succeed without an action of the operator.
    pub transient: bool,
}

/// A job that is to be created.
#[derive(Debug)]
pub struct Create {
    pub spec: JobSpec,
    /// How it continues from another job, if it does.
    pub fork: Option<Fork>,
    /// The checkpoint from which it starts, if it does. INVARIANT: not with `fork`.
    pub restore: Option<Restore>,
    /// The role and the limits of the token of the call, and the number of bytes that the job
    /// needs.
    pub quota: Option<(Holder, u64)>,
}

/// A worker's request for a rank.
#[derive(Debug)]
pub struct Join {
    pub job: String,
    pub rank: u32,
    /// The host:port at which its peers reach the worker, if it has one.
    pub address: Option<String>,
    /// The lease that the worker will get.
    pub lease: Lease,
    /// How long to wait for the end of an earlier lease of the rank. INVARIANT: at most `wait`.
    pub rank_wait: Duration,
    /// How long to wait for the servers to accept the lease.
    pub wait: Duration,
}

/// A worker continues its lease on a rank, after the coordinator was restarted.
#[derive(Debug)]
pub struct Attach {
    pub job: JobRef,
    pub rank: u32,
    /// The host:port at which its peers reach the worker, if it has one.
    pub address: Option<String>,
    pub lease: Lease,
    /// The latest attempt that the worker knows.
    pub attempt: Attempt,
    /// The data for checkpoints that the worker has sent last, and its version.
    pub user_data: Option<(u64, Bytes)>,
}

/// A worker gives its rank back.
#[derive(Debug)]
pub struct Leave {
    pub job: JobRef,
    pub lease: Lease,
    /// `true` if the rank has no more data.
    pub done: bool,
}

/// The rank that calls, its lease, and the attempt that it means.
#[derive(Debug, Clone)]
pub struct Turn {
    pub job: JobRef,
    pub lease: Lease,
    pub rank: u32,
    pub attempt: Attempt,
}

/// A rank has pushed all gradients of a step.
#[derive(Debug, Clone)]
pub struct Commit {
    pub turn: Turn,
    /// `None`: the hyperparameters of the spec.
    pub groups: Option<Vec<Optimizer>>,
    /// INVARIANT: finite and greater than 0.
    pub loss_scale: f64,
    /// INVARIANT: finite and greater than 0.
    pub max_norm: Option<f64>,
    pub loss: Option<f64>,
    /// Empty, or one for each tensor.
    pub gradient_factors: Vec<f64>,
    /// Empty, or one for each tensor.
    pub written: Vec<u64>,
    /// For a checkpoint of the version that the step makes.
    pub user_data: Bytes,
    /// `true` if the rank sends this data after the step.
    pub user_data_follows: bool,
    pub wait: Duration,
}

/// A rank requests the norm of a step's gradient before the step is decided.
#[derive(Debug, Clone)]
pub struct Reduce {
    pub turn: Turn,
    /// INVARIANT: finite and greater than 0.
    pub loss_scale: f64,
    pub wait: Duration,
}

/// A rank discards the gradients of the open attempt.
#[derive(Debug, Clone)]
pub struct Discard {
    pub turn: Turn,
    pub wait: Duration,
}

/// A rank contributes nothing more until every rank rests.
#[derive(Debug, Clone)]
pub struct Rest {
    pub turn: Turn,
    /// `true` if mean gradients are over the other ranks.
    pub excluded: bool,
    pub wait: Duration,
}

/// A rank cannot reach a server.
#[derive(Debug, Clone)]
pub struct LinkReport {
    pub turn: Turn,
    pub server: ServerId,
    pub incarnation: u64,
    pub cause: String,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    Created {
        epoch: u64,
        job_id: u64,
    },
    Deleted,
    /// The lease is valid. Memberships are read with
    /// [`Cluster::next_membership`](crate::cluster::Cluster::next_membership).
    Joined,
    Left,
    /// The result of a step, and the epoch of the next one.
    Report(Report, u64),
    /// The norm, the tensors that lack a rank's gradient, and the ranks that rest.
    Reduced {
        norm: Norm,
        absent: Vec<Absent>,
        resting: Vec<u32>,
    },
    /// The open attempt.
    Discarded {
        attempt: u32,
    },
    Rested(Rested),
    /// The report about a link was noted.
    LinkNoted,
    Saved(Saved),
    /// The job continues on this line.
    Rewound {
        line: u64,
    },
    /// The data of the rank has been stored.
    UserDataStored,
    /// The server was cordoned or uncordoned.
    Cordoned(Server),
    Drained(Drained),
    /// The lease of the rank was ended.
    Evicted {
        epoch: u64,
    },
}

/// Checks the range of a rank.
///
/// # Errors
/// [`Error::Invalid`] for a rank that is not less than the world size.
pub(crate) fn check_rank(job: &str, rank: u32, world: u32) -> Result<()> {
    if rank < world {
        return Ok(());
    }
    let expected = format!("less than the world size, {world}");
    Err(Error::invalid(format!("rank of job {job:?}"), rank, expected))
}

/// All ranks have rested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rested {
    /// The attempt in which all ranks take part again.
    pub attempt: Attempt,
    /// The highest rank that took part in the last step.
    pub last: u32,
}

/// A request to save a job.
#[derive(Debug, Clone)]
pub struct Save {
    pub job: JobRef,
    /// The directory or prefix; `None`: that of the job's policy.
    pub url: Option<String>,
    /// Do nothing if the last complete checkpoint is of the current version, and at the same place.
    pub unless_saved: bool,
    pub wait: Duration,
}

/// A request to return a job to a checkpoint.
#[derive(Debug, Clone)]
pub struct Rewind {
    pub job: JobRef,
    /// The line on which the caller has seen the job. If the job has already returned from this
    /// line to the checkpoint, the caller has repeated its call.
    pub from: u64,
    /// The checkpoint, which existed when the driver looked it up.
    pub to: Checkpoint,
    /// The number of completed saves before the driver looked it up.
    pub completed: u64,
    /// All batches that the new line skips.
    pub skips: Vec<Range<u64>>,
    pub wait: Duration,
}

/// A complete checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    pub version: u64,
    pub bytes: u64,
}

/// The data of one rank, sent after a step.
#[derive(Debug)]
pub struct RankData {
    pub job: JobRef,
    pub rank: u32,
    pub lease: Lease,
    pub version: u64,
    pub data: Bytes,
}
