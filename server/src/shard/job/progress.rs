//! How far the upload or the open step is, over all of a job's slices on this server.

use std::time::Instant;

use prometheus::Histogram;
use zeroshard_proto::pb;

use crate::shard::slice::Reduced;

/// What is missing, and what has come of the gradients that are not.
pub(super) struct Progress {
    /// The version that is there; `None` before the initial parameters are complete.
    pub(super) version: Option<u64>,
    /// Slices that still miss something.
    pub(super) waiting: usize,
    sums_of_squares: Vec<(u32, f64)>,
    absent: Vec<pb::Absent>,
    overflow: Option<pb::Overflow>,
    /// When the first gradient came; after the reduction, when that ended.
    pub(super) phase_began: Option<Instant>,
}

impl Progress {
    pub(super) fn new(version: Option<u64>, waiting: usize) -> Self {
        Self {
            version,
            waiting,
            sums_of_squares: Vec::new(),
            absent: Vec::new(),
            overflow: None,
            phase_began: None,
        }
    }

    /// Counts a slice's gradient.
    pub(super) fn add(&mut self, slice: u32, reduced: Reduced) {
        self.sums_of_squares.push((slice, reduced.sum_of_squares));
        if let Some(absent) = reduced.absent {
            self.absent.push(pb::Absent { slice, rank: absent.rank, everywhere: absent.everywhere });
        }
        if let Some(rank) = reduced.overflow {
            let overflow = pb::Overflow { slice, rank };
            let first = self.overflow.filter(|first| first.slice < slice);
            self.overflow = Some(first.unwrap_or(overflow));
        }
        self.waiting -= 1;
    }

    /// What the coordinator is told when nothing is missing.
    pub(super) fn report(&mut self, job: &str, epoch: u64, step: u64) -> pb::StepReady {
        let mut sums = std::mem::take(&mut self.sums_of_squares);
        sums.sort_unstable_by_key(|&(slice, _)| slice);
        let mut absent = std::mem::take(&mut self.absent);
        absent.sort_unstable_by_key(|absent| absent.slice);
        pb::StepReady {
            job: job.to_owned(),
            epoch,
            step,
            slices: sums.iter().map(|&(slice, _)| slice).collect(),
            sums_of_squares: sums.iter().map(|&(_, sum)| sum).collect(),
            overflow: self.overflow,
            absent,
            ..Default::default()
        }
    }

    /// Observes how long a phase of the step took, and begins the next.
    pub(super) fn end_phase(&mut self, phase: &Histogram) {
        let began = self.phase_began.replace(Instant::now());
        phase.observe(began.map_or(0.0, |began| began.elapsed().as_secs_f64()));
    }
}
