//! The events that this server sends to the coordinator, in order and with bounded memory.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use zeroshard_model::{Attempt, Error};
use zeroshard_proto::pb::{self, serve_request::Event};
use zeroshard_shard::{events::JobEvent, job::Ready, round::Absent, slice::Reduced};

/// The maximum number of events that wait to be sent: a few for each step of each job.
const MAX_EVENTS: usize = 1 << 14;

/// The maximum number of failed jobs that are remembered.
const MAX_FAILED: usize = 64;

/// Converts an event to a message about the job with this name and id.
fn message(event: JobEvent, job: String, job_id: u64) -> Event {
    match event {
        JobEvent::Opened { epoch } => Event::Opened(pb::JobOpened { job, job_id, epoch }),
        JobEvent::Initialised { epoch } => {
            Event::Initialised(pb::JobInitialised { job, job_id, epoch })
        }
        JobEvent::Granted { rank, lease } => {
            Event::Granted(pb::LeaseGranted { job, job_id, rank, lease })
        }
        JobEvent::Ready { attempt, reduced } => {
            Event::Ready(step_ready(job, job_id, attempt, reduced))
        }
        JobEvent::Stored { epoch, step } => {
            Event::Stored(pb::DecisionStored { job, job_id, epoch, step })
        }
        JobEvent::Copied { number } => Event::Copied(pb::SlicesCopied { job, job_id, number }),
        JobEvent::CopyRefused { number, reason } => {
            Event::CopyRefused(pb::CopyRefused { job, job_id, number, reason })
        }
        JobEvent::Hashes { epoch, version, slices } => {
            let hash = |(slice, hash)| pb::SliceHash { slice, hash };
            let slices = slices.into_iter().map(hash).collect();
            Event::Hashes(pb::SliceHashes { job, job_id, epoch, version, slices })
        }
        JobEvent::SaveFailed { save, url, error } => {
            let (url, reason, missing_bytes) = match error {
                Error::Storage { url, cause, .. } => (url, cause, 0),
                Error::OutOfMemory { what, bytes } => (url, what, bytes),
                other => (url, other.to_string(), 0),
            };
            let failed = pb::CheckpointFailed { job, job_id, save, reason, url, missing_bytes };
            Event::CheckpointFailed(failed)
        }
        JobEvent::Failed { epoch, reason, transient } => {
            Event::Failed(pb::JobFailed { job, job_id, epoch, reason, transient })
        }
    }
}

/// The message about complete gradients of an attempt.
pub(super) fn step_ready(
    job: String,
    job_id: u64,
    attempt: Attempt,
    ready: Ready,
) -> pb::StepReady {
    let Ready { slices: mut reduced, copies } = ready;
    reduced.sort_unstable_by_key(|&(slice, _)| slice);
    let slice = |&(slice, Reduced { sum_of_squares, largest, .. }): &(u32, Reduced)| {
        let largest_rank = largest.map(|of| of.rank);
        let largest_squares = largest.map_or(0.0, |of| of.squares);
        pb::ReducedSlice { slice, sum_of_squares, largest_rank, largest_squares }
    };
    let overflow = |&(slice, reduced): &(u32, Reduced)| {
        reduced.overflow.map(|rank| pb::Overflow { slice, rank })
    };
    let absent = |&(slice, reduced): &(u32, Reduced)| {
        let Absent { rank, everywhere } = reduced.absent?;
        Some(pb::Absent { slice, rank, everywhere })
    };
    let Attempt { epoch, step, number: attempt } = attempt;
    pb::StepReady {
        job,
        job_id,
        epoch,
        step,
        attempt,
        slices: reduced.iter().map(slice).collect(),
        overflow: reduced.iter().find_map(overflow),
        absent: reduced.iter().filter_map(absent).collect(),
        copies,
    }
}

/// The events to the coordinator. Clones share them.
///
/// Without a connection, events are dropped: the coordinator receives the state of all jobs, and
/// the reasons of those that have failed, when the server registers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Events(Arc<Mutex<Line>>);

/// The queue of one control stream.
#[derive(Debug, Default)]
struct Line {
    queue: Option<mpsc::Sender<Event>>,
    overflow: CancellationToken,
    /// The last jobs that have failed, until a coordinator closes them.
    failed: VecDeque<pb::JobFailed>,
}

impl Events {
    /// Begins a new queue, and returns its receiver.
    pub(crate) fn connect(&self) -> mpsc::Receiver<Event> {
        let (queue, events) = mpsc::channel(MAX_EVENTS);
        let mut line = self.line();
        (line.queue, line.overflow) = (Some(queue), CancellationToken::new());
        drop(line);
        events
    }

    /// The jobs that have failed here, and that no coordinator has closed since.
    pub(crate) fn failed(&self) -> Vec<pb::JobFailed> {
        self.line().failed.iter().cloned().collect()
    }

    /// The coordinator has closed a job.
    pub(crate) fn closed(&self, job_id: u64) {
        self.line().failed.retain(|failed| failed.job_id != job_id);
    }

    /// Sends an event that must not be lost. A coordinator that does not read its stream is given
    /// up: see [`Self::overflowed`].
    pub(crate) fn tell(&self, event: Event) {
        let mut line = self.line();
        if let Event::Failed(failed) = &event {
            line.failed.push_back(failed.clone());
            let surplus = line.failed.len().saturating_sub(MAX_FAILED);
            line.failed.drain(..surplus);
        }
        let Some(queue) = &line.queue else { return };
        // After the end of the stream events are dropped; the end is detected where commands are
        // read.
        if let Err(mpsc::error::TrySendError::Full(_)) = queue.try_send(event) {
            line.overflow.cancel();
        }
    }

    /// Sends an event like [`Self::tell`], about the job with this name and id.
    pub(crate) fn tell_of(&self, job: &str, id: u64, event: JobEvent) {
        self.tell(message(event, job.to_owned(), id));
    }

    /// Tells that this server's part of a checkpoint of the job with this name and id is written.
    /// `save`: the number of the save, and the line of its version.
    pub(crate) fn tell_written(
        &self,
        job: &str,
        job_id: u64,
        (save, line): (u64, u64),
        files: Vec<pb::CheckpointFile>,
    ) {
        let job = job.to_owned();
        self.tell(Event::Written(pb::CheckpointWritten { job, job_id, save, files, line }));
    }

    /// Sends an event that is only useful now, if no other event waits to be sent.
    pub(crate) fn tell_if_idle(&self, event: impl FnOnce() -> Event) {
        let is_idle = self.line().queue.as_ref().is_some_and(|q| q.capacity() == MAX_EVENTS);
        if is_idle {
            self.tell(event());
        }
    }

    /// Completes when an event could not be queued.
    pub(crate) async fn overflowed(&self) {
        let overflow = self.line().overflow.clone();
        overflow.cancelled().await;
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().expect("no holder of the lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_names_its_job() {
        let events = Events::default();
        let mut said = events.connect();
        events.tell_of("job", 5, JobEvent::Stored { epoch: 1, step: 0 });
        assert!(
            matches!(said.try_recv(), Ok(Event::Stored(stored)) if stored.step == 0 && stored.job_id == 5)
        );
    }

    #[test]
    fn the_last_failed_jobs_are_remembered_until_they_are_closed() {
        let events = Events::default();
        for id in 0..MAX_FAILED as u64 + 2 {
            let reason = format!("reason {id}");
            events.tell_of("job", id, JobEvent::Failed { epoch: 1, reason, transient: false });
        }
        events.closed(5);
        drop(events.connect());
        let failed: Vec<u64> = events.failed().iter().map(|failed| failed.job_id).collect();
        assert_eq!((failed.len(), failed[0]), (MAX_FAILED - 1, 2));
        assert!(!failed.contains(&5) && events.failed()[0].reason == "reason 2");
    }
}
