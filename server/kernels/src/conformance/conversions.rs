//! Compares store, accumulate, read and copy with the scalar casts of the `half` crate.

use std::sync::Arc;

use zeroshard_model::{DType, SliceSpec, StridedBox, TensorBox};

use super::{assert_same, buffer_of, contents, from_bytes, hash, numbers, to_bytes};
use crate::Backend;

pub(super) fn run<B: Backend>(backend: &B) {
    for dtype in DType::ALL {
        every_value_is_decoded(backend, dtype);
        hard_values_are_encoded(backend, dtype);
        an_extent_is_stored(backend, dtype);
        an_extent_is_added(backend, dtype);
        only_incoming_special_values_are_told(backend, dtype);
        a_box_is_its_elements_one_by_one(backend, dtype);
        every_nan_becomes_the_same_one(backend, dtype);
        for other in DType::ALL {
            copies_cast(backend, dtype, other);
        }
    }
}

/// All values of 16 bits; in f32 the same number of values, with every exponent.
fn every_value_is_decoded<B: Backend>(backend: &B, dtype: DType) {
    let element = |i: u32| match dtype {
        DType::F32 => (i << 16 | hash(i as usize) >> 16).to_le_bytes().to_vec(),
        DType::Bf16 | DType::F16 => (i as u16).to_le_bytes().to_vec(),
    };
    let bytes: Vec<u8> = (0..=0xFFFF).flat_map(element).collect();
    let mut buffer = backend.allocate(DType::F32, 0x1_0000).unwrap();
    let finite = backend.store(&mut buffer, 0..0x1_0000, &bytes, dtype).unwrap();
    assert!(!finite, "infinities and NaN are among them");
    let (stored, _) = contents(backend, buffer);
    let expected = from_bytes(&bytes, dtype);
    assert_same(&from_bytes(&stored, DType::F32), &expected, &format!("decode {dtype}"));
}

/// Values of every exponent, at and near the ties between neighbouring values of both
/// half-precision formats.
fn hard_values() -> Vec<f32> {
    let mut values = Vec::new();
    for top in 0..=0xFFFFu32 {
        for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
            values.push(f32::from_bits(top << 16 | low));
        }
    }
    for half in 0..=0xFFFFu16 {
        let bits = half::f16::from_bits(half).to_f32().to_bits();
        let quarter_ulp = 1u32 << 11;
        for bits in [bits + quarter_ulp, bits + 2 * quarter_ulp, bits + 2 * quarter_ulp + 1] {
            values.push(f32::from_bits(bits));
            values.push(f32::from_bits(bits.wrapping_sub(1)));
        }
    }
    // Ties between subnormal halves, whose unit in the last place is 2^-24.
    for odd in (1..2_048).step_by(2) {
        let tie = (odd as f32) * 2f32.powi(-25);
        values.extend([tie, -tie, tie.next_up(), tie.next_down()]);
    }
    values
}

fn hard_values_are_encoded<B: Backend>(backend: &B, dtype: DType) {
    let values = hard_values();
    let buffer = Arc::new(buffer_of(backend, &values, DType::F32));
    let bytes = backend.read(&buffer, 0..values.len(), dtype).unwrap();
    let expected = to_bytes(&values, dtype);
    let what = format!("encode {dtype}");
    assert_same(&from_bytes(&bytes, dtype), &from_bytes(&expected, dtype), &what);
    let part = backend.read(&buffer, 77..10_001, dtype).unwrap();
    assert_eq!(part, bytes.slice(77 * dtype.size()..10_001 * dtype.size()), "part of {what}");
}

/// Stores an extent at an odd address in the middle of a buffer of any dtype.
fn an_extent_is_stored<B: Backend>(backend: &B, dtype: DType) {
    let values = numbers(1, 3_001);
    let mut bytes = vec![0];
    bytes.extend(to_bytes(&values, dtype));
    let incoming = from_bytes(&bytes[1..], dtype);
    for to in DType::ALL {
        let before = numbers(2, 5_003);
        let mut buffer = buffer_of(backend, &before, to);
        // A large number is infinite as f16.
        let finite = incoming.iter().all(|value| value.is_finite());
        assert_eq!(backend.store(&mut buffer, 1_001..4_002, &bytes[1..], dtype).unwrap(), finite);
        let mut expected = before;
        expected[1_001..4_002].copy_from_slice(&incoming);
        let (stored, _) = contents(backend, buffer);
        assert_eq!(stored, to_bytes(&expected, to), "store {dtype} into {to}");
    }
}

fn an_extent_is_added<B: Backend>(backend: &B, dtype: DType) {
    let mut bytes = vec![0];
    bytes.extend(to_bytes(&numbers(3, 3_001), dtype));
    let incoming = from_bytes(&bytes[1..], dtype);
    let mut expected = numbers(4, 5_003);
    let mut buffer = buffer_of(backend, &expected, DType::F32);
    backend.accumulate(&mut buffer, 1_001..4_002, &bytes[1..], dtype).unwrap();
    for (sum, value) in expected[1_001..].iter_mut().zip(incoming) {
        *sum += value;
    }
    let (added, _) = contents(backend, buffer);
    assert_same(&from_bytes(&added, DType::F32), &expected, &format!("accumulate {dtype}"));
}

fn only_incoming_special_values_are_told<B: Backend>(backend: &B, dtype: DType) {
    let numel = 257;
    let infinite = vec![f32::INFINITY; numel];
    let finite = to_bytes(&vec![1.0; numel], dtype);
    let mut buffer = buffer_of(backend, &infinite, DType::F32);
    assert!(backend.accumulate(&mut buffer, 0..numel, &finite, dtype).unwrap());
    assert!(backend.store(&mut buffer, 0..numel, &finite, dtype).unwrap());
    assert!(
        backend.accumulate(&mut buffer, numel..numel, &[], dtype).unwrap(),
        "nothing is finite"
    );
    for special in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        for at in [0, 1, 63, 128, numel - 1] {
            let mut values = vec![1.0; numel];
            values[at] = special;
            let bytes = to_bytes(&values, dtype);
            assert!(!backend.store(&mut buffer, 0..numel, &bytes, dtype).unwrap());
            assert!(!backend.accumulate(&mut buffer, 0..numel, &bytes, dtype).unwrap());
        }
    }
}

/// A box of columns is stored, added and read in the same way as its elements one by one.
fn a_box_is_its_elements_one_by_one<B: Backend>(backend: &B, dtype: DType) {
    let bounds = TensorBox { offset: vec![1, 0, 300], size: vec![2, 3, 500] };
    let strided = Arc::new(StridedBox::new(&[4, 3, 1_003], bounds));
    // The slice begins and ends inside the box.
    let slice = SliceSpec { tensor: 0, offset: 4_000, numel: 4_500 };
    let numel = slice.numel;
    let elements = strided.elements(&slice);
    let places: Vec<usize> = elements.runs().flatten().collect();
    assert!(elements.runs().count() > 2 && elements.numel() == places.len());

    let bytes = to_bytes(&numbers(8, places.len()), dtype);
    let incoming = from_bytes(&bytes, dtype);
    let finite = incoming.iter().all(|value| value.is_finite());
    for to in DType::ALL {
        let mut expected = numbers(9, numel);
        let mut buffer = buffer_of(backend, &expected, to);
        assert_eq!(backend.store(&mut buffer, elements.clone(), &bytes, dtype).unwrap(), finite);
        places.iter().zip(&incoming).for_each(|(&place, &value)| expected[place] = value);
        let (stored, buffer) = contents(backend, buffer);
        assert_eq!(stored, to_bytes(&expected, to), "store a box of {dtype} into {to}");
        let all = from_bytes(&stored, to);
        let inside: Vec<f32> = places.iter().map(|&place| all[place]).collect();
        let read = backend.read(&Arc::new(buffer), elements.clone(), dtype).unwrap();
        assert_eq!(read, to_bytes(&inside, dtype), "read a box of {to} as {dtype}");
    }
    let mut expected = numbers(9, numel);
    let mut buffer = buffer_of(backend, &expected, DType::F32);
    assert_eq!(backend.accumulate(&mut buffer, elements, &bytes, dtype).unwrap(), finite);
    places.iter().zip(&incoming).for_each(|(&place, &value)| expected[place] += value);
    let (added, _) = contents(backend, buffer);
    assert_same(
        &from_bytes(&added, DType::F32),
        &expected,
        &format!("accumulate a box of {dtype}"),
    );
}

/// Only the requested elements change, and only their NaN bits, whatever was stored or added in any
/// dtype.
fn every_nan_becomes_the_same_one<B: Backend>(backend: &B, dtype: DType) {
    let numel = 0x1_0000;
    let element = |i: u32| match dtype {
        DType::F32 => (i << 16 | hash(i as usize) >> 16).to_le_bytes().to_vec(),
        DType::Bf16 | DType::F16 => (i as u16).to_le_bytes().to_vec(),
    };
    let bytes: Vec<u8> = (0..numel as u32).flat_map(element).collect();
    for add in [false, true] {
        // Infinities are added to infinities of the opposite sign.
        let before = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, -0.0].repeat(numel / 5 + 1);
        let mut buffer = buffer_of(backend, &before[..numel], DType::F32);
        let finite = match add {
            false => backend.store(&mut buffer, 0..numel, &bytes, dtype).unwrap(),
            true => backend.accumulate(&mut buffer, 0..numel, &bytes, dtype).unwrap(),
        };
        assert!(!finite);
        let (mixed, mut buffer) = contents(backend, buffer);
        backend.canonicalise(&mut buffer, 77..numel - 77).unwrap();
        let (canonical, _) = contents(backend, buffer);
        let words = |bytes: &[u8]| {
            bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect::<Vec<_>>()
        };
        for (i, (actual, was)) in words(&canonical).into_iter().zip(words(&mixed)).enumerate() {
            let inside = (77..numel - 77).contains(&i);
            let expected = if inside && f32::from_bits(was).is_nan() { 0x7fc0_0000 } else { was };
            assert_eq!(actual, expected, "element {i} of {dtype}");
        }
    }
}

fn copies_cast<B: Backend>(backend: &B, from: DType, to: DType) {
    let values = from_bytes(&to_bytes(&numbers(5, 5_003), from), from);
    let src = buffer_of(backend, &values, from);
    let mut dst = backend.allocate(to, values.len()).unwrap();
    backend.copy(&src, &mut dst).unwrap();
    let (copied, _) = contents(backend, dst);
    assert_eq!(copied, to_bytes(&values, to), "copy {from} to {to}");
}
