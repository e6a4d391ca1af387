//! Maps floats to integers that keep their order.
//!
//! The mapping is a bijection on bit patterns, including those of NaN and -0.0. Negative floats map
//! to the smaller integers, positive floats to the larger ones, and -0.0 is the neighbour of 0.0.

use zeroshard_model::DType;

/// The bits of an element, as an unsigned integer of its size.
pub(crate) trait Bits: Copy + Eq {
    /// The number of bytes.
    const SIZE: usize;

    /// The sign bit.
    const SIGN: Self;

    /// Reads the element at the beginning of `bytes`.
    fn read(bytes: &[u8]) -> Self;

    /// Stores the element at the beginning of `bytes`.
    fn write(self, bytes: &mut [u8]);

    /// Widens the bits with zeros.
    fn widen(self) -> u32;

    /// Returns the element from its widened bits.
    fn narrow(bits: u32) -> Self;

    /// Returns the integer to which the float maps.
    fn ordered(self) -> Self;

    /// Returns `after.ordered() - self.ordered()`, modulo 2^16 or 2^32.
    fn difference_to(self, after: Self) -> u32;

    /// Returns the element that is `difference` further in the order. Reads only as many low bits
    /// of `difference` as an element has.
    fn moved(self, difference: u32) -> Self;
}

macro_rules! bits {
    ($unsigned:ident, $signed:ident) => {
        impl Bits for $unsigned {
            const SIZE: usize = size_of::<Self>();
            const SIGN: Self = 1 << (Self::BITS - 1);

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                let (first, _) = bytes.split_first_chunk().expect("a whole element");
                Self::from_le_bytes(*first)
            }

            #[inline(always)]
            fn write(self, bytes: &mut [u8]) {
                bytes[..Self::SIZE].copy_from_slice(&self.to_le_bytes());
            }

            #[inline(always)]
            fn widen(self) -> u32 {
                u32::from(self)
            }

            #[inline(always)]
            fn narrow(bits: u32) -> Self {
                bits as Self
            }

            #[inline(always)]
            fn ordered(self) -> Self {
                // A negative float has all bits inverted, any other float only the sign.
                self ^ ((self as $signed >> ($unsigned::BITS - 1)) as $unsigned | Self::SIGN)
            }

            #[inline(always)]
            fn difference_to(self, after: Self) -> u32 {
                u32::from(after.ordered().wrapping_sub(self.ordered()))
            }

            #[inline(always)]
            fn moved(self, difference: u32) -> Self {
                let moved = self.ordered().wrapping_add(difference as $unsigned);
                if moved & Self::SIGN != 0 { moved ^ Self::SIGN } else { !moved }
            }
        }
    };
}

bits!(u16, i16);
bits!(u32, i32);

/// The number of bits in an element.
pub(crate) fn width(dtype: DType) -> u32 {
    8 * dtype.size() as u32
}

/// A mask of the low bits of a `u32` that an element fills.
pub(crate) fn mask(dtype: DType) -> u32 {
    u32::MAX >> (u32::BITS - width(dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_float_differs_by_one_for_all_bit_patterns() {
        let mut floats: Vec<half::f16> = (0..=u16::MAX).map(half::f16::from_bits).collect();
        floats.sort_by(half::f16::total_cmp);
        for pair in floats.windows(2) {
            let [before, after] = [pair[0].to_bits(), pair[1].to_bits()];
            assert_eq!((before.difference_to(after), after.difference_to(before)), (1, 0xffff));
        }
    }

    #[test]
    fn moving_by_the_difference_gives_the_other_float() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100_000 {
            let (before, after) = (random.u32(..), random.u32(..));
            assert_eq!(before.moved(before.difference_to(after)), after);
            let (before, after) = (before as u16, after as u16);
            assert_eq!(before.moved(before.difference_to(after)), after);
        }
        let [minus_zero, zero] = [-0.0f32, 0.0].map(f32::to_bits);
        assert_eq!(minus_zero.difference_to(zero), 1);
    }
}
