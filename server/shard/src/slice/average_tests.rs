//! Running averages of a slice.
//!
//! promise: same-bits

use zeroshard_model::checkpoint::Part as SavedPart;
use zeroshard_model::{Manifest, RunningAverage, TensorSpec, Warmup, Weights};

use super::{
    tests::{PARAMETERS, Subject, bytes, chunk},
    *,
};
use crate::state_selector::StateSelector;

const NUMEL: usize = 3;

/// The position of the values of the first average, behind those of SGD with momentum.
const FIRST: StateSelector = StateSelector::State(1);
const SECOND: StateSelector = StateSelector::State(3);

fn averages() -> [RunningAverage; 2] {
    let ema = RunningAverage::exponential("slow", 0.9);
    let weights = Weights::Equal;
    [ema, RunningAverage { name: "equal".into(), weights, start: 2, every: 2 }]
}

fn job(averages: &[RunningAverage], averages_skip: bool) -> JobSpec {
    let sgd = serde_json::from_str(r#"{"name":"sgd","lr":1.0,"momentum":0.5}"#).unwrap();
    let manifest = Manifest::new(vec![TensorSpec::new("w", [NUMEL as u64])]).unwrap();
    let averages = averages.into();
    JobSpec { averages, averages_skip, ..JobSpec::new("job", manifest, vec![sgd]) }
}

fn started(job: JobSpec) -> Subject {
    let subject = Subject::of(job);
    subject.upload_chunk(PARAMETERS, &chunk(0, 0, &[1.0, 2.0, 3.0])).unwrap();
    subject
}

/// The values of a part, as numbers.
fn values(subject: &Subject, part: StateSelector, version: u64) -> Vec<f32> {
    let bytes = subject.read(part, version);
    let (values, _) = bytes.as_chunks();
    values.iter().map(|&value| f32::from_le_bytes(value)).collect()
}

/// Steps with a gradient, `None`: without one on any rank. The parameters after them are returned.
fn steps(subject: &Subject, gradients: &[Option<f32>]) -> Vec<Vec<f32>> {
    let mut found = vec![values(subject, StateSelector::Master, 0)];
    for (version, gradient) in gradients.iter().enumerate() {
        let version = version as u64;
        match gradient {
            Some(gradient) => _ = subject.push(0, &[*gradient; NUMEL]).unwrap(),
            None => _ = subject.absent(0).unwrap(),
        }
        subject.step(version, 1.0, 1.0);
        found.push(values(subject, StateSelector::Master, version + 1));
    }
    found
}

/// What torch computes in float64.
fn reference(parameters: &[Vec<f32>], decay: f64) -> Vec<f32> {
    let element = |at: usize| {
        let mut average = f64::from(parameters[1][at]);
        for values in &parameters[2..] {
            average += (1.0 - decay) * (f64::from(values[at]) - average);
        }
        average as f32
    };
    (0..NUMEL).map(element).collect()
}

#[test]
fn averages_begin_with_the_parameters_and_follow_them_also_without_a_gradient() {
    let subject = started(job(&averages(), false));
    for part in [FIRST, SECOND] {
        assert_eq!(values(&subject, part, 0), [1.0, 2.0, 3.0]);
    }
    let parameters = steps(&subject, &[Some(0.25), Some(-1.0), None, Some(0.5), Some(0.125)]);
    assert_eq!(values(&subject, FIRST, 5), reference(&parameters, 0.9));
    // After steps 2 and 4.
    let mean = |at: usize| (f64::from(parameters[2][at]) + f64::from(parameters[4][at])) / 2.0;
    let expected: Vec<f32> = (0..NUMEL).map(|at| mean(at) as f32).collect();
    assert_eq!(values(&subject, SECOND, 5), expected);
}

#[test]
fn a_skipped_step_counts_unless_the_job_says_otherwise() {
    let power = Warmup::Power { inv_gamma: 1.0, power: 1.0 };
    let weights = Weights::Exponential { decay: 0.999, warmup: power };
    let warm = [RunningAverage { weights, ..RunningAverage::exponential("warm", 0.999) }];
    for skip in [false, true] {
        let subject = started(job(&warm, skip));
        subject.push(0, &[1.0; NUMEL]).unwrap();
        subject.step(0, 1.0, 1.0);
        subject.push(0, &[1.0; NUMEL]).unwrap();
        subject.skip(1);
        subject.push(0, &[1.0; NUMEL]).unwrap();
        subject.step(2, 1.0, 1.0);
        let [after_one, last] = [0.0, -1.5].map(f64::from);
        // The fraction that is kept after n updates is n / (1 + n).
        let expected = match skip {
            false => {
                let two = after_one;
                two + (1.0 - 2.0 / 3.0) * (last - two)
            }
            true => after_one + (1.0 - 0.5) * (last - after_one),
        };
        assert_eq!(values(&subject, FIRST, 3)[0], expected as f32, "{skip}");
    }
}

#[test]
fn readers_and_checkpoints_keep_averages_beside_steps_that_change_only_them() {
    let subject = started(job(&averages(), false));
    steps(&subject, &[Some(0.25)]);
    let held = subject.held(FIRST, 1);
    let holds = Holds::new(Budget::new(u64::MAX), 1);
    let saved = subject.slice.hold("job", 1, (0, &holds)).unwrap();
    let before = values(&subject, FIRST, 1);
    subject.push(0, &[1.0; NUMEL]).unwrap();
    subject.skip(1);
    assert_eq!(subject.values(&held), bytes(&before));
    assert_eq!(saved.part(SavedPart::State(1)).unwrap(), bytes(&before));
    assert_eq!(saved.applied.averaged, 1);
    assert_eq!(subject.slice.applied("job", 2).unwrap().averaged, 2);
}

#[test]
fn a_restored_slice_continues_its_averages() {
    let original = started(job(&averages(), false));
    steps(&original, &[Some(0.25), Some(-1.0), Some(0.5)]);
    let holds = Holds::new(Budget::new(u64::MAX), 3);
    let saved = original.slice.hold("job", 3, (0, &holds)).unwrap();
    let restore = |job: JobSpec, parts: &[SavedPart]| {
        let subject = Subject::of(job);
        for &part in parts {
            subject.slice.restore(part, 0, &saved.part(part).unwrap()).unwrap();
        }
        subject.slice.set_applied(saved.applied);
        subject.slice.publish(3).unwrap();
        subject
    };
    let all: Vec<SavedPart> =
        [SavedPart::Values].into_iter().chain((0..5).map(SavedPart::State)).collect();
    let restored = restore(job(&averages(), false), &all);
    let digest = |of: &Subject| of.slice.digest("job", 3).unwrap();
    assert_eq!(digest(&restored), digest(&original));
    // Without averages, those of the checkpoint are dropped.
    let without = restore(job(&[], false), &all);
    assert_eq!(without.slice.applied("job", 3).unwrap().averaged, 0);
    assert_ne!(digest(&without), digest(&original));
    // Averages that the checkpoint does not have begin.
    let began = Subject::of(job(&averages(), false));
    for &part in &all[..2] {
        began.slice.restore(part, 0, &saved.part(part).unwrap()).unwrap();
    }
    let applied = AppliedSteps { averaged: 0, ..saved.applied };
    began.slice.set_applied(applied);
    began.slice.publish(3).unwrap();
    assert_eq!(values(&began, FIRST, 3), values(&began, StateSelector::Master, 3));
}
