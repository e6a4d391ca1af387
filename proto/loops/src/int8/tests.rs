//! Golden vectors, unbiased rounding, and every value of f32 that needs care.
//!
//! promise: same-bits

use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::convert::cast;

/// A case of the golden vectors, which `tests/golden/int8.py` makes.
#[derive(Deserialize)]
struct Case {
    seed: u64,
    step: u64,
    rank: u32,
    tensor: u32,
    first: u64,
    values: String,
    bytes: String,
}

fn hex(digits: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// The elements in memory, at an odd address.
fn in_memory(values: &[f32], dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0xaa; 1 + values.len() * dtype.size()];
    let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    cast(Level::best(), &values, DType::F32, &mut bytes[1..], dtype);
    bytes
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn encoded_at(level: Level, values: &[f32], first: u64, rounding: &Rounding) -> Vec<u8> {
    let mut tiles = vec![0xaa; bytes_of(values.len())];
    let values = in_memory(values, DType::F32);
    encode(level, &values[1..], DType::F32, first, rounding, &mut tiles);
    tiles
}

fn encoded(values: &[f32], first: u64, rounding: &Rounding) -> Vec<u8> {
    encoded_at(Level::best(), values, first, rounding)
}

fn decoded_at(level: Level, tiles: &[u8], dtype: DType) -> Vec<u8> {
    let elements = elements_of(tiles.len() as u64).unwrap() as usize;
    let mut values = vec![0xaa; 1 + elements * dtype.size()];
    decode(level, tiles, &mut values[1..], dtype);
    values.split_off(1)
}

fn decoded(tiles: &[u8]) -> Vec<f32> {
    floats(&decoded_at(Level::best(), tiles, DType::F32))
}

/// What a receiver gets.
fn received(values: &[f32], rounding: &Rounding) -> Vec<f32> {
    decoded(&encoded(values, 0, rounding))
}

#[test]
fn encoded_values_equal_the_golden_vectors() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../../tests/golden/int8.json")).unwrap();
    assert_eq!(cases.len(), 7);
    for Case { seed, step, rank, tensor, first, values, bytes } in cases {
        let values = floats(&hex(&values));
        let rounding = match rank {
            u32::MAX => Rounding::of_parameters(seed, step, tensor),
            rank => Rounding::of_gradient(seed, step, tensor, rank),
        };
        for level in Level::all() {
            assert_eq!(encoded_at(level, &values, first, &rounding), hex(&bytes), "{level:?}");
        }
    }
}

/// Tiles with values of any size, infinities and NaNs among them.
fn values() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(prop_oneof![9 => any::<f32>(), 9 => -1.0f32..1.0], 1..600)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn chunks_change_no_bit(values in values(), tiles in prop::collection::vec(1usize..4, 1..5)) {
        let rounding = Rounding::of_gradient(1, 2, 0, 3);
        let expected = encoded(&values, 1024, &rounding);
        let (mut found, mut at) = (Vec::new(), 0);
        for tiles in tiles.iter().cycle() {
            let end = (at + tiles * TILE).min(values.len());
            found.extend(encoded(&values[at..end], 1024 + at as u64, &rounding));
            at = end;
            if at == values.len() { break }
        }
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits(values in values()) {
        let rounding = Rounding::of_gradient(1, 2, 0, 3);
        let tiles = encoded(&values, 1024, &rounding);
        for level in Level::all() {
            prop_assert_eq!(&encoded_at(level, &values, 1024, &rounding), &tiles);
            for dtype in DType::ALL {
                let best = decoded_at(Level::best(), &tiles, dtype);
                prop_assert_eq!(decoded_at(level, &tiles, dtype), best);
            }
        }
    }

    #[test]
    fn elements_of_other_dtypes_are_encoded_and_decoded_as_their_values_in_f32(values in values()) {
        let (rounding, level) = (Rounding::of_gradient(1, 2, 0, 3), Level::best());
        for dtype in DType::ALL {
            let elements = in_memory(&values, dtype);
            let mut exact = vec![0; values.len() * 4];
            cast(level, &elements[1..], dtype, &mut exact, DType::F32);
            let expected = encoded(&floats(&exact), 1024, &rounding);
            let mut tiles = vec![0; expected.len()];
            encode(level, &elements[1..], dtype, 1024, &rounding, &mut tiles);
            prop_assert_eq!(&tiles, &expected);
            let nearest = in_memory(&decoded(&tiles), dtype);
            prop_assert_eq!(&decoded_at(level, &tiles, dtype), &nearest[1..]);
        }
    }

    #[test]
    fn what_is_received_is_as_finite_as_what_was_sent_and_near(values in values()) {
        let received = received(&values, &Rounding::of_gradient(0, 0, 0, 0));
        for (tile, of) in values.chunks(TILE).zip(received.chunks(TILE)) {
            let is_finite = tile.iter().all(|value| value.is_finite());
            let largest = tile.iter().fold(0f32, |most, value| most.max(value.abs()));
            let scale = (f64::from(largest) / 127.0).max(f64::from(f32::MIN_POSITIVE));
            for (value, received) in tile.iter().zip(of) {
                prop_assert_eq!(value.is_nan(), received.is_nan());
                if value.is_infinite() {
                    prop_assert_eq!(value, received);
                } else if value.is_finite() {
                    prop_assert!(received.is_finite());
                    let error = (f64::from(*received) - f64::from(*value)).abs();
                    prop_assert!(!is_finite || error <= scale * 1.000_001, "{value} {received}");
                    prop_assert!(is_finite || *received == 0.0);
                }
            }
        }
    }

    #[test]
    fn any_bytes_are_decoded(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Some(elements) = elements_of(bytes.len() as u64) {
            prop_assert_eq!(decoded(&bytes).len() as u64, elements);
        }
    }
}

#[test]
fn the_mean_over_all_random_numbers_is_the_value() {
    // The definition, for every u that the generator can give.
    let sum = |value: f32, scale: f32| {
        let fixed = (value / scale * (1 << FRACTION) as f32).round_ties_even() as i32;
        (0..1i32 << FRACTION).map(|u| i64::from((fixed + u) >> FRACTION)).sum::<i64>()
    };
    for (value, scale) in [(1.0f32, 3.0 / 127.0), (-0.1, 1.0 / 127.0), (2e-3, 1.0), (-126.5, 1.0)] {
        let mean = sum(value, scale) as f64 / f64::from(1 << FRACTION) * f64::from(scale);
        let error = (mean - f64::from(value)).abs();
        // The quotient is rounded to f32, and then to a multiple of 2^-23.
        assert!(error <= f64::from(value.abs() * f32::EPSILON + scale * f32::EPSILON), "{value}");
    }
    assert_eq!(sum(-0.0, f32::MIN_POSITIVE), 0);
}

#[test]
fn the_rounding_is_unbiased_over_steps_ranks_tensors_and_tiles() {
    let values: Vec<f32> = (0..TILE * 4).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let mut sums = vec![0f64; values.len()];
    let mut runs = 0;
    for step in 0..32 {
        for rank in 0..8 {
            for tensor in 0..8 {
                let rounding = Rounding::of_gradient(5, step, tensor, rank);
                for (sum, value) in sums.iter_mut().zip(received(&values, &rounding)) {
                    *sum += f64::from(value);
                }
                runs += 1;
            }
        }
    }
    // The standard deviation of one rounding is at most half of a scale.
    let sigma = 0.5 / 127.0 / f64::from(runs).sqrt();
    let deviations: Vec<f64> = sums
        .iter()
        .zip(&values)
        .map(|(sum, value)| (sum / f64::from(runs) - f64::from(*value)) / sigma)
        .collect();
    let worst = deviations.iter().fold(0f64, |most, deviation| most.max(deviation.abs()));
    assert!(worst < 5.0, "{worst} sigma");
    let mean = deviations.iter().sum::<f64>() / deviations.len() as f64;
    assert!(mean.abs() * (deviations.len() as f64).sqrt() < 4.0, "{mean}");
}

#[test]
fn zeros_stay_zeros_of_a_positive_sign() {
    for values in [vec![0.0; 300], vec![-0.0; 128], [[0.0; 127].as_slice(), &[1.0]].concat()] {
        for step in 0..100 {
            let received = received(&values, &Rounding::of_gradient(0, step, 0, 0));
            for (value, received) in values.iter().zip(received) {
                assert!(*value != 0.0 || received.to_bits() == 0);
            }
        }
    }
}

#[test]
fn the_largest_value_of_a_tile_is_exact_within_a_unit_in_the_last_place() {
    for largest in
        [1.0f32, 3.0, 0.1, 1e-30, 1e38, f32::MAX, -f32::MAX, 127.0, f32::MIN_POSITIVE * 127.0]
    {
        for step in 0..50 {
            let of = received(&[largest, 0.0], &Rounding::of_gradient(0, step, 0, 0))[0];
            let error = (f64::from(of) - f64::from(largest)).abs();
            assert!(of.is_finite() && error <= f64::from(largest.abs()) * 3e-7, "{largest}: {of}");
        }
    }
    assert!((MOST * MAX_SCALE).is_finite());
    assert!((MOST * f32::from_bits(MAX_SCALE.to_bits() + 1)).is_infinite());
}

#[test]
fn denormal_values_are_rounded_to_multiples_of_the_smallest_normal_number() {
    let denormal = f32::from_bits(1 << 22);
    let mut ones = 0;
    for step in 0..1000 {
        let of = received(&[denormal, -denormal], &Rounding::of_gradient(0, step, 0, 0));
        assert!(of[0] == 0.0 || of[0] == f32::MIN_POSITIVE, "{}", of[0]);
        assert!(of[1] == 0.0 || of[1] == -f32::MIN_POSITIVE, "{}", of[1]);
        ones += u32::from(of[0] != 0.0);
    }
    // It is half of the smallest normal number.
    assert!((400..600).contains(&ones), "{ones}");
    let least = received(&[f32::from_bits(1)], &Rounding::of_gradient(0, 0, 0, 0));
    assert_eq!(least, [0.0]);
}

#[test]
fn infinity_and_nan_survive_where_they_are() {
    let mut values = vec![2.0f32; 300];
    (values[0], values[200], values[201]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let of = received(&values, &Rounding::of_gradient(0, 0, 0, 0));
    assert!(of[0].is_nan() && of[1..128].iter().all(|value| *value == 0.0));
    assert_eq!((of[200], of[201], of[199]), (f32::INFINITY, f32::NEG_INFINITY, 0.0));
    assert!(of[256..].iter().all(|value| value.is_finite() && *value != 0.0));
}

#[test]
fn a_scale_that_no_sender_writes_gives_no_number_that_is_taken_for_a_gradient() {
    for scale in [f32::NAN, f32::NEG_INFINITY] {
        let bytes = [&scale.to_le_bytes()[..], &[1, 0xff, 0x80, 0]].concat();
        let of = decoded(&bytes);
        assert_eq!((of[0], of[1], of[3]), (f32::INFINITY, f32::NEG_INFINITY, 0.0));
        assert!(of[2].is_nan());
    }
}
