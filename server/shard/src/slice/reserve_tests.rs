//! A step whose gradient was reported cannot fail because of missing memory.
//!
//! promise: atomic-steps

use std::sync::atomic::Ordering;

use bytes::Bytes;
use zeroshard_model::{DType, Error, JobSpec, Manifest, TensorSpec};

use super::*;
use crate::{
    instrumented::Instrumented,
    slice::tests::{PARAMETERS, bytes, chunk},
    state_selector::StateSelector,
    tier::Places,
};

/// A slice of two elements under AdamW at version 0, and memory for `left` more buffers.
pub(super) struct Subject {
    pub(super) backend: Arc<Instrumented>,
    pub(super) slice: Slice<Instrumented>,
    job: JobSpec,
}

const FIRST: Attempt = Attempt { epoch: 1, step: 0, number: 0 };

impl Subject {
    pub(super) fn new(left: usize) -> Self {
        let manifest = Manifest::new(vec![TensorSpec::new("w", [2])]).unwrap();
        let job = JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()]);
        let backend = Arc::new(Instrumented::new());
        let device = Device::new(backend.clone(), None);
        let home = Home { device: &device, places: Places::default(), arena: None };
        let of = job.contributions(0);
        let slice = Slice::allocate(home, &job, 0, &of, FIRST, Role::Primary).unwrap();
        slice.upload(FIRST, PARAMETERS, &chunk(0, 0, &[1.0, 2.0]), || Ok(())).unwrap();
        slice.publish(0).unwrap();
        backend.room.store(left, Ordering::Relaxed);
        Self { backend, slice, job }
    }

    /// The first attempt at the next step.
    fn attempt(&self) -> Attempt {
        Attempt::first(1, self.slice.version().expect("it is initialised"))
    }

    pub(super) fn push(&self) -> Result<Option<Reduced>> {
        let budget = Budget::new(0);
        let chunk = chunk(0, 0, &[0.5, 0.5]);
        self.slice
            .contribute(self.attempt(), &chunk, &budget, || Ok(()))
            .map(|(_, reduced)| reduced)
    }

    pub(super) fn read(&self, part: StateSelector) -> Result<Option<Array<Instrumented>>> {
        self.slice.read(part, "job", self.attempt().step)
    }

    pub(super) fn step(&self) {
        let groups = &self.job.groups;
        let apply = Apply { groups, coefficient: 1.0, unclipped: 1.0, gradient_factors: &[] };
        self.end_step(Some(apply));
    }

    pub(super) fn skip(&self) {
        self.end_step(None);
    }

    fn end_step(&self, apply: Option<Apply<'_>>) {
        let next = Attempt::first(1, self.attempt().step + 1);
        let step = Step { apply, next, absent: &[] };
        self.slice.step(0, &step).unwrap();
    }

    fn values(&self, array: &Array<Instrumented>) -> Bytes {
        array.read(&self.backend, 0..2, DType::F32).unwrap()
    }
}

#[test]
fn a_gradient_is_not_complete_without_memory_for_the_step_beside_a_reader() {
    let subject = Subject::new(0);
    let held = subject.read(StateSelector::Parameters).unwrap();
    assert!(matches!(subject.push(), Err(Error::OutOfMemory { .. })));
    // The reader releases the version: the same push again completes the gradient.
    drop(held);
    assert!(subject.push().unwrap().is_some());
    assert_eq!(subject.push().unwrap(), None, "it is reported once");
    subject.step();
    assert_eq!(subject.slice.version(), Some(1));
}

#[test]
fn a_reader_after_the_gradient_is_complete_reserves_memory_or_is_refused() {
    let subject = Subject::new(1);
    assert!(subject.push().unwrap().is_some());
    let held = subject.read(StateSelector::Parameters).unwrap().unwrap();
    assert!(matches!(subject.read(StateSelector::State(0)), Err(Error::OutOfMemory { .. })));
    let again = subject.read(StateSelector::Parameters).unwrap().unwrap();
    subject.step();
    for buffer in [held, again] {
        assert_eq!(subject.values(&buffer), bytes(&[1.0, 2.0]));
    }
}

#[test]
fn a_step_beside_readers_of_every_part_needs_no_further_memory() {
    let parts = [StateSelector::Parameters, StateSelector::State(0), StateSelector::State(1)];
    let subject = Subject::new(parts.len());
    let held: Vec<_> = parts.iter().map(|&part| subject.read(part).unwrap().unwrap()).collect();
    assert!(subject.push().unwrap().is_some());
    assert_eq!(subject.backend.room.load(Ordering::Relaxed), 0);
    subject.step();
    assert_eq!(subject.values(&held[0]), bytes(&[1.0, 2.0]));
    assert_eq!(subject.values(&held[1]), bytes(&[0.0, 0.0]));
}
