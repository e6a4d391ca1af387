//! Casts, compared with those of the `half` crate, in every instruction set. Tests of backends
//! (`server/kernels/src/conformance/conversions.rs`) cover the other loops.

use half::{bf16, f16};

use super::*;

/// The value of an element of 16 bits.
fn value(bits: u16, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
}

/// All elements of 16 bits, at an odd address.
fn all_halves() -> Vec<u8> {
    [0].into_iter().chain((0..=u16::MAX).flat_map(u16::to_le_bytes)).collect()
}

/// Values of every exponent, at and near the ties between neighbouring halves.
fn hard_values() -> Vec<f32> {
    let near = |top: u32| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| top << 16 | low);
    let ties = |top: u32| [0xfff, 0x1000, 0x1001, 0x2fff, 0x3000].map(|low| (top << 16) + low);
    let bits = (0..=0xffff).flat_map(|top| near(top).into_iter().chain(ties(top)));
    bits.map(f32::from_bits).collect()
}

#[test]
fn every_half_is_cast_to_its_value() {
    let halves = all_halves();
    for (level, dtype) in
        Level::all().into_iter().flat_map(|level| [(level, DType::Bf16), (level, DType::F16)])
    {
        let mut out = vec![0; 0x1_0000 * 4 + 3];
        assert!(!cast(level, &halves[1..], dtype, &mut out[3..], DType::F32));
        for (bits, found) in (0..=u16::MAX).zip(out[3..].as_chunks().0) {
            let (found, expected) = (f32::from_le_bytes(*found), value(bits, dtype));
            let is_same = found.to_bits() == expected.to_bits();
            assert!(is_same || found.is_nan() && expected.is_nan(), "{level:?} {dtype} {bits:#x}");
        }
    }
}

#[test]
fn every_value_is_cast_to_the_nearest_half() {
    let values = hard_values();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for level in Level::all() {
        let mut out = vec![0; values.len() * 2];
        cast(level, &bytes, DType::F32, &mut out, DType::Bf16);
        for (value, found) in values.iter().zip(out.as_chunks().0) {
            assert_eq!(bf16::from_le_bytes(*found).to_bits(), bf16::from_f32(*value).to_bits());
        }
        cast(level, &bytes, DType::F32, &mut out, DType::F16);
        for (value, found) in values.iter().zip(out.as_chunks().0) {
            let expected = f16::from_f32(*value).to_bits();
            assert_eq!(f16::from_le_bytes(*found).to_bits(), expected, "{level:?} {value:e}");
        }
    }
}

#[test]
fn halves_are_cast_to_each_other_through_f32() {
    let halves = all_halves();
    for (from, to) in DType::ALL.into_iter().flat_map(|from| DType::ALL.map(|to| (from, to))) {
        let (mut exact, mut expected) = (vec![0; 0x2_0000 / from.size() * 4], Vec::new());
        cast(Level::best(), &halves[1..], from, &mut exact, DType::F32);
        expected.resize(exact.len() / 4 * to.size(), 0);
        cast(Level::best(), &exact, DType::F32, &mut expected, to);
        for level in Level::all() {
            let mut found = vec![0xaa; expected.len()];
            cast(level, &halves[1..], from, &mut found, to);
            assert_eq!(found, expected, "{level:?} {from} {to}");
        }
    }
}

#[test]
fn only_infinities_and_nan_are_told() {
    for (from, to) in DType::ALL.into_iter().flat_map(|from| DType::ALL.map(|to| (from, to))) {
        for special in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0] {
            let mut values = [1.0; 67];
            values[61] = special;
            let bytes = values.map(f32::to_le_bytes);
            let (mut elements, mut out) = (vec![0; 67 * from.size()], vec![0; 67 * to.size()]);
            cast(Level::best(), bytes.as_flattened(), DType::F32, &mut elements, from);
            let is_finite = cast(Level::best(), &elements, from, &mut out, to);
            assert_eq!(is_finite, special.is_finite(), "{from} {to} {special}");
        }
    }
}
