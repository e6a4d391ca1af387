//! Tracks the dtypes in which readers follow a job.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use zeroshard_model::DType;

use crate::budget::Budget;

/// How long slices record changes after the last request for them.
const FOLLOWED: Duration = Duration::from_secs(60);

/// The dtypes in which a job is followed.
#[derive(Default)]
pub(super) struct Followers {
    /// The time of the last request for each dtype.
    asked: Mutex<Vec<(DType, Instant)>>,
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
