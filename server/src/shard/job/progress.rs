//! How far the upload or the open attempt is, over all of a job's slices on this server.

use std::time::Instant;

use prometheus::Histogram;

use crate::shard::{attempt::Attempt, slice::Reduced};

/// What is missing, and what has come of the gradients that are not.
pub(super) struct Progress {
    /// The open attempt: the latest one that the coordinator has told of.
    pub(super) attempt: Attempt,
    /// The version that all slices have; `None` before version 0 is published.
    pub(super) version: Option<u64>,
    /// Whether what is missing are initial parameters, not gradients.
    pub(super) is_upload: bool,
    /// Slices that still miss something.
    pub(super) waiting: usize,
    reduced: Vec<(u32, Reduced)>,
    /// When the first gradient came; after the reduction, when that ended.
    phase_began: Option<Instant>,
}

impl Progress {
    /// The upload of the initial parameters of so many slices.
    pub(super) fn upload(attempt: Attempt, slices: usize) -> Self {
        Self { is_upload: true, ..Self::step(attempt, None, slices) }
    }

    /// An attempt at a step, of so many slices that train.
    pub(super) fn step(attempt: Attempt, version: Option<u64>, slices: usize) -> Self {
        Self {
            attempt,
            version,
            is_upload: false,
            waiting: slices,
            reduced: Vec::new(),
            phase_began: None,
        }
    }

    /// Counts a slice's gradient. Returns those of all slices, if nothing is missing any more.
    pub(super) fn add(&mut self, slice: u32, reduced: Reduced) -> Option<Vec<(u32, Reduced)>> {
        self.reduced.push((slice, reduced));
        self.waiting -= 1;
        (self.waiting == 0).then(|| std::mem::take(&mut self.reduced))
    }

    /// Notes that a gradient has come.
    pub(super) fn begin_phase(&mut self) {
        self.phase_began.get_or_insert_with(Instant::now);
    }

    /// Observes how long a phase of the step took, and begins the next.
    pub(super) fn end_phase(&mut self, phase: &Histogram) {
        let began = self.phase_began.replace(Instant::now());
        phase.observe(began.map_or(0.0, |began| began.elapsed().as_secs_f64()));
    }
}
