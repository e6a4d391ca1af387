//! Tracks the readers that follow a job, and the views in which they follow its tensors.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use zeroshard_model::View;

use crate::budget::Budget;

/// How long slices record changes, and a reader is counted, after the last request.
const FOLLOWED: Duration = Duration::from_secs(60);

/// The maximum number of readers of a job that are counted.
const READERS: usize = 1_000;

/// The maximum number of boxes of a tensor that are followed. Each step compares the elements of
/// every box, and keeps what has changed in it. Whole tensors, in up to three dtypes, do not count.
pub(super) const MOST_BOXES: usize = 64;

/// The readers of a job, and the views in which they follow its tensors.
#[derive(Default)]
pub(super) struct Followers {
    /// The time of the last request for each view of each tensor.
    asked: Mutex<BTreeMap<usize, Vec<(View, Instant)>>>,
    /// The version that each reader had when it asked last, and the time.
    readers: Mutex<BTreeMap<u64, (Option<u64>, Instant)>>,
    /// The job's part of the server's budget for changes.
    budget: OnceLock<Arc<Budget>>,
}

impl Followers {
    /// Notes a request for changes of a tensor. Returns `false` if [`MOST_BOXES`] other boxes are
    /// followed.
    pub(super) fn ask(&self, tensor: usize, view: &View, now: Instant) -> bool {
        let mut asked = self.asked.lock().expect("no holder of the lock panics");
        let views = asked.entry(tensor).or_default();
        if let Some((_, last)) = views.iter_mut().find(|(of, _)| of == view) {
            *last = now;
            return true;
        }
        let boxes = views.iter().filter(|(of, _)| of.bounds().is_some()).count();
        let has_room = view.bounds().is_none() || boxes < MOST_BOXES;
        if has_room {
            views.push((view.clone(), now));
        }
        has_room
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

    /// Removes and returns the views that nobody has asked for lately, each with its tensor.
    pub(super) fn ended(&self, now: impl FnOnce() -> Instant) -> Vec<(usize, View)> {
        let mut asked = self.asked.lock().expect("no holder of the lock panics");
        let mut ended = Vec::new();
        if asked.is_empty() {
            return ended;
        }
        let now = now();
        asked.retain(|&tensor, views| {
            views.retain(|(view, last)| {
                let is_followed = now.saturating_duration_since(*last) < FOLLOWED;
                ended.extend((!is_followed).then(|| (tensor, view.clone())));
                is_followed
            });
            !views.is_empty()
        });
        ended
    }

    /// Returns the job's part of its server's budget `whole`: at most three quarters.
    pub(super) fn budget(&self, whole: &Arc<Budget>) -> &Arc<Budget> {
        self.budget.get_or_init(|| whole.part(whole.limit() / 4 * 3))
    }
}
