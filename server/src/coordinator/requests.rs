//! Checks requests and converts them into events.

use std::time::Duration;

use zeroshard_proto::{Error, JobSpec, Result, job::optimizers, pb};

use super::events::{Commit, Discard, JobRef, Lease, Reduce, Turn};
use crate::config::{Address, MAX_WAIT};

/// The longest address of a server or worker, in bytes: the longest name that DNS has, and a port.
const MAX_ADDRESS: usize = 253 + 6;

/// How long callers wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    /// Of callers that do not say how long they wait.
    pub(crate) default: Duration,
    /// The time after which a worker that went away without a word is certainly noticed: no Join
    /// waits longer for its rank.
    pub(crate) rank: Duration,
}

impl Waits {
    /// The wait of a request: its own, or the default; at most [`MAX_WAIT`].
    pub(super) fn of(&self, wait_ms: u32) -> Duration {
        match Duration::from_millis(wait_ms.into()) {
            Duration::ZERO => self.default,
            wait => wait.min(MAX_WAIT),
        }
    }

    pub(super) fn commit(&self, request: pb::CommitRequest) -> Result<Commit> {
        let (rank, step) = (request.rank, request.step);
        let positive = |what, number| positive(what, number, rank, step);
        let groups = request.groups;
        Ok(Commit {
            loss_scale: positive("loss_scale", or_one(request.loss_scale))?,
            max_norm: request.max_norm.map(|norm| positive("max_norm", norm)).transpose()?,
            groups: if groups.is_empty() { None } else { Some(optimizers(groups)?) },
            wait: self.of(request.wait_ms),
            turn: Turn {
                job: JobRef { name: request.job, id: request.job_id },
                lease: Lease(request.lease),
                epoch: request.epoch,
                rank,
                step,
                attempt: request.attempt,
            },
            loss: request.loss,
            discard: request.discard,
        })
    }

    pub(super) fn reduce(&self, request: pb::ReduceRequest) -> Result<Reduce> {
        let (rank, step) = (request.rank, request.step);
        let turn = Turn {
            job: JobRef { name: request.job, id: request.job_id },
            lease: Lease(request.lease),
            epoch: request.epoch,
            rank,
            step,
            attempt: request.attempt,
        };
        let loss_scale = positive("loss_scale", or_one(request.loss_scale), rank, step)?;
        Ok(Reduce { turn, loss_scale, wait: self.of(request.wait_ms) })
    }

    pub(super) fn discard(&self, request: pb::DiscardRequest) -> Discard {
        let turn = Turn {
            job: JobRef { name: request.job, id: request.job_id },
            lease: Lease(request.lease),
            epoch: request.epoch,
            rank: request.rank,
            step: request.step,
            attempt: request.attempt,
        };
        Discard { turn, wait: self.of(request.wait_ms) }
    }
}

/// A loss scale that is absent is 1.
fn or_one(loss_scale: f64) -> f64 {
    if loss_scale == 0.0 { 1.0 } else { loss_scale }
}

fn positive(what: &str, number: f64, rank: u32, step: u64) -> Result<f64> {
    if number.is_finite() && number > 0.0 {
        return Ok(number);
    }
    Err(Error::invalid(
        format!("{what} of rank {rank} at step {step}"),
        number,
        "finite and more than 0",
    ))
}

/// The spec of a new job. Its cost grows with the request: call it with [`blocking`].
pub(super) fn job_spec(spec: Option<pb::JobSpec>) -> Result<JobSpec> {
    let spec = spec.ok_or_else(|| Error::invalid("spec", "absent", "the job's spec"))?;
    let spec = JobSpec::try_from(spec)?;
    if spec.replicas > 1 {
        // To accept it would promise what nobody keeps.
        return Err(Error::invalid(
            "replicas",
            spec.replicas,
            "1: this version does not replicate slices",
        ));
    }
    Ok(spec)
}

/// An address that others dial.
pub(super) fn dialled(what: &str, text: &str) -> Result<Address> {
    let wrong = |found: String, expected: &str| Err(Error::invalid(what, found, expected));
    if text.len() > MAX_ADDRESS {
        return wrong(
            format!("{} bytes", text.len()),
            &format!("HOST:PORT of at most {MAX_ADDRESS} bytes"),
        );
    }
    match text.parse::<Address>() {
        Ok(address) if address.port() == 0 => {
            wrong(format!("{text:?}"), "a port that others can dial, not 0")
        }
        Ok(address) => Ok(address),
        Err(malformed) => wrong(format!("{text:?}"), malformed.expected()),
    }
}
