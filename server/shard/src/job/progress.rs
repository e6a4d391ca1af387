//! The progress of the upload or of the open attempt, over all of a job's slices on this server.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use zeroshard_model::Attempt;

use super::arrivals::Arrivals;
use crate::slice::Reduced;

/// The number of incomplete slices, and the reduced gradients of the complete ones.
pub(super) struct Progress<D> {
    /// The open attempt: the latest one that the coordinator has announced.
    pub(super) attempt: Attempt,
    /// The version of all slices; `None` before version 0 is published.
    pub(super) version: Option<u64>,
    /// `true` if the slices wait for initial parameters, and not for gradients.
    pub(super) is_upload: bool,
    /// The number of incomplete slices.
    pub(super) waiting: usize,
    reduced: Vec<(u32, Reduced)>,
    /// The number of the last copy of slices that has begun; 0 for none.
    pub(super) copies: u64,
    /// The last decision.
    pub(super) last: Option<Decided<D>>,
    /// If the attempt is open because every rank has rested: the highest rank of the last step.
    pub(super) rested: Option<u32>,
    /// The arrivals of the gradients.
    pub(super) arrivals: Arrivals,
    /// The arrival of the first gradient; after the reduction, its end.
    phase_began: Option<Instant>,
}

/// A decision, and the reduced gradients that it is about.
pub struct Decided<D> {
    pub decision: Arc<D>,
    pub reduced: Ready,
}

impl<D> Clone for Decided<D> {
    fn clone(&self) -> Self {
        Self { decision: self.decision.clone(), reduced: self.reduced.clone() }
    }
}

/// The reduced gradients of all slices of which this server is the primary.
#[derive(Debug, Clone)]
pub struct Ready {
    pub slices: Vec<(u32, Reduced)>,
    /// The number of the last copy of slices that has begun; 0 for none.
    pub copies: u64,
}

impl<D> Progress<D> {
    /// The upload of the initial parameters of this number of slices.
    pub(super) fn upload(attempt: Attempt, slices: usize) -> Self {
        Self { is_upload: true, ..Self::step(attempt, None, slices) }
    }

    /// An attempt at a step with this number of trained slices.
    pub(super) fn step(attempt: Attempt, version: Option<u64>, slices: usize) -> Self {
        Self {
            attempt,
            version,
            is_upload: false,
            waiting: slices,
            reduced: Vec::new(),
            copies: 0,
            last: None,
            rested: None,
            arrivals: Arrivals::default(),
            phase_began: None,
        }
    }

    /// Adds a slice's reduced gradient. Returns those of all slices if all are complete.
    pub(super) fn add(&mut self, slice: u32, reduced: Reduced, is_primary: bool) -> Option<Ready> {
        if is_primary {
            self.reduced.push((slice, reduced));
        }
        self.waiting -= 1;
        self.reduced()
    }

    /// The reduced gradients of all slices, if all are complete.
    pub(super) fn reduced(&self) -> Option<Ready> {
        let is_complete = !self.is_upload && self.waiting == 0;
        is_complete.then(|| self.ready())
    }

    fn ready(&self) -> Ready {
        Ready { slices: self.reduced.clone(), copies: self.copies }
    }

    /// The progress of another attempt at the same step.
    pub(super) fn again(&mut self, attempt: Attempt, slices: usize) -> Self {
        let (last, copies) = (self.last.take(), self.copies);
        Self { last, copies, ..Self::step(attempt, self.version, slices) }
    }

    /// The progress of the step that follows `decision` about this one.
    pub(super) fn after(&self, decision: Arc<D>, next: Attempt, slices: usize) -> Self {
        let last = Some(Decided { decision, reduced: self.ready() });
        Self { last, copies: self.copies, ..Self::step(next, self.version, slices) }
    }

    /// Records that a gradient has arrived.
    pub(super) fn begin_phase(&mut self, now: impl FnOnce() -> Instant) {
        self.phase_began.get_or_insert_with(now);
    }

    /// Begins the next phase of the step, and returns the duration of the one before.
    pub(super) fn end_phase(&mut self, now: Instant) -> Duration {
        let began = self.phase_began.replace(now);
        began.map_or(Duration::ZERO, |began| now.saturating_duration_since(began))
    }
}
