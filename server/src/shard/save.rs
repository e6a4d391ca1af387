//! Writes this server's slices of one version to a checkpoint while training continues.
//!
//! A save holds references to the version. A step that is applied meanwhile writes to new memory,
//! which counts in `--snapshot-bytes`. Where there is no room for a second copy of a slice, or no
//! memory, the save is given up, or the step waits until the slice is written, as the policy of the
//! job says. If the step waits, its gradient is reported afterwards or, if it has been reported
//! before the save began, the commands of the coordinator wait.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use zeroshard_checkpoint::{Part, Save, Source, Storage, write};
use zeroshard_kernels::Backend;
use zeroshard_model::{AppliedSteps, Error, OnMemoryShortage, Result};
use zeroshard_net::trace::SpanKind;
use zeroshard_proto::pb;
use zeroshard_shard::{
    budget::Budget,
    events::JobEvent,
    slice::{HeldSlice, Holds},
};

use super::{background, job::Job, store::Store};

/// How long a step waits for slices of which there is no second copy. The save is given up
/// afterwards: workers wait for the step, by default for 60 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause before another try to report a gradient that other readers prevent.
const PAUSE: Duration = Duration::from_millis(20);

/// Gives up the saves of a job from outside of the job's task, which may wait for one of them.
#[derive(Debug, Clone, Default)]
pub(super) struct SaveGate(Arc<Mutex<CancellationToken>>);

impl SaveGate {
    /// Gives up all saves, and those that begin before [`Self::open`].
    pub(super) fn close(&self) {
        self.token().cancel();
    }

    fn open(&self) {
        *self.token() = CancellationToken::new();
    }

    fn token(&self) -> MutexGuard<'_, CancellationToken> {
        self.0.lock().expect("no holder of the lock panics")
    }
}

/// The saves of a job on this server. When it is dropped, they are given up.
pub(super) struct Saves<B: Backend> {
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    /// This server's id in placements.
    server: u64,
    gate: SaveGate,
    /// The save that was begun last.
    current: Option<(u64, CancellationToken)>,
}

impl<B: Backend> Saves<B> {
    pub(super) fn new(store: Arc<Store<B>>, job: Arc<Job<B>>, server: u64, gate: SaveGate) -> Self {
        Self { store, job, server, gate, current: None }
    }

    /// The control stream has ended: nobody waits for a save of the last coordinator.
    pub(super) fn end_all(&mut self) {
        self.cancel_all();
        self.gate.open();
    }

    /// Begins a save of the current version. Returns when the next step can be applied.
    pub(super) async fn begin(&mut self, request: pb::WriteCheckpoint) {
        self.cancel_all();
        let cancelled = self.gate.token().child_token();
        self.current = Some((request.save, cancelled.clone()));
        let (snapshot, taken) =
            Snapshot::take(&self.job, request.version, self.store.snapshots.clone());
        let snapshot = Arc::new(snapshot);
        // The steps of these slices may be decided: the next commands must find memory for them.
        let mut waiting = snapshot.holds.waiting.subscribe();
        let urgent: Vec<u32> = waiting.borrow_and_update().keys().copied().collect();
        let (store, job, server) = (self.store.clone(), self.job.clone(), self.server);
        tokio::spawn(async move {
            let failure = store.failure.clone();
            let run = run(&job, server, &request, (snapshot, taken), cancelled);
            failure.guard("a save", run).await;
        });
        // The task of the save ends their waiting; with it, the sender is dropped.
        let none_waits =
            |slices: &BTreeMap<u32, Error>| !urgent.iter().any(|slice| slices.contains_key(slice));
        let _ = waiting.wait_for(none_waits).await;
    }

    /// Gives up a save.
    pub(super) fn cancel(&mut self, save: u64) {
        if self.current.as_ref().is_some_and(|(current, _)| *current == save) {
            self.cancel_all();
        }
    }

    /// Gives up all saves.
    fn cancel_all(&mut self) {
        if let Some((_, cancelled)) = self.current.take() {
            cancelled.cancel();
        }
    }
}

impl<B: Backend> Drop for Saves<B> {
    fn drop(&mut self) {
        self.cancel_all();
    }
}

/// Writes the snapshot, and reports it. A save that is given up removes its files.
async fn run<B: Backend>(
    job: &Arc<Job<B>>,
    server: u64,
    request: &pb::WriteCheckpoint,
    (snapshot, taken): (Arc<Snapshot<B>>, Result<()>),
    cancelled: CancellationToken,
) {
    let &pb::WriteCheckpoint { save, version, .. } = request;
    let span = job.trace_at(version).span("save", SpanKind::Internal);
    let mut span = span.with("zeroshard.version", version as i64);
    let saved = job.on_line(version);
    let save = Save { spec: Arc::new(job.spec.clone()), version: saved, save, server };
    let may_write = taken.and(check_owner(job, request).await);
    let writing =
        may_write.and_then(|()| start_writing(request.url.clone(), save.clone(), snapshot.clone()));
    let written = match writing {
        Ok(mut writing) => {
            let written = tokio::select! {
                biased;
                () = given_up(job, &cancelled) => Err(Error::Storage {
                    action: "write".to_owned(),
                    url: request.url.clone(),
                    cause: "the save was given up".to_owned(),
                }),
                shortage = snapshot.shortage(PATIENCE) => Err(shortage),
                never = snapshot.end_released() => match never {},
                written = &mut writing => written.unwrap_or_else(|error| {
                    Err(Error::Internal { cause: format!("the save ended: {error}") })
                }),
            };
            if !writing.is_finished() {
                // It must not create another file after its files have been removed.
                writing.abort();
                let _ = writing.await;
            }
            written
        }
        Err(error) => Err(error),
    };
    snapshot.end_all().await;
    if written.is_err()
        && let Ok(storage) = Storage::open(&request.url)
        && let Err(error) = storage.discard(&job.spec.name, saved, save.save).await
    {
        tracing::warn!(job = job.spec.name, version, %error, "a given up save was not removed");
    }
    let written = written.inspect_err(|error| span.fail(error));
    // The end of the span is that of the save, and not of the report.
    drop(span);
    report(job, request, written);
}

/// Checks that no other job has claimed the checkpoints meanwhile.
///
/// # Errors
/// Those of [`Storage::check_owner`].
async fn check_owner<B: Backend>(job: &Job<B>, request: &pb::WriteCheckpoint) -> Result<()> {
    Storage::open(&request.url)?.check_owner(&job.spec.name, job.id).await
}

/// Completes when a save is given up, or its job is closed.
async fn given_up<B: Backend>(job: &Job<B>, cancelled: &CancellationToken) {
    tokio::select! {
        () = cancelled.cancelled() => {}
        () = job.closed().cancelled() => {}
    }
}

/// Writes the slices of a snapshot, hashed, beside the steps of the job.
///
/// # Errors
/// [`Error::Internal`] if the threads cannot be started.
fn start_writing<B: Backend>(
    url: String,
    save: Save,
    snapshot: Arc<Snapshot<B>>,
) -> Result<JoinHandle<Result<Vec<pb::CheckpointFile>>>> {
    let writing = background::spawn(async move {
        let storage = Storage::open(&url)?;
        let slices = snapshot.held().keys().copied().collect();
        write(&storage, &save, slices, snapshot.clone()).await
    });
    writing.map_err(|error| Error::Internal { cause: format!("cannot start threads: {error}") })
}

/// Informs the coordinator about the end of a save.
fn report<B: Backend>(
    job: &Job<B>,
    request: &pb::WriteCheckpoint,
    written: Result<Vec<pb::CheckpointFile>>,
) {
    let save = request.save;
    match written {
        Ok(files) => job.tell_written(save, files),
        Err(error) => job.tell(JobEvent::SaveFailed { save, url: request.url.clone(), error }),
    }
}

/// One version of all slices of a job on this server.
struct Snapshot<B: Backend> {
    job: Arc<Job<B>>,
    held: Mutex<BTreeMap<u32, Arc<HeldSlice<B>>>>,
    /// The slices whose hold has not ended.
    left: Mutex<BTreeSet<u32>>,
    holds: Arc<Holds>,
}

impl<B: Backend> Snapshot<B> {
    /// Holds the version, which all slices have. If one of them does not have it, those before it
    /// are held.
    fn take(job: &Arc<Job<B>>, version: u64, budget: Arc<Budget>) -> (Self, Result<()>) {
        let holds = Holds::new(budget, version);
        let mut held = BTreeMap::new();
        let taken = job.primary_slices().try_for_each(|(index, slice)| {
            let slice = slice.hold(&job.spec.name, version, (index, &holds))?;
            held.insert(index, Arc::new(slice));
            Ok(())
        });
        let left = Mutex::new(held.keys().copied().collect());
        (Self { job: job.clone(), held: Mutex::new(held), left, holds }, taken)
    }

    /// Completes when the save is to be given up because a step waits for it, or has waited for
    /// `patience`, as the policy of the job says.
    async fn shortage(&self, patience: Duration) -> Error {
        let policy = self.job.spec.checkpoints.as_ref();
        let policy = policy.map_or_else(Default::default, |policy| policy.on_memory_shortage);
        let mut waiting = self.holds.waiting.subscribe();
        loop {
            let one_waits = waiting.wait_for(|slices| !slices.is_empty()).await;
            let reason = one_waits.ok().and_then(|slices| slices.values().next().cloned());
            let reason = reason.expect("one slice waits, and the sender is a part of the snapshot");
            if policy == OnMemoryShortage::GiveUp {
                return reason;
            }
            let none_waits = waiting.wait_for(BTreeMap::is_empty);
            if tokio::time::timeout(patience, none_waits).await.is_err() {
                return after_waiting(patience, reason);
            }
        }
    }

    /// Ends the hold of each slice as soon as nothing refers to its version.
    async fn end_released(&self) -> std::convert::Infallible {
        let mut released = self.holds.released.subscribe();
        loop {
            // The sender is a part of the snapshot.
            drop(released.wait_for(|slices| !slices.is_empty()).await);
            let slices = released.borrow().clone();
            for index in slices {
                self.end(index).await;
            }
        }
    }

    /// Ends the hold of a slice. A gradient that was not reported because of it is reported now.
    async fn end(&self, index: u32) {
        // If other readers hold the version as well, there may be no memory for another.
        while self.job.finish_save(index, &self.holds).is_err() && !self.job.closed().is_cancelled()
        {
            tokio::time::sleep(PAUSE).await;
        }
        self.left.lock().expect("no holder of the lock panics").remove(&index);
        self.holds.forget(index);
    }

    /// Ends the holds that are left. Parts of their slices may still be in transfer to the store.
    async fn end_all(&self) {
        self.held().clear();
        let left = self.left.lock().expect("no holder of the lock panics").clone();
        for index in left {
            self.end(index).await;
        }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<HeldSlice<B>>>> {
        self.held.lock().expect("no holder of the lock panics")
    }
}

/// The reason for giving up a save for which a step has waited.
fn after_waiting(patience: Duration, reason: Error) -> Error {
    match reason {
        Error::OutOfMemory { what, bytes } => Error::OutOfMemory {
            what: format!("{what}; a step has waited for the save for {patience:?}"),
            bytes,
        },
        other => other,
    }
}

impl<B: Backend> Source for Snapshot<B> {
    fn order(&self, slices: &mut [u32]) {
        let waiting = self.holds.waiting.borrow();
        slices.sort_by_key(|slice| !waiting.contains_key(slice));
    }

    fn part(&self, slice: u32, part: Part) -> Result<Bytes> {
        // Without the lock, because an array on disk is read.
        let held = self.held().get(&slice).cloned();
        let held = held.ok_or_else(|| Error::Internal {
            cause: format!("slice {slice} was released before it was written"),
        })?;
        held.part(part)
    }

    fn applied(&self, slice: u32) -> AppliedSteps {
        self.held().get(&slice).map(|held| held.applied).unwrap_or_default()
    }

    fn done(&self, slice: u32) {
        self.held().remove(&slice);
    }
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
