//! Floats as integers of the same order.
//!
//! The mapping is a bijection on bit patterns, NaN and -0.0 included: the integers of the negative
//! floats come first, in their order, followed by those of the positive ones. -0.0 and 0.0 are
//! neighbours.

use zeroshard_model::DType;

/// The bits of an element, as an unsigned integer of its size.
pub(crate) trait Bits: Copy + Eq {
    /// The number of bytes.
    const SIZE: usize;

    /// The element at the beginning of `bytes`.
    fn read(bytes: &[u8]) -> Self;

    /// Stores the element at the beginning of `bytes`.
    fn write(self, bytes: &mut [u8]);

    /// The bits, widened.
    fn widen(self) -> u32;

    /// The element whose widened bits these are.
    fn narrow(bits: u32) -> Self;

    /// `ordered(after) - ordered(self)`, modulo 2 to the number of bits.
    fn difference_to(self, after: Self) -> u32;

    /// The element that differs by `difference`, of which the upper bits are not read.
    fn moved(self, difference: u32) -> Self;
}

macro_rules! bits {
    ($unsigned:ident, $signed:ident) => {
        impl Bits for $unsigned {
            const SIZE: usize = size_of::<Self>();

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
            fn difference_to(self, after: Self) -> u32 {
                let order = |bits: Self| {
                    const SIGN: $unsigned = 1 << ($unsigned::BITS - 1);
                    // All bits of a negative float are inverted, of another one the sign.
                    bits ^ ((bits as $signed >> ($unsigned::BITS - 1)) as $unsigned | SIGN)
                };
                u32::from(order(after).wrapping_sub(order(self)))
            }

            #[inline(always)]
            fn moved(self, difference: u32) -> Self {
                const SIGN: $unsigned = 1 << ($unsigned::BITS - 1);
                let ordered =
                    self ^ ((self as $signed >> ($unsigned::BITS - 1)) as $unsigned | SIGN);
                let moved = ordered.wrapping_add(difference as $unsigned);
                if moved & SIGN != 0 { moved ^ SIGN } else { !moved }
            }
        }
    };
}

bits!(u16, i16);
bits!(u32, i32);

/// The number of bits of an element.
pub(crate) fn width(dtype: DType) -> u32 {
    8 * dtype.size() as u32
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
