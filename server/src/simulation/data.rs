//! What servers send and receive besides commands: parameters, gradients, and the content of
//! slices.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use zeroshard_changes::Known;
use zeroshard_kernels::Cpu;
use zeroshard_model::{AppliedSteps, Attempt, DType, Error, Result};
use zeroshard_proto::pb;
use zeroshard_shard::{
    round::Chunk,
    slice::{Slice, Upload},
    state_selector::StateSelector,
};

use super::{
    follow,
    reader::Round,
    server::Copy,
    world::{Happening, World},
};
use crate::shard::{content::Content, job::Job};

/// The interval at which a request that has to wait is tried again.
const WAIT: Duration = Duration::from_millis(1);
/// How often it is tried.
const TRIES: u32 = 20;
/// How often a reader's request is tried. It may wait longer than others.
const READER_TRIES: u32 = 6;

/// Who has sent a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    Worker {
        rank: u32,
        life: u64,
    },
    Server {
        server: usize,
        life: u64,
    },
    /// `at`: the position of the server among those that the reader asks.
    Reader {
        round: Round,
        at: usize,
    },
}

/// A request to a server, about one slice, or a reader's.
#[derive(Debug, Clone)]
pub(super) enum Request {
    /// Initial parameters.
    Upload { job: u64, server: u64, lease: u64, epoch: u64, slice: u32, chunk: Chunk },
    /// Parameters at a version.
    Pull { job: u64, epoch: u64, version: u64, slice: u32 },
    /// A part of a gradient.
    Push { job: u64, lease: u64, attempt: Attempt, slice: u32, chunk: Chunk },
    /// A part of the new values of a slice.
    Replace { job: u64, server: u64, lease: u64, attempt: Attempt, slice: u32, chunk: Chunk },
    /// The reduced gradient, from an element on.
    Reduced { job: u64, attempt: Attempt, slice: u32, offset: usize },
    /// The whole content at a version.
    Copy { job: u64, number: u64, version: u64, slice: u32 },
    /// The changes since a version.
    Changes(Box<pb::ChangesRequest>),
    /// The parameters at a version, each slice in a dtype.
    Pin { job: u64, line: u64, version: u64, slices: Vec<(u32, DType)> },
    /// The parameters at the version of a mirror.
    MirrorCopy { job: u64, line: u64, slice: u32 },
}

/// The content of an answer.
#[derive(Debug, Clone)]
pub(super) enum Payload {
    Done,
    Values(Bytes),
    Slice(Vec<Bytes>, AppliedSteps),
    Known(Known),
    Pinned(BTreeMap<u32, Bytes>),
    MirrorSlice { slice: u32, version: u64, values: Bytes },
}

pub(super) type Answer = Result<Payload, Box<Error>>;

impl Request {
    fn job(&self) -> u64 {
        match self {
            Self::Upload { job, .. }
            | Self::Pull { job, .. }
            | Self::Push { job, .. }
            | Self::Replace { job, .. }
            | Self::Reduced { job, .. }
            | Self::Copy { job, .. }
            | Self::Pin { job, .. }
            | Self::MirrorCopy { job, .. } => *job,
            Self::Changes(request) => request.job_id,
        }
    }

    /// The answer of a job; `None`: later.
    fn answer(&self, job: &Job<Cpu>) -> Result<Option<Payload>> {
        match self {
            Self::Upload { lease, epoch, slice, chunk, .. } => {
                job.check_lease(chunk.rank, *lease)?;
                let attempt = Attempt::first(*epoch, 0);
                if attempt.epoch > job.epoch() {
                    return Ok(None);
                }
                let upload = Upload { state: None, applied: AppliedSteps::default() };
                job.upload(attempt, *slice, upload, chunk)?;
                Ok(Some(Payload::Done))
            }
            Self::Pull { epoch, version, slice, .. } => {
                let of = job.primary_slice(*slice)?;
                job.check_epoch(*epoch)?;
                let content =
                    Content { version: *version, part: StateSelector::Parameters, attempt: None };
                let values = content
                    .read(job, of)?
                    .map(|buffer| of.values(content.part, &buffer, 0..of.spec.numel, DType::F32));
                Ok(values.transpose()?.map(Payload::Values))
            }
            Self::Push { lease, attempt, slice, chunk, .. } => {
                job.check_lease(chunk.rank, *lease)?;
                let current = job.attempt();
                if *attempt > current && attempt.step <= current.step + 1
                    || job.slice(*slice)?.version().is_none_or(|at| at < attempt.step)
                {
                    return Ok(None);
                }
                job.contribute(*attempt, *slice, chunk)?;
                Ok(Some(Payload::Done))
            }
            Self::Replace { lease, attempt, slice, chunk, .. } => {
                job.check_lease(chunk.rank, *lease)?;
                let current = job.attempt();
                if *attempt < current {
                    return Err(attempt.refusal(&job.spec.name, current));
                }
                let is_early = job.is_to_copy(*slice);
                if *attempt > current
                    || !is_early && job.slice(*slice)?.version() < Some(attempt.step)
                {
                    return Ok(None);
                }
                job.replace(*attempt, *slice, chunk)?;
                Ok(Some(Payload::Done))
            }
            Self::Reduced { attempt, slice, offset, .. } => {
                let of = job.primary_slice(*slice)?;
                let sum = of.reduced_of(&job.spec.name, *attempt)?;
                let values = sum.map(|sum| {
                    let rest = *offset..of.spec.numel;
                    of.values(StateSelector::GradientSum, &sum, rest, DType::F32)
                });
                Ok(values.transpose()?.map(Payload::Values))
            }
            Self::Copy { version, slice, .. } => {
                let content = whole(job, *version, *slice)?;
                Ok(content.map(|(values, applied)| Payload::Slice(values, applied)))
            }
            Self::Pin { line, version, slices, .. } => {
                follow::pinned(job, (*line, *version), slices)
            }
            Self::Changes(_) => unreachable!("the server answers it"),
            Self::MirrorCopy { .. } => unreachable!("the mirror answers it"),
        }
    }

    /// How often it is tried, and how much longer than others it waits between two tries.
    pub(super) fn tries(&self) -> (u32, u32) {
        match self {
            Self::Changes(_) | Self::Pin { .. } | Self::MirrorCopy { .. } => {
                (READER_TRIES, TRIES / READER_TRIES)
            }
            _ => (TRIES, 1),
        }
    }
}

/// The parts of a slice that a copy has.
fn parts(slice: &Slice<Cpu>) -> Vec<StateSelector> {
    let states = slice.state_parts().chain(slice.average_parts()).map(|(_, part)| part);
    [StateSelector::Master].into_iter().chain(states).collect()
}

/// The whole content of a slice at a version; `None`: later.
pub(super) fn whole(
    job: &Job<Cpu>,
    version: u64,
    index: u32,
) -> Result<Option<(Vec<Bytes>, AppliedSteps)>> {
    let slice = job.primary_slice(index)?;
    let mut values = Vec::new();
    for part in parts(slice) {
        let content = Content { version, part, attempt: None };
        let Some(buffer) = content.read(job, slice)? else { return Ok(None) };
        values.push(slice.values(part, &buffer, 0..slice.spec.numel, DType::F32)?);
    }
    Ok(Some((values, slice.applied(&job.spec.name, version)?)))
}

impl World {
    pub(super) fn requested(
        &mut self,
        server: usize,
        life: u64,
        from: Sender,
        (mut request, tries): (Request, u32),
    ) {
        let (most, longer) = request.tries();
        let of = &self.servers[server];
        let is_there = of.is_alive && of.life == life;
        let job = of.jobs.get(&request.job()).filter(|_| is_there).map(|of| of.job.clone());
        let answer = match (is_there, job) {
            (false, _) => {
                let peer = format!("shard server {server}");
                Err(Error::Unavailable { peer, cause: "connection refused".to_owned() })
            }
            (true, None) => Err(Error::UnknownJob { job: "job".to_owned() }),
            (true, Some(job)) => match self.answer(server, &job, &mut request, tries == most) {
                // The caller repeats it.
                Ok(None) if tries == most => return,
                Ok(None) => {
                    let tries = tries + 1;
                    let again = Happening::Request { server, life, from, request, tries };
                    let wait = WAIT * longer * self.rng.u32(1..8);
                    return self.after(wait, again);
                }
                Ok(Some(content)) => {
                    self.check_visible(server, &job, (&request, &content));
                    Ok(content)
                }
                Err(error) => Err(error),
            },
        };
        if is_there {
            self.flush(server);
        }
        let answer = answer.map_err(Box::new);
        if !self.faults.loses(&mut self.rng) {
            self.later(Happening::Answered { to: from, request, answer });
        }
    }

    /// The answer of a server; `None`: later. `is_last`: the request will not be tried again.
    fn answer(
        &mut self,
        server: usize,
        job: &Arc<Job<Cpu>>,
        request: &mut Request,
        is_last: bool,
    ) -> Result<Option<Payload>> {
        match request {
            Request::Changes(request) => self.changes(server, job, request, is_last),
            request => request.answer(job),
        }
    }

    pub(super) fn answered(&mut self, to: Sender, request: Request, answer: Answer) {
        match to {
            Sender::Worker { rank, life } => self.worker_answered(rank, life, request, answer),
            Sender::Reader { round, at } => self.reader_answered(round, at, answer),
            Sender::Server { server, life } => {
                let of = &mut self.servers[server];
                if of.life == life && of.is_alive {
                    self.receive(server, &request, answer);
                    self.flush(server);
                }
            }
        }
    }

    /// A backup receives what it has requested.
    fn receive(&mut self, server: usize, request: &Request, answer: Answer) {
        let of = &mut self.servers[server];
        let Some(running) = of.jobs.get_mut(&request.job()) else { return };
        let job = running.job.clone();
        let stored = match (request, answer) {
            (Request::Reduced { attempt, slice, offset, .. }, Ok(Payload::Values(values))) => {
                let at = job.slice(*slice).ok().and_then(Slice::version);
                match at == Some(attempt.step) {
                    true => job.store_reduced(*attempt, *slice, *offset, &values),
                    false => Ok(()),
                }
            }
            (Request::Copy { number, slice, .. }, Ok(Payload::Slice(values, applied))) => {
                let copy = running.copy.as_mut().filter(|copy| copy.number == *number);
                copy.map_or(Ok(()), |copy| store_copy(&job, copy, *slice, &values, applied))
            }
            // A request that failed is repeated.
            _ => Ok(()),
        };
        running.end_copy();
        if let Err(error) = stored {
            self.fail(format!("server {server}: {error}"));
        }
    }
}

fn store_copy(
    job: &Job<Cpu>,
    copy: &mut Copy,
    index: u32,
    values: &[Bytes],
    applied: AppliedSteps,
) -> Result<()> {
    if !copy.missing.contains(&index) {
        return Ok(());
    }
    let slice = job.slice(index)?;
    for (part, values) in parts(slice).into_iter().zip(values) {
        slice.fill(part, 0, values)?;
    }
    if slice.group.is_some() {
        slice.set_applied(applied);
    }
    copy.missing.retain(|&missing| missing != index);
    match copy.missing.is_empty() {
        true => copy.slices.iter().try_for_each(|&i| job.slice(i)?.end_copy()),
        false => Ok(()),
    }
}
