//! Every code of every tile, and the values that no code has.

use super::*;
use crate::{conformance::hash, loops::Level};

/// The exponent bytes of tiles of numbers.
const EXPONENTS: std::ops::RangeInclusive<u8> = 0..=(HIGHEST - LOWEST) as u8;

fn decoded_by<F: Format>(level: Level, codes: &[u8], exponent: u8) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    decode::<F>(level, codes, exponent, &mut values);
    values
}

/// The values of a tile after a step that adds `rounding` to the bits that are cut off.
fn stepped<F: Format>(values: &[f32], rounding: u32) -> Vec<f32> {
    let largest = values.iter().map(|&value| magnitude::<F>(value)).max();
    let (exponent, scale) = scale::<F>(largest.unwrap_or(0)).unwrap();
    let mut codes: Vec<u8> =
        values.iter().map(|&value| coded::<F>(value, scale, |_| rounding)).collect();
    at_least_one::<F>(values, &mut codes);
    decoded_by::<F>(Level::best(), &codes, exponent)
}

/// The values after rounding to nearest.
fn nearest<F: Format>(values: &[f32]) -> Vec<f32> {
    let mut codes = vec![0; values.len()];
    let exponent = encode::<F>(Level::best(), values, &mut codes);
    decoded_by::<F>(Level::best(), &codes, exponent)
}

fn assert_same_bits(found: &[f32], expected: &[f32]) {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(found), bits(expected));
}

/// Numbers of many magnitudes, up to one that is anywhere between two powers of 4.
fn tile<F: Format>(seed: usize) -> Vec<f32> {
    let hash = |i: usize| hash(seed * TILE + i);
    let largest = f32::from_bits((100 << 23) + (hash(0) >> 8));
    let number = |i: usize| {
        let part = (hash(i) >> 8) as f32 / 16_777_216.0 * 2f32.powi(-((hash(i) % 20) as i32));
        let sign = if F::IS_SIGNED && hash(i) & 32 == 0 { -1.0 } else { 1.0 };
        sign * if i == 0 { largest } else { largest * part }
    };
    (0..TILE).map(number).collect()
}

fn state_that_was_rounded_keeps_its_value<F: Format>() {
    for seed in 0..20_000 {
        let values = tile::<F>(seed);
        // The largest value is rounded down as far as possible, or up.
        for rounding in [0, (1 << F::SHIFT) - 1, (1 << (F::SHIFT - 1)) + seed as u32] {
            let rounded = stepped::<F>(&values, rounding);
            assert_same_bits(&nearest::<F>(&rounded), &rounded);
        }
    }
}

#[test]
fn encoding_what_was_decoded_changes_no_value() {
    state_that_was_rounded_keeps_its_value::<Signed>();
    state_that_was_rounded_keeps_its_value::<Positive>();
}

fn every_code_keeps_its_value<F: Format>() {
    for level in Level::all() {
        for exponent in EXPONENTS {
            for first in [0, 128] {
                // The largest code decides the exponent.
                let mut codes: Vec<u8> = (first..=first + 127).collect();
                codes[0] = F::LARGEST as u8;
                let values = decoded_by::<F>(level, &codes, exponent);
                assert!(values.iter().all(|value| value.is_finite()));
                let mut again = vec![7; TILE];
                let same = encode::<F>(level, &values, &mut again);
                assert_eq!((same, &again), (exponent, &codes));
                for rounding in [0, 1, (1 << F::SHIFT) - 1] {
                    assert_same_bits(&stepped::<F>(&values, rounding), &values);
                }
            }
        }
    }
}

#[test]
fn every_code_of_every_exponent_keeps_its_value_however_it_is_rounded() {
    every_code_keeps_its_value::<Signed>();
    every_code_keeps_its_value::<Positive>();
}

#[test]
fn the_codes_of_a_tile_grow_with_their_values_and_are_finer_than_an_eighth_or_a_quarter() {
    fn check<F: Format>(most: f32) {
        let codes: Vec<u8> = (1..=F::LARGEST as u8).collect();
        let values = decoded_by::<F>(Level::best(), &codes, 100);
        assert!(values[0] > 0.0 && values.is_sorted());
        let normal = &values[(1 << F::BITS) - 1..];
        assert!(normal.windows(2).all(|pair| pair[1] <= pair[0] * (1.0 + most)));
    }
    check::<Signed>(1.0 / 8.0);
    check::<Positive>(1.0 / 4.0);
}

/// Rounding goes to a neighbour, and its mean over all random numbers is the value.
fn is_unbiased<F: Format>(largest: f32, value: f32) {
    let (mut sum, mut found) = (0.0, Vec::new());
    let numbers = 1u32 << F::SHIFT;
    for rounding in 0..numbers {
        let rounded = stepped::<F>(&[largest, value], rounding);
        assert_eq!(rounded[0], largest);
        sum += f64::from(rounded[1]);
        if found.last() != Some(&rounded[1]) {
            found.push(rounded[1]);
        }
    }
    let gap = f64::from(found[found.len() - 1] - found[0]).abs();
    let error = (sum / f64::from(numbers) - f64::from(value)).abs();
    assert!(found.len() <= 2 && error <= gap / f64::from(numbers), "{value}: {found:?}, {error:e}");
}

#[test]
fn the_mean_of_stochastic_rounding_is_the_value() {
    // The largest magnitudes of tiles.
    let [signed, positive] = [247.0 / 256.0, 15.0 / 16.0];
    for value in [0.51, 0.6, 0.74999, 0.0123, 3.3e-4] {
        is_unbiased::<Signed>(signed, value);
        is_unbiased::<Signed>(-signed, -value);
        is_unbiased::<Positive>(positive, value * 1e-6);
    }
}

#[test]
fn rounding_is_to_nearest_and_ties_go_to_even() {
    // The largest magnitudes of a tile are 31 << 7, less 16, of these units.
    let unit = 1.0 / 4_096.0;
    let of = |units: &[f32]| units.iter().map(|of| of * unit).collect::<Vec<_>>();
    let values = of(&[3_952.0, 15.4, 15.5, 17.0, 19.0, -0.49, 1.5, 2.5]);
    let expected = of(&[3_952.0, 15.0, 16.0, 16.0, 20.0, -0.0, 2.0, 2.0]);
    assert_same_bits(&nearest::<Signed>(&values), &expected);
}

#[test]
fn the_largest_element_is_never_rounded_beyond_its_code() {
    // 31 << 7, less 16, is the largest code with this exponent. One more needs the next one.
    let most = 3_952.0 / 2_048.0;
    assert_same_bits(&nearest::<Signed>(&[most, -most, 0.0]), &[most, -most, 0.0]);
    let above = nearest::<Signed>(&[f32::from_bits(f32::to_bits(most) + 1), 1.0]);
    assert!(above[0] > 1.9 && above[0] < 2.0, "{above:?}");
    // There is no next exponent.
    let largest = f32::from_bits(254 << 23 | Signed::MOST);
    assert_same_bits(&nearest::<Signed>(&[largest, -largest]), &[largest, -largest]);
    assert!(nearest::<Signed>(&[f32::from_bits(largest.to_bits() + 1), 1.0])[1].is_nan());
    let largest = f32::from_bits(254 << 23 | Positive::MOST);
    assert_same_bits(&nearest::<Positive>(&[largest]), &[largest]);
    assert!(nearest::<Positive>(&[f32::MAX, 1.0])[1].is_nan());
}

#[test]
fn a_positive_second_moment_is_never_zero() {
    let smallest = f32::from_bits(1);
    let values = [1.0, 1e-30, smallest, 0.0];
    for rounded in [nearest::<Positive>(&values), stepped::<Positive>(&values, 0)] {
        assert!(rounded[1] > 0.0 && rounded[2] > 0.0 && rounded[1] < 1e-9, "{rounded:?}");
        assert_eq!(rounded[3].to_bits(), 0);
    }
    assert_same_bits(&nearest::<Positive>(&[-0.0, 0.9375]), &[0.0, 0.9375]);
    assert_same_bits(&nearest::<Positive>(&[smallest, 0.0]), &[f32::MIN_POSITIVE, 0.0]);
}

#[test]
fn subnormal_tiles_and_zeros_keep_their_sign() {
    let values = [f32::from_bits(3), -f32::from_bits(3), 0.0, -0.0];
    assert_same_bits(&nearest::<Signed>(&values), &[0.0, -0.0, 0.0, -0.0]);
    assert_same_bits(&nearest::<Signed>(&[0.0; 5]), &[0.0; 5]);
    assert_eq!(encode::<Signed>(Level::best(), &[0.0; 5], &mut [1; 5]), 0);
}

#[test]
fn a_tile_with_a_value_that_has_no_code_is_nan() {
    let is_nan = |values: Vec<f32>| values.iter().all(|value| value.to_bits() == 0x7fc0_0000);
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(is_nan(nearest::<Signed>(&[1.0, bad, 2.0])));
        assert!(is_nan(nearest::<Positive>(&[1.0, bad, 2.0])));
    }
    assert!(is_nan(nearest::<Positive>(&[1.0, -1e-30])));
    assert!(is_nan(nearest::<Signed>(&nearest::<Signed>(&[f32::NAN, 1.0]))));
}
