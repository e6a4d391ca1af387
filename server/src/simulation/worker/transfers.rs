//! What a worker sends to and receives from the servers: parameters and gradients.

use bytes::Bytes;
use zeroshard_coordinator::vocabulary::ids::Lease;
use zeroshard_model::{DType, Error, Server};
use zeroshard_shard::round::Chunk;

use super::Worker;
use crate::simulation::{
    data::{Answer, Payload, Request, Sender},
    world::{Happening, World, spec},
};

/// The gradient of a rank for an element, and what a doomed process sends.
fn gradient(rank: u32, batch: u64, slice: u32, element: usize, is_doomed: bool) -> f32 {
    let mixed =
        (u64::from(rank) * 31 + batch * 17 + u64::from(slice) * 7 + element as u64 * 3) % 101;
    if is_doomed { 1000.0 + mixed as f32 } else { mixed as f32 / 64.0 - 0.75 }
}

/// The new value of an element that does not train, and what a doomed process sends.
fn new_value(step: u64, slice: u32, element: usize, is_doomed: bool) -> f32 {
    let value = step as f32 + slice as f32 / 8.0 + element as f32 / 64.0;
    if is_doomed { 1000.0 + value } else { value }
}

fn bytes(values: impl Iterator<Item = f32>) -> Bytes {
    values.flat_map(f32::to_le_bytes).collect()
}

impl World {
    /// The slices: number, number of elements, and whether they train.
    pub(in crate::simulation) fn slices(&self) -> Vec<(u32, usize, bool)> {
        let manifest = spec(self.size).manifest;
        let slices = (0u32..).zip(manifest.slices());
        slices.map(|(index, of)| (index, of.numel, manifest.trains(index as usize))).collect()
    }

    /// The servers of a slice, its primary first.
    fn owners(&self, rank: u32, slice: u32) -> Vec<Server> {
        let Some(placement) = &self.workers[rank as usize].placement else { return Vec::new() };
        let owners = placement.owners(slice as usize).iter();
        owners.map(|&owner| placement.servers()[owner as usize].clone()).collect()
    }

    /// The batch of the open step of a worker.
    fn batch(&self, worker: &Worker) -> u64 {
        self.reference.as_ref().unwrap_or(&worker.line).batch(worker.step)
    }

    fn ask(&mut self, rank: u32, kind: (u8, u32, u64), to: &Server, request: Request) {
        let now = self.now;
        let worker = &mut self.workers[rank as usize];
        if worker.is_due(kind, now) {
            let from = Sender::Worker { rank, life: worker.life };
            self.request(to, from, request);
        }
    }

    pub(super) fn upload(&mut self, rank: u32) {
        if rank != 0 {
            return;
        }
        for (slice, numel, _) in self.slices() {
            for owner in self.owners(rank, slice) {
                let worker = &self.workers[rank as usize];
                if worker.uploaded.contains(&(slice, owner.id)) {
                    continue;
                }
                let values = (0..numel).map(|element| slice as f32 + element as f32 / 8.0);
                let chunk = Chunk { rank, offset: 0, dtype: DType::F32, bytes: bytes(values) };
                let (job, epoch) = (worker.job, worker.epoch);
                let Lease(lease) = worker.lease.expect("it has joined");
                let server = owner.id;
                let request = Request::Upload { job, server, lease, epoch, slice, chunk };
                self.ask(rank, (0, slice, server), &owner, request);
            }
        }
    }

    pub(super) fn pull(&mut self, rank: u32, version: u64) {
        for (slice, ..) in self.slices() {
            let worker = &self.workers[rank as usize];
            let known = if version == worker.step { &worker.pulled } else { &worker.pulled_next };
            if known.contains(&slice) {
                continue;
            }
            let (job, epoch) = (worker.job, worker.epoch);
            let Some(primary) = self.owners(rank, slice).into_iter().next() else { return };
            let request = Request::Pull { job, epoch, version, slice };
            self.ask(rank, (1, slice, version), &primary, request);
        }
    }

    /// Pushes what is missing. Returns whether everything has been pushed.
    pub(super) fn push(&mut self, rank: u32) -> bool {
        let mut is_complete = true;
        for (slice, numel, trains) in self.slices() {
            // Two parts, in any order.
            let middle = numel / 2;
            for range in [0..middle, middle..numel] {
                let (worker, offset) = (&self.workers[rank as usize], range.start);
                if !trains || range.is_empty() || worker.pushed.contains(&(slice, offset)) {
                    continue;
                }
                is_complete = false;
                let (batch, is_doomed) = (self.batch(worker), worker.is_doomed);
                let is_spike = self.spikes.get(&batch) == Some(&rank);
                let factor = if is_spike { 1e6 } else { 1.0 };
                let values = range.map(|at| factor * gradient(rank, batch, slice, at, is_doomed));
                let chunk = Chunk { rank, offset, dtype: DType::F32, bytes: bytes(values) };
                let (job, attempt) = (worker.job, worker.attempt());
                let Lease(lease) = worker.lease.expect("it has joined");
                let request = Request::Push { job, lease, attempt, slice, chunk };
                let Some(primary) = self.owners(rank, slice).into_iter().next() else {
                    return false;
                };
                self.ask(rank, (2, slice, offset as u64), &primary, request);
            }
        }
        is_complete
    }

    /// Sends new values of the slices that do not train to all of their servers, in every second
    /// step. Returns whether all have been sent.
    pub(super) fn replace(&mut self, rank: u32) -> bool {
        let (step, is_doomed) = {
            let worker = &self.workers[rank as usize];
            (worker.step, worker.is_doomed)
        };
        if rank != 0 || step % 2 == 0 {
            return true;
        }
        let mut is_complete = true;
        for (slice, numel, trains) in self.slices() {
            for owner in self.owners(rank, slice) {
                // Two parts, in any order.
                for range in [0..numel / 2, numel / 2..numel] {
                    let (worker, offset) = (&self.workers[rank as usize], range.start);
                    let part = (slice, offset, owner.id);
                    if trains || range.is_empty() || worker.replaced.contains(&part) {
                        continue;
                    }
                    is_complete = false;
                    let values = range.map(|at| new_value(step, slice, at, is_doomed));
                    let chunk = Chunk { rank, offset, dtype: DType::F32, bytes: bytes(values) };
                    let (job, attempt, server) = (worker.job, worker.attempt(), owner.id);
                    let Lease(lease) = worker.lease.expect("it has joined");
                    let request = Request::Replace { job, server, lease, attempt, slice, chunk };
                    self.ask(rank, (3, slice, offset as u64 * 100 + server), &owner, request);
                }
            }
        }
        is_complete
    }

    pub(in crate::simulation) fn worker_answered(
        &mut self,
        rank: u32,
        life: u64,
        request: Request,
        answer: Answer,
    ) {
        let worker = &mut self.workers[rank as usize];
        if worker.life != life || !worker.is_alive {
            return;
        }
        let (epoch, step) = (worker.epoch, worker.step);
        match (request, answer) {
            (Request::Upload { epoch: of, slice, server, .. }, Ok(_)) if of == epoch => {
                worker.uploaded.insert((slice, server));
            }
            (Request::Pull { epoch: of, version, slice, .. }, Ok(Payload::Values(values))) => {
                let batches = self.batches(&self.line_in(of), version);
                let outcome = self.record.pulled(batches, slice, &values);
                self.check(outcome);
                let worker = &mut self.workers[rank as usize];
                if version == step {
                    worker.pulled.insert(slice);
                } else if version == step + 1 {
                    worker.pulled_next.insert(slice);
                }
            }
            (Request::Push { attempt, slice, chunk, .. }, Ok(_)) if attempt == worker.attempt() => {
                worker.pushed.insert((slice, chunk.offset));
            }
            (Request::Replace { attempt, slice, chunk, server, .. }, Ok(_))
                if attempt == worker.attempt() =>
            {
                worker.replaced.insert((slice, chunk.offset, server));
            }
            (request, Err(error)) => self.refused_request(rank, &request, *error),
            _ => {}
        }
        self.later(Happening::Wake { rank, life, again: false });
    }

    /// An error of a server. The request is repeated after a while, unless the error is final.
    fn refused_request(&mut self, rank: u32, request: &Request, error: Error) {
        let worker = &mut self.workers[rank as usize];
        let is_early = matches!(request, Request::Replace { .. });
        match error {
            // A server keeps new values of a slice that it is to copy.
            error @ Error::NotHere { .. } if is_early => {
                self.fail(format!("{request:?} of rank {rank}: {error}"));
            }
            Error::Unavailable { .. }
            | Error::UnknownJob { .. }
            | Error::NotHere { .. }
            | Error::LeaseLost { .. } => {}
            Error::StaleEpoch { current, .. } if current > worker.epoch => {
                worker.wait_for_epoch(current);
            }
            Error::StepMismatch { step, current, .. } if step == worker.step && current > step => {
                worker.is_decided = true;
            }
            Error::StaleEpoch { .. } | Error::StepMismatch { .. } => {}
            // A repeated request arrives late.
            Error::VersionGone { version, .. }
                if version < worker.step || worker.has(request) || worker.is_stale(request) => {}
            error => self.fail(format!("{request:?} of rank {rank}: {error}")),
        }
    }
}
