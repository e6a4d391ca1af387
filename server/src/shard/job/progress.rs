//! How far the upload or the open attempt is, over all of a job's slices on this server.

use std::time::Instant;

use prometheus::Histogram;
use zeroshard_proto::pb;

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
    slices: Vec<pb::ReducedSlice>,
    absent: Vec<pb::Absent>,
    overflow: Option<pb::Overflow>,
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
            slices: Vec::new(),
            absent: Vec::new(),
            overflow: None,
            phase_began: None,
        }
    }

    /// Counts a slice's gradient. Returns what the coordinator is told, if nothing is missing any
    /// more.
    pub(super) fn add(&mut self, slice: u32, reduced: Reduced) -> Option<pb::StepReady> {
        let sum_of_squares = reduced.sum_of_squares;
        self.slices.push(pb::ReducedSlice { slice, sum_of_squares });
        if let Some(absent) = reduced.absent {
            self.absent.push(pb::Absent {
                slice,
                rank: absent.rank,
                everywhere: absent.everywhere,
            });
        }
        if let Some(rank) = reduced.overflow {
            let overflow = pb::Overflow { slice, rank };
            let first = self.overflow.filter(|first| first.slice < slice);
            self.overflow = Some(first.unwrap_or(overflow));
        }
        self.waiting -= 1;
        (self.waiting == 0).then(|| self.report())
    }

    /// The caller adds the job's name and id.
    fn report(&mut self) -> pb::StepReady {
        let mut slices = std::mem::take(&mut self.slices);
        slices.sort_unstable_by_key(|reduced| reduced.slice);
        let mut absent = std::mem::take(&mut self.absent);
        absent.sort_unstable_by_key(|absent| absent.slice);
        pb::StepReady {
            job: String::new(),
            job_id: 0,
            epoch: self.attempt.epoch,
            step: self.attempt.step,
            attempt: self.attempt.number,
            slices,
            overflow: self.overflow,
            absent,
        }
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
