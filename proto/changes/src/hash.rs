//! Hashes the values of a slice as a sum over its elements.
//!
//! If a step changes a few elements, only their terms of the sum change. So neither a server nor a
//! reader reads the whole slice again after a step. Each term depends on the element's position in
//! its tensor and on all of its bits. The hash detects mistakes but not forgery: readers trust
//! their servers.
//!
//! The terms are not linear in the bits, unlike those of `zeroshard_loops::tally`. A change adds to
//! a value, so a linear term would grow alike whatever the value was before. It would not show that
//! somebody else has written to the value.

// The loop is compiled for the instruction set found at run time, and calls of such functions are
// unsafe.
#![allow(unsafe_code)]

use zeroshard_loops::vectorised;
use zeroshard_model::DType;

use crate::ordered::Bits;

/// Returns the term of the element at position `index` of its tensor.
#[inline(always)]
fn term(index: u64, bits: u32) -> u64 {
    // The factor is odd, so it keeps positions distinct. The rest is the finalizer of MurmurHash3.
    let mut x = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(bits) << 16);
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Returns by how much the hash grows, modulo 2^64, when an element changes from the bits `before`
/// to `after`.
#[inline(always)]
pub(crate) fn term_change(index: u64, before: u32, after: u32) -> u64 {
    term(index, after).wrapping_sub(term(index, before))
}

vectorised! {
    /// Returns by how much the hash grows when elements change from the first bits to the second.
    /// `first` is added to all positions.
    pub fn changes(first: u64, positions: &[u16], bits: &[[u32; 2]]) -> u64 {
        let terms = positions.iter().zip(bits).map(|(&position, &[before, after])| {
            term_change(first.wrapping_add(u64::from(position)), before, after)
        });
        terms.fold(0, u64::wrapping_add)
    }
}

/// Returns the hash of consecutive elements of a tensor, given as little-endian bytes of `dtype`.
/// `first` is the position of the first element in the tensor.
pub fn of(dtype: DType, first: u64, values: &[u8]) -> u64 {
    fn sum<T: Bits>(first: u64, values: &[u8]) -> u64 {
        let elements = (first..).zip(values.chunks_exact(T::SIZE));
        elements.fold(0, |sum: u64, (index, value)| {
            sum.wrapping_add(term(index, T::read(value).widen()))
        })
    }
    match dtype {
        DType::F32 => sum::<u32>(first, values),
        DType::Bf16 | DType::F16 => sum::<u16>(first, values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_depends_on_each_bit_and_position() {
        let values: Vec<u8> = (0..64u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let all = of(DType::F32, 100, &values);
        for bit in 0..values.len() * 8 {
            let mut other = values.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(DType::F32, 100, &other), all);
        }
        let mut swapped = values.clone();
        swapped.rotate_left(4);
        assert_ne!(of(DType::F32, 100, &swapped), all);
        assert_ne!(of(DType::F32, 101, &values), all);
        assert_ne!(of(DType::Bf16, 100, &values), all);
    }

    #[test]
    fn the_hash_of_two_parts_is_the_sum() {
        let values: Vec<u8> = (0..4_000u32).map(|i| (i * 31) as u8).collect();
        let (one, other) = values.split_at(1_200);
        let sum = of(DType::F16, 7, one).wrapping_add(of(DType::F16, 607, other));
        assert_eq!(sum, of(DType::F16, 7, &values));
    }
}
