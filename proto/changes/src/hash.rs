//! The hash of the content of a slice: a sum over its elements.
//!
//! Because it is a sum, a change of a few elements changes it by a few terms: neither a server nor
//! a reader reads the whole slice again after a step. Each term depends on the position of the
//! element in its tensor and on all of its bits. It detects mistakes, not forgery: a reader trusts
//! its servers.

use zeroshard_model::DType;

use crate::ordered::Bits;

/// The term of an element: `index` is its position in the tensor.
#[inline(always)]
pub(crate) fn term(index: u64, bits: u32) -> u64 {
    // The finalizer of MurmurHash3 after an injective combination: 2^64 / the golden ratio is odd.
    let mut x = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(bits) << 16);
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// The hash of consecutive elements of a tensor as little-endian bytes of `dtype`: the sum of their
/// terms. `first`: the position of the first one in the tensor.
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
