//! Tracks the readers that follow a job, and their dtypes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use zeroshard_model::DType;

use crate::budget::Budget;

/// How long slices record changes, and a reader is counted, after the last request.
const FOLLOWED: Duration = Duration::from_secs(60);

/// The maximum number of readers of a job that are counted.
const READERS: usize = 1_000;

/// The readers of a job, and the dtypes in which they follow it.
#[derive(Default)]
pub(super) struct Followers {
    /// The time of the last request for each dtype.
    asked: Mutex<Vec<(DType, Instant)>>,
    /// The version that each reader had when it asked last, and the time.
    readers: Mutex<BTreeMap<u64, (Option<u64>, Instant)>>,
    /// The job's part of the server's budget for changes.
    budget: OnceLock<Arc<Budget>>,
}

impl Followers {
    /// Notes a request for changes.
    pub(super) fn ask(&self, dtype: DType, now: Instant) {
        let mut asked = self.asked.lock().expect("no holder of the lock panics");
        match asked.iter_mut().find(|(of, _)| *of == dtype) {
            Some((_, last)) => *last = now,
            None => asked.push((dtype, now)),
        }
    }

    /// Notes a request of a reader. Forgets the one that has been silent for longest if there are
    /// too many.
    pub(super) fn note(&self, id: u64, version: Option<u64>, now: Instant) {
        let mut readers = self.readers.lock().expect("no holder of the lock panics");
        readers.insert(id, (version, now));
        if readers.len() > READERS {
            let silent = readers.iter().min_by_key(|(_, (_, asked))| *asked);
            let silent = silent.map(|(&id, _)| id);
            silent.map(|id| readers.remove(&id));
        }
    }

    /// Returns the readers that have asked lately, and the version that each of them had. Forgets
    /// the others.
    pub(super) fn readers(&self, now: Instant) -> Vec<(u64, Option<u64>)> {
        let mut readers = self.readers.lock().expect("no holder of the lock panics");
        readers.retain(|_, (_, asked)| now.saturating_duration_since(*asked) < FOLLOWED);
        readers.iter().map(|(&id, &(version, _))| (id, version)).collect()
    }

    /// Removes and returns the dtypes that nobody has asked for lately.
    pub(super) fn ended(&self, now: impl FnOnce() -> Instant) -> Vec<DType> {
        let mut asked = self.asked.lock().expect("no holder of the lock panics");
        let mut ended = Vec::new();
        if asked.is_empty() {
            return ended;
        }
        let now = now();
        asked.retain(|&(dtype, last)| {
            let is_followed = now.saturating_duration_since(last) < FOLLOWED;
            ended.extend((!is_followed).then_some(dtype));
            is_followed
        });
        ended
    }

    /// Returns the job's part of its server's budget `whole`: at most three quarters.
    pub(super) fn budget(&self, whole: &Arc<Budget>) -> &Arc<Budget> {
        self.budget.get_or_init(|| whole.part(whole.limit() / 4 * 3))
    }
}
