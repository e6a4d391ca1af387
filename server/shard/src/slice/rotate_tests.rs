//! Steps whose new values take the place of the gradient.

use proptest::prelude::*;
use zeroshard_model::{Manifest, Optimizer, StateDType, TensorSpec};
use zeroshard_shm::Arena;

use super::{
    tests::{PARAMETERS, Subject, chunk},
    *,
};
use crate::state_selector::StateSelector;

/// Large enough for an arena.
const NUMEL: usize = 16 << 10;

fn job(optimizer: &str) -> JobSpec {
    let manifest = Manifest::new(vec![TensorSpec::new("w", [NUMEL as u64])]).unwrap();
    JobSpec::new("job", manifest, vec![optimizer.parse().unwrap()])
}

fn numbers(seed: usize) -> Vec<f32> {
    (0..NUMEL).map(|index| ((index * 7 + seed * 131) as f32).sin()).collect()
}

/// An arena with room for this many arrays, and a slice in it at version 0.
fn subject(optimizer: &str, arrays: usize) -> Subject {
    let arena = Arena::create("test", arrays * NUMEL * size_of::<f32>()).unwrap();
    let subject = Subject::in_arena(job(optimizer), Some(&arena));
    subject.upload_chunk(PARAMETERS, &chunk(0, 0, &numbers(0))).unwrap();
    subject
}

fn step(subject: &Subject, version: u64) {
    assert!(subject.push(0, &numbers(version as usize + 1)).is_some());
    subject.step(version, 0.5, 0.5);
}

#[test]
fn a_reader_that_always_has_the_last_version_needs_two_arrays() {
    let [read, alone] = [(); 2].map(|()| subject("adamw", 2));
    let mut held = read.held(StateSelector::Parameters, 0);
    let mut places = vec![read.place(&held)];
    for version in 0..6 {
        let before = read.values(&held);
        step(&read, version);
        step(&alone, version);
        assert_eq!(read.values(&held), before, "a reader keeps version {version}");
        held = read.held(StateSelector::Parameters, version + 1);
        places.push(read.place(&held));
        let expected = alone.read(StateSelector::Parameters, version + 1);
        assert!(read.values(&held) == expected, "version {}", version + 1);
    }
    assert_ne!(places[0], places[1]);
    assert!(places.iter().zip(&places[2..]).all(|(place, later)| place == later), "{places:?}");
}

#[test]
fn a_step_that_takes_the_place_of_the_gradient_rounds_8_bit_state_like_any_other() {
    let subject = |arrays| {
        let arena = Arena::create("test", arrays * NUMEL * size_of::<f32>()).unwrap();
        let job = JobSpec { state_dtype: StateDType::Int8, ..job("adamw") };
        let subject = Subject::in_arena(job, Some(&arena));
        subject.upload_chunk(PARAMETERS, &chunk(0, 0, &numbers(0))).unwrap();
        subject
    };
    let [read, alone] = [2, 1].map(subject);
    let mut held = read.held(StateSelector::Parameters, 0);
    for version in 0..4 {
        step(&read, version);
        step(&alone, version);
        let [found, expected] =
            [&read, &alone].map(|of| of.slice.digest("job", version + 1).unwrap());
        assert_eq!(found, expected, "version {}", version + 1);
        assert_ne!(
            read.place(&held),
            read.place(&read.held(StateSelector::Parameters, version + 1))
        );
        held = read.held(StateSelector::Parameters, version + 1);
    }
}

#[test]
fn a_step_that_is_skipped_leaves_the_values_where_they_are() {
    let subject = subject("adamw", 2);
    let held = subject.held(StateSelector::Parameters, 0);
    assert!(subject.push(0, &[f32::NAN; NUMEL]).is_some());
    subject.skip(0);
    let after = subject.held(StateSelector::Parameters, 1);
    assert_eq!(subject.place(&held), subject.place(&after));
    assert!(subject.values(&after) == subject.values(&held));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any readers of parameters and gradients, also of several versions, get what they would get
    /// from a slice without others, and each keeps it.
    #[test]
    fn readers_of_any_versions_see_the_values_of_a_slice_without_readers(
        optimizer in prop::sample::select(Optimizer::defaults()),
        readers in prop::collection::vec((0u8..4, 0usize..3), 1..7),
    ) {
        let [read, alone] = [(); 2].map(|()| subject(optimizer.name(), 5));
        let mut held = Vec::new();
        let hold = |held: &mut Vec<_>, part, version| {
            let array = read.held(part, version);
            held.push((read.values(&array).to_vec(), array));
        };
        for (version, (reads, dropped)) in (0..).zip(readers) {
            if reads & 1 != 0 {
                hold(&mut held, StateSelector::Parameters, version);
            }
            for subject in [&read, &alone] {
                prop_assert!(subject.push(0, &numbers(version as usize + 1)).is_some());
            }
            if reads & 2 != 0 {
                hold(&mut held, StateSelector::GradientSum, version);
            }
            for subject in [&read, &alone] {
                subject.step(version, 0.5, 0.5);
            }
            for (values, array) in &held {
                prop_assert!(read.values(array) == *values, "a reader keeps its values");
            }
            let [found, expected] =
                [&read, &alone].map(|of| of.read(StateSelector::Parameters, version + 1));
            prop_assert!(found == expected, "version {}", version + 1);
            held.drain(..dropped.min(held.len()));
        }
    }
}
