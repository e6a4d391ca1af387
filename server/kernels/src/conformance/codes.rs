//! 8-bit state as scalar code in f64, and the operations on buffers of it.

use std::sync::Arc;

use zeroshard_model::{
    DType, Elements, SliceSpec, StateDType, StridedBox, TensorBox, geometry::blocks::TILE,
    optimizer::Code,
};

use super::{assert_same, buffer_of, from_bytes, numbers, to_bytes};
use crate::{
    Backend, Failure, Update,
    random::{self, TileKey},
};

const CODES: [Code; 2] = [Code::Signed, Code::Positive];

/// The number of bits of the mantissa of a code.
fn bits(code: Code) -> i32 {
    match code {
        Code::Signed => 4,
        Code::Positive => 3,
    }
}

/// The number of bits of an f32's mantissa that a code cuts off.
fn cut(code: Code) -> i32 {
    23 - bits(code)
}

/// `1 + magnitude` of each code, in tiles of which 1 is the number that is added.
fn with_bias(code: Code) -> Vec<f64> {
    let of_field = 1 << bits(code);
    let codes = if code == Code::Signed { 128 } else { 256 };
    let number = |code: i32| {
        let mantissa = 1.0 + f64::from(code % of_field) / f64::from(of_field);
        mantissa * 2f64.powi(code / of_field)
    };
    (0..codes).map(number).collect()
}

/// The values of one tile after rounding. `carry` decides whether a value is rounded up, given the
/// element, the lower neighbour's code, and the part of the gap between the neighbours.
fn rounded(
    code: Code,
    values: &[f32],
    next: i32,
    carry: impl Fn(usize, usize, f64) -> bool,
) -> Vec<f32> {
    let codes = with_bias(code);
    // Small numbers are lost beside large ones, as in f32.
    let magnitude = |with_bias: f64| f64::from((with_bias - 1.0) as f32);
    let most = magnitude(codes[codes.len() - 1]);
    let largest = values.iter().fold(0.0f64, |most, &value| most.max(f64::from(value.abs())));
    let has_code = |&value: &f32| value.is_finite() && (code == Code::Signed || value >= 0.0);
    // The factor of a tile whose largest magnitudes have this exponent field.
    let unit = |field: i32| 2f64.powi(field - 127 - most.log2().floor() as i32);
    let field = (35..=254).find(|&field| largest <= most * unit(field));
    let Some(field) = field.filter(|_| values.iter().all(has_code)).map(|field| field + next)
    else {
        return vec![f32::NAN; values.len()];
    };
    let round = |(i, &value): (usize, &f32)| {
        let with_bias = (f64::from(value.abs()) / unit(field)) as f32 + 1.0;
        let below = codes.partition_point(|&of| of <= f64::from(with_bias)) - 1;
        let mut found = below;
        if let Some(above) = codes.get(below + 1) {
            let part = (f64::from(with_bias) - codes[below]) / (above - codes[below]);
            found += usize::from(carry(i, below, part));
        }
        if code == Code::Positive && value > 0.0 {
            found = found.max(1);
        }
        let rounded = (magnitude(codes[found]) * unit(field)) as f32;
        if code == Code::Signed { rounded.copysign(value) } else { rounded }
    };
    values.iter().enumerate().map(round).collect()
}

/// The values of a state tensor that was stored.
pub(super) fn stored(code: Code, values: &[f32]) -> Vec<f32> {
    let to_even = |_, below: usize, part: f64| part > 0.5 || part == 0.5 && below % 2 == 1;
    let encode = |tile: &[f32]| {
        // What was decoded has a code with one of two exponents.
        let [found, next] = [0, 1].map(|next| rounded(code, tile, next, to_even));
        if next == tile { next } else { found }
    };
    values.chunks(TILE).flat_map(encode).collect()
}

/// The values of state tensor number `position` after a step that computed `values`.
pub(super) fn stepped(code: Code, values: &[f32], update: &Update<'_>, position: u32) -> Vec<f32> {
    let key = random::key(update.step, update.at.tensor);
    let first = update.at.element / TILE as u64;
    let round = |(tile, values): (u64, &[f32])| {
        let bits = TileKey::new(key, first + tile).bits(position as usize);
        let carry = |i: usize, _, part: f64| {
            let random = bits(i) >> (32 - cut(code));
            part + f64::from(random) / 2f64.powi(cut(code)) >= 1.0
        };
        rounded(code, values, 0, carry)
    };
    (0..).zip(values.chunks(TILE)).flat_map(round).collect()
}

/// Numbers that a code has: of squares, positive ones.
pub(super) fn numbers_for(code: Code, seed: usize, numel: usize) -> Vec<f32> {
    let mut values = numbers(seed, numel);
    if code == Code::Positive {
        values.iter_mut().for_each(|value| *value *= *value);
    }
    values
}

/// A buffer of 8-bit state with these values, rounded to nearest.
pub(super) fn coded<B: Backend>(backend: &B, code: Code, values: &[f32]) -> B::Buffer {
    let mut buffer = backend.allocate_coded(code, values.len()).unwrap();
    let bytes = to_bytes(values, DType::F32);
    backend.store(&mut buffer, 0..values.len(), &bytes, DType::F32).unwrap();
    buffer
}

pub(super) fn run<B: Backend>(backend: &B) {
    for code in CODES {
        for numel in [0, 1, 127, 128, 129, 1_003, 70_001] {
            new_state_is_zero(backend, code, numel);
            what_is_stored_is_rounded_to_nearest(backend, code, numel);
            copies_decode_and_encode(backend, code, numel);
        }
        whole_tiles_are_stored_alone(backend, code);
        any_elements_are_read(backend, code);
        let refused = backend.allocate_coded(code, usize::MAX).err();
        assert!(matches!(refused, Some(Failure::OutOfMemory { .. })), "{refused:?}");
    }
}

fn assert_values<B: Backend>(backend: &B, buffer: B::Buffer, expected: &[f32], what: &str) {
    let bytes = backend.read(&Arc::new(buffer), 0..expected.len(), DType::F32).unwrap();
    assert_same(&from_bytes(&bytes, DType::F32), expected, what);
}

fn new_state_is_zero<B: Backend>(backend: &B, code: Code, numel: usize) {
    let buffer = backend.allocate_coded(code, numel).unwrap();
    assert_eq!((backend.numel(&buffer), backend.dtype(&buffer)), (numel, DType::F32));
    assert_eq!(backend.bytes(&buffer), StateDType::Int8.bytes(numel));
    let another = backend.another(&buffer).unwrap();
    assert_eq!(backend.bytes(&another), backend.bytes(&buffer));
    assert_values(backend, buffer, &vec![0.0; numel], "new state");
}

fn what_is_stored_is_rounded_to_nearest<B: Backend>(backend: &B, code: Code, numel: usize) {
    for dtype in DType::ALL {
        let values = from_bytes(&to_bytes(&numbers_for(code, 40, numel), dtype), dtype);
        let mut buffer = backend.allocate_coded(code, numel).unwrap();
        let stored = backend.store(&mut buffer, 0..numel, &to_bytes(&values, dtype), dtype);
        assert_eq!(stored.unwrap(), values.iter().all(|value| value.is_finite()));
        assert_values(backend, buffer, &self::stored(code, &values), &format!("{code:?} {dtype}"));
    }
}

fn copies_decode_and_encode<B: Backend>(backend: &B, code: Code, numel: usize) {
    let values = numbers_for(code, 41, numel);
    let expected = stored(code, &values);
    let mut buffer = backend.allocate_coded(code, numel).unwrap();
    backend.copy(&buffer_of(backend, &values, DType::F32), &mut buffer).unwrap();
    let mut another = backend.another(&buffer).unwrap();
    backend.copy(&buffer, &mut another).unwrap();
    let mut decoded = backend.allocate(DType::F32, numel).unwrap();
    backend.copy(&another, &mut decoded).unwrap();
    assert_values(backend, buffer, &expected, "encoded");
    assert_values(backend, decoded, &expected, "decoded");
}

fn whole_tiles_are_stored_alone<B: Backend>(backend: &B, code: Code) {
    let values = numbers_for(code, 42, 1_003);
    let mut expected = stored(code, &values);
    let mut buffer = coded(backend, code, &values);
    for (tiles, seed) in [(128..384, 43), (896..1_003, 44), (0..128, 45)] {
        let new = numbers_for(code, seed, tiles.len());
        backend.store(&mut buffer, tiles.clone(), &to_bytes(&new, DType::F32), DType::F32).unwrap();
        expected[tiles].copy_from_slice(&stored(code, &new));
    }
    let mut another = backend.another(&buffer).unwrap();
    for tiles in [0..256, 256..1_003] {
        let bytes = backend.read_tiles(&buffer, tiles.clone()).unwrap();
        assert_eq!(bytes.len(), StateDType::Int8.bytes(tiles.len()));
        backend.store_tiles(&mut another, tiles, &bytes).unwrap();
    }
    assert_values(backend, buffer, &expected, "some tiles");
    assert_values(backend, another, &expected, "tiles as they are stored");
}

fn any_elements_are_read<B: Backend>(backend: &B, code: Code) {
    let values = numbers_for(code, 46, 60 * 70);
    let expected = stored(code, &values);
    let buffer = Arc::new(coded(backend, code, &values));
    let part = TensorBox { offset: vec![3, 50], size: vec![40, 13] };
    let slice = SliceSpec { tensor: 0, offset: 0, numel: 60 * 70 };
    let of_box = Arc::new(StridedBox::new(&[60, 70], part)).elements(&slice);
    for elements in [Elements::from(0..0), (5..6).into(), (100..1_100).into(), of_box] {
        for dtype in DType::ALL {
            let found = backend.read(&buffer, elements.clone(), dtype).unwrap();
            let these: Vec<f32> =
                elements.runs().flat_map(|run| expected[run].iter().copied()).collect();
            let these = from_bytes(&to_bytes(&these, dtype), dtype);
            assert_same(&from_bytes(&found, dtype), &these, &format!("{code:?} {elements:?}"));
        }
    }
}
