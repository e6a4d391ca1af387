//! Writes this server's slices of one version to a checkpoint while training continues.
//!
//! A save holds references to the version. A step that is applied meanwhile writes to new memory.
//! Where there is no memory for a second version of a slice, the step waits until the slice is
//! written: its gradient is reported afterwards or, if it has been reported before the save began,
//! the commands of the coordinator wait.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use zeroshard_checkpoint::{Part, Save, Source, Storage, write};
use zeroshard_proto::{AppliedSteps, Error, Result, pb};

use super::{background, events::JobEvent, job::Job, slice::HeldSlice, store::Store};
use crate::backend::Backend;

/// How long a step waits for slices without memory for a second version. The save is given up
/// afterwards.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause before another try to report a gradient that other readers prevent.
const PAUSE: Duration = Duration::from_millis(20);

/// The saves of a job on this server. When it is dropped, they are given up.
pub(super) struct Saves<B: Backend> {
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    /// This server's id in placements.
    server: u64,
    /// The save that was begun last.
    current: Option<(u64, CancellationToken)>,
}

impl<B: Backend> Saves<B> {
    pub(super) fn new(store: Arc<Store<B>>, job: Arc<Job<B>>, server: u64) -> Self {
        Self { store, job, server, current: None }
    }

    /// Begins a save of the current version. Returns when the next step can be applied.
    pub(super) async fn begin(&mut self, request: pb::WriteCheckpoint) {
        self.cancel_all();
        let cancelled = self.job.closed().child_token();
        self.current = Some((request.save, cancelled.clone()));
        let snapshot = match Snapshot::take(&self.job, request.version) {
            Ok(snapshot) => Arc::new(snapshot),
            Err(error) => return report(&self.job, &request, Err(error)),
        };
        let (mut urgent, watched) = (snapshot.urgent.subscribe(), cancelled.clone());
        let (store, job, server) = (self.store.clone(), self.job.clone(), self.server);
        tokio::spawn(async move {
            let failure = store.failure.clone();
            let run = run(&job, server, &request, snapshot, cancelled);
            failure.guard("a save", run).await;
        });
        let waited = tokio::time::timeout(PATIENCE, urgent.wait_for(BTreeSet::is_empty));
        if watched.run_until_cancelled(waited).await.is_some_and(|waited| waited.is_err()) {
            watched.cancel();
        }
    }

    /// Gives up a save.
    pub(super) fn cancel(&mut self, save: u64) {
        if self.current.as_ref().is_some_and(|(current, _)| *current == save) {
            self.cancel_all();
        }
    }

    /// Gives up all saves.
    pub(super) fn cancel_all(&mut self) {
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
    snapshot: Arc<Snapshot<B>>,
    cancelled: CancellationToken,
) {
    let &pb::WriteCheckpoint { save, version, .. } = request;
    let save = Save { spec: Arc::new(job.spec.clone()), version, save, server };
    let written = match start_writing(request.url.clone(), save.clone(), snapshot.clone()) {
        Ok(mut writing) => {
            let written = tokio::select! {
                written = &mut writing => Some(written.unwrap_or_else(|error| {
                    Err(Error::Internal { cause: format!("the save ended: {error}") })
                })),
                never = snapshot.release_written() => match never {},
                () = snapshot.stalled() => Some(Err(Error::OutOfMemory {
                    what: "a second version of slices that are being saved, which were not \
                           written within a minute"
                        .to_owned(),
                    bytes: 0,
                })),
                () = cancelled.cancelled() => None,
            };
            if !writing.is_finished() {
                // It must not create another file after its files have been removed.
                writing.abort();
                let _ = writing.await;
            }
            written
        }
        Err(error) => {
            Some(Err(Error::Internal { cause: format!("cannot start threads: {error}") }))
        }
    };
    let is_written = matches!(written, Some(Ok(_)));
    snapshot.release_all().await;
    if !is_written
        && let Ok(storage) = Storage::open(&request.url)
        && let Err(error) = storage.discard(&job.spec.name, version, save.save).await
    {
        tracing::warn!(job = job.spec.name, version, %error, "a given up save was not removed");
    }
    let given_up = || Error::Storage {
        action: "write".to_owned(),
        url: request.url.clone(),
        cause: "the save was given up".to_owned(),
    };
    report(job, request, written.unwrap_or_else(|| Err(given_up())));
}

/// Writes the slices of a snapshot, hashed, beside the steps of the job.
fn start_writing<B: Backend>(
    url: String,
    save: Save,
    snapshot: Arc<Snapshot<B>>,
) -> io::Result<JoinHandle<Result<Vec<pb::CheckpointFile>>>> {
    background::spawn(async move {
        let storage = Storage::open(&url)?;
        write(&storage, &save, snapshot.slices(), snapshot.clone()).await
    })
}

/// Informs the coordinator about the end of a save.
fn report<B: Backend>(
    job: &Job<B>,
    request: &pb::WriteCheckpoint,
    written: Result<Vec<pb::CheckpointFile>>,
) {
    let save = request.save;
    job.tell(match written {
        Ok(files) => JobEvent::Written { save, files },
        Err(error) => {
            let (url, reason) = match error {
                Error::Storage { url, cause, .. } => (url, cause),
                other => (request.url.clone(), other.to_string()),
            };
            JobEvent::SaveFailed { save, url, reason }
        }
    });
}

/// One version of all slices of a job on this server.
struct Snapshot<B: Backend> {
    job: Arc<Job<B>>,
    held: Mutex<BTreeMap<u32, HeldSlice<B>>>,
    /// Slices for which a decided step would have to wait.
    urgent: watch::Sender<BTreeSet<u32>>,
    /// Slices that are written and not released yet.
    written: watch::Sender<BTreeSet<u32>>,
}

impl<B: Backend> Snapshot<B> {
    /// Holds the version, which all slices have.
    fn take(job: &Arc<Job<B>>, version: u64) -> Result<Self> {
        let mut held = BTreeMap::new();
        for (index, slice) in job.primary_slices() {
            match slice.hold(job.backend(), &job.spec.name, version) {
                Ok(slice) => drop(held.insert(index, slice)),
                Err(error) => {
                    held.clear();
                    let before = job.primary_slices().take_while(|(other, _)| *other < index);
                    before.for_each(|(other, _)| {
                        drop(job.finish_save(other));
                    });
                    return Err(error);
                }
            }
        }
        let urgent = held.iter().filter(|(_, slice)| slice.is_urgent).map(|(&index, _)| index);
        let urgent = watch::Sender::new(urgent.collect());
        let written = watch::Sender::default();
        Ok(Self { job: job.clone(), held: Mutex::new(held), urgent, written })
    }

    /// The slices in the order in which they are written: those that are waited for come first.
    fn slices(&self) -> Vec<u32> {
        let held = self.held();
        let (mut first, rest): (Vec<u32>, Vec<u32>) =
            held.keys().partition(|index| held[index].is_urgent);
        first.extend(rest);
        first
    }

    /// Releases each slice as soon as it is written.
    async fn release_written(&self) -> std::convert::Infallible {
        let mut written = self.written.subscribe();
        loop {
            // The sender is a part of the snapshot.
            drop(written.wait_for(|slices| !slices.is_empty()).await);
            let slices = written.borrow().clone();
            for index in slices {
                self.written.send_modify(|slices| _ = slices.remove(&index));
                self.release(index).await;
            }
        }
    }

    /// Completes when a step waits for slices, and none has been written for [`PATIENCE`].
    async fn stalled(&self) {
        let mut left = None;
        loop {
            tokio::time::sleep(PATIENCE).await;
            let waits = self.job.slices().any(|(_, slice)| slice.waits_for_save());
            let now = waits.then(|| self.held().len());
            if now.is_some() && now == left {
                return;
            }
            left = now;
        }
    }

    /// Releases a slice. A gradient that was not reported because of it is reported now.
    async fn release(&self, index: u32) {
        self.held().remove(&index);
        // The bytes that are being written, or another reader, may still need the memory.
        while self.job.finish_save(index).is_err() && !self.job.closed().is_cancelled() {
            tokio::time::sleep(PAUSE).await;
        }
        self.urgent.send_modify(|slices| _ = slices.remove(&index));
    }

    /// Releases all slices that are left.
    async fn release_all(&self) {
        let written = self.written.send_replace(BTreeSet::new());
        let left: BTreeSet<u32> = self.held().keys().copied().chain(written).collect();
        for index in left {
            self.release(index).await;
        }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<u32, HeldSlice<B>>> {
        self.held.lock().expect("no holder of the lock panics")
    }
}

impl<B: Backend> Source for Snapshot<B> {
    fn part(&self, slice: u32, part: Part) -> Result<Bytes> {
        let held = self.held();
        let slice = held.get(&slice).ok_or_else(|| Error::Internal {
            cause: format!("slice {slice} was released before it was written"),
        })?;
        Ok(slice.part(self.job.backend(), part))
    }

    fn applied(&self, slice: u32) -> AppliedSteps {
        self.held().get(&slice).map(|held| held.applied).unwrap_or_default()
    }

    fn done(&self, slice: u32) {
        self.written.send_modify(|slices| _ = slices.insert(slice));
    }
}
