//! Compares running averages with scalar code in f64.

use std::sync::Arc;

use zeroshard_model::dtype::DType;

use super::{assert_same, buffer_of, contents, from_bytes, numbers};
use crate::{Backend, Output};

pub(super) fn run<B: Backend>(backend: &B) {
    for numel in [0, 1, 127, 128, 1_003] {
        steps_equal_the_reference(backend, numel);
    }
    the_first_values_replace_what_is_not_a_number(backend);
}

/// What a step makes of an element, whose average is `high + low`.
fn reference(weight: f64, value: f32, (high, low): (f32, f32)) -> (f32, f32) {
    let before = f64::from(high) + f64::from(low);
    let after = match weight {
        1.0 => f64::from(value),
        _ => before + weight * (f64::from(value) - before),
    };
    let high = after as f32;
    if !high.is_finite() {
        return (high, 0.0);
    }
    (high, (after - f64::from(high)) as f32)
}

/// Steps in place, and beside readers of the earlier values.
fn steps_equal_the_reference<B: Backend>(backend: &B, numel: usize) {
    let mut expected = vec![(7.0, 7.0); numel];
    let mut high = buffer_of(backend, &vec![7.0; numel], DType::F32);
    let mut low = buffer_of(backend, &vec![7.0; numel], DType::F32);
    for (step, weight) in [1.0, 0.5, 1e-4, 0.3, 1e-9, 1.0 / 3.0].into_iter().enumerate() {
        let mut values = numbers(60 + step, numel);
        if let Some(last) = values.last_mut().filter(|_| step == 4) {
            *last = f32::INFINITY;
        }
        for (average, &value) in expected.iter_mut().zip(&values) {
            *average = reference(weight, value, *average);
        }
        let values = buffer_of(backend, &values, DType::F32);
        if step % 2 == 0 {
            let average = [&mut high, &mut low].map(Output::from);
            backend.average(weight, &values, average).unwrap();
        } else {
            let next = |earlier: &B::Buffer| backend.another(earlier).unwrap();
            let (mut next_high, mut next_low) = (next(&high), next(&low));
            let [held_high, held_low] = [high, low].map(Arc::new);
            let average = [
                Output { buffer: &mut next_high, earlier: Some(held_high) },
                Output { buffer: &mut next_low, earlier: Some(held_low) },
            ];
            backend.average(weight, &values, average).unwrap();
            (high, low) = (next_high, next_low);
        }
        let check = |buffer, expected: Vec<f32>, part| {
            let (bytes, buffer) = contents(backend, buffer);
            let what = format!("{part} of {numel} elements after step {step}");
            assert_same(&from_bytes(&bytes, DType::F32), &expected, &what);
            buffer
        };
        high = check(high, expected.iter().map(|average| average.0).collect(), "the average");
        low = check(low, expected.iter().map(|average| average.1).collect(), "the rest");
    }
}

fn the_first_values_replace_what_is_not_a_number<B: Backend>(backend: &B) {
    let mut high = buffer_of(backend, &[f32::NAN, f32::INFINITY], DType::F32);
    let mut low = buffer_of(backend, &[f32::NAN, 1.0], DType::F32);
    let values = buffer_of(backend, &[1.5, -2.5], DType::F32);
    backend.average(1.0, &values, [&mut high, &mut low].map(Output::from)).unwrap();
    for (buffer, expected) in [(high, [1.5, -2.5]), (low, [0.0, 0.0])] {
        let (bytes, _) = contents(backend, buffer);
        assert_same(&from_bytes(&bytes, DType::F32), &expected, "the first values");
    }
}
