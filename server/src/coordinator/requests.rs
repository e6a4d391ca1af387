//! Checks requests and converts them into events.

use std::time::Duration;

use bytes::Bytes;
use tonic::Request;
use zeroshard_coordinator::vocabulary::{
    calls::{Commit, Create, Discard, LinkReport, RankData, Reduce, Rest, Save, Turn},
    ids::{JobRef, Lease},
};
use zeroshard_model::{
    Attempt, Error, Fork, JobSpec, Restore, Result,
    checkpoint::{MAX_USER_DATA, check_url},
    quota::Holder,
};
use zeroshard_net::Deadline;
use zeroshard_proto::{convert::optimizers, pb};

use crate::config::{Address, MAX_WAIT};

/// The maximum length of the address of a server or worker, in bytes: the longest DNS name, and a
/// port.
const MAX_ADDRESS: usize = 253 + 6;

/// The waiting times of callers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    /// For callers that do not specify one.
    pub(crate) default: Duration,
    /// The time after which a worker that disconnected without notice is certainly detected; no
    /// Join waits longer for its rank.
    pub(crate) rank: Duration,
}

impl Waits {
    /// The deadline of a call: its own deadline or the default, and at most [`MAX_WAIT`].
    pub(super) fn of<T>(&self, request: &Request<T>) -> Deadline {
        let of_call = Deadline::of_call(request.metadata().as_ref());
        of_call.unwrap_or_else(|| Deadline::after(self.default)).at_most(MAX_WAIT)
    }

    /// The waiting time of a Join.
    pub(super) fn of_join(&self, wait_ms: u32) -> Duration {
        match Duration::from_millis(wait_ms.into()) {
            Duration::ZERO => self.default,
            wait => wait.min(MAX_WAIT),
        }
    }

    pub(super) fn commit(&self, request: Request<pb::CommitRequest>) -> Result<Commit> {
        let wait = self.of(&request).left();
        let request = request.into_inner();
        let pb::CommitRequest {
            turn,
            groups,
            loss_scale,
            max_norm,
            loss,
            gradient_factors,
            written,
            user_data,
            user_data_follows,
        } = request;
        let turn = self::turn(turn)?;
        Ok(Commit {
            groups: if groups.is_empty() { None } else { Some(optimizers(groups)?) },
            loss_scale: self::loss_scale(loss_scale, &turn)?,
            max_norm: max_norm.map(|norm| positive("max_norm", norm, &turn)).transpose()?,
            loss,
            gradient_factors,
            written,
            user_data: self::user_data(user_data, turn.rank, turn.attempt.step)?,
            user_data_follows,
            turn,
            wait,
        })
    }

    pub(super) fn reduce(&self, request: Request<pb::ReduceRequest>) -> Result<Reduce> {
        let wait = self.of(&request).left();
        let pb::ReduceRequest { turn, loss_scale } = request.into_inner();
        let turn = self::turn(turn)?;
        Ok(Reduce { loss_scale: self::loss_scale(loss_scale, &turn)?, turn, wait })
    }

    pub(super) fn discard(&self, request: Request<pb::DiscardRequest>) -> Result<Discard> {
        let wait = self.of(&request).left();
        Ok(Discard { turn: turn(request.into_inner().turn)?, wait })
    }

    pub(super) fn rest(&self, request: Request<pb::RestRequest>) -> Result<Rest> {
        let wait = self.of(&request).left();
        let pb::RestRequest { turn, excluded } = request.into_inner();
        Ok(Rest { turn: self::turn(turn)?, excluded, wait })
    }

    pub(super) fn save(&self, request: Request<pb::SaveCheckpointRequest>) -> Result<Save> {
        let wait = self.of(&request).left();
        let pb::SaveCheckpointRequest { job: name, job_id: id, url, unless_saved } =
            request.into_inner();
        let url = Some(url).filter(|url| !url.is_empty());
        url.as_deref().map_or(Ok(()), check_url)?;
        Ok(Save { job: JobRef { name, id }, url, unless_saved, wait })
    }

    /// Checks a request to rewind a job, and returns it with the time that its caller waits.
    pub(super) fn rewind(
        &self,
        request: Request<pb::RewindJobRequest>,
    ) -> Result<(Duration, pb::RewindJobRequest)> {
        let wait = self.of(&request).left();
        let request = request.into_inner();
        if !request.url.is_empty() {
            check_url(&request.url)?;
        }
        Ok((wait, request))
    }
}

/// The report of a rank that cannot reach a server.
///
/// # Errors
/// [`Error::Refused`] if the rank or the server is absent.
pub(super) fn link(request: pb::ReportLinkRequest) -> Result<LinkReport> {
    let absent = || Error::refused("the request has no `server`");
    let pb::ReportLinkRequest { turn, server, cause } = request;
    let pb::Server { id: server, incarnation, .. } = server.ok_or_else(absent)?;
    Ok(LinkReport { turn: self::turn(turn)?, server, incarnation, cause })
}

fn turn(message: Option<pb::Turn>) -> Result<Turn> {
    let absent = || Error::refused("the request has no `turn`");
    let pb::Turn { job: name, job_id: id, lease, epoch, rank, step, attempt: number } =
        message.ok_or_else(absent)?;
    let (job, attempt) = (JobRef { name, id }, Attempt { epoch, step, number });
    Ok(Turn { job, lease: Lease(lease), rank, attempt })
}

pub(super) fn rank_data(request: pb::SendUserDataRequest) -> Result<RankData> {
    let pb::SendUserDataRequest { job: name, job_id: id, lease, rank, version, user_data } =
        request;
    let data = self::user_data(user_data, rank, version.saturating_sub(1))?;
    Ok(RankData { job: JobRef { name, id }, rank, lease: Lease(lease), version, data })
}

/// The data of a worker that continues its lease.
pub(super) fn attached_data(request: &mut pb::JoinRequest) -> Result<Option<(u64, Bytes)>> {
    let (version, data) = (request.user_data_version, std::mem::take(&mut request.user_data));
    let data = user_data(data, request.rank, version.saturating_sub(1))?;
    Ok(Some((version, data)).filter(|(_, data)| !data.is_empty()))
}

fn user_data(data: Bytes, rank: u32, step: u64) -> Result<Bytes> {
    if data.len() <= MAX_USER_DATA {
        return Ok(data);
    }
    let what = format!("size of user_data of rank {rank} at step {step}");
    Err(Error::invalid(what, data.len(), format!("at most {MAX_USER_DATA} bytes")))
}

/// An absent loss scale means 1.
fn loss_scale(loss_scale: f64, turn: &Turn) -> Result<f64> {
    positive("loss_scale", if loss_scale == 0.0 { 1.0 } else { loss_scale }, turn)
}

fn positive(what: &str, number: f64, turn: &Turn) -> Result<f64> {
    if number.is_finite() && number > 0.0 {
        return Ok(number);
    }
    Err(Error::invalid(
        format!("{what} of rank {} at step {}", turn.rank, turn.attempt.step),
        number,
        "finite and greater than 0",
    ))
}

/// The job that is to be created. Its cost grows with the request: call it on a thread that may
/// block.
pub(super) fn create(request: pb::CreateJobRequest, holder: Option<Holder>) -> Result<Create> {
    let pb::CreateJobRequest { spec, from, fresh_state, restore } = request;
    let fork = match from {
        Some(from) => Some(Fork { from: from.try_into()?, fresh_state }),
        None if fresh_state => {
            return Err(Error::refused("`fresh_state` is set without `from`"));
        }
        None => None,
    };
    let restore = restore.map(Restore::try_from).transpose()?;
    if fork.is_some() && restore.is_some() {
        return Err(Error::refused("both `from` and `restore` are set; leave out one of the two"));
    }
    let spec = job_spec(spec)?;
    let quota = holder.map(|holder| (holder, spec.required_with_replicas().bytes));
    Ok(Create { spec, fork, restore, quota })
}

fn job_spec(spec: Option<pb::JobSpec>) -> Result<JobSpec> {
    let spec = spec.ok_or_else(|| Error::refused("the request has no `spec`"))?;
    JobSpec::try_from(spec)
}

/// Checks an address that other processes dial.
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
            wrong(format!("{text:?}"), "an address with a port other than 0")
        }
        Ok(address) => Ok(address),
        Err(malformed) => wrong(format!("{text:?}"), malformed.expected()),
    }
}
