//! Reads the bits of a block: the loop in which a reader spends most of its time.

// The loop is compiled for the instruction set found at run time, and calls of such functions are
// unsafe.
#![allow(unsafe_code)]

use zeroshard_loops::vectorised;

use crate::{bits::Reader, block::BLOCK};

/// The cause if the bytes end within a block.
pub(crate) const SHORT: &str = "it ends early";
/// The cause if a gap leads past the last element.
const OUTSIDE: &str = "a change is outside of the block";
/// The cause if a difference does not fit into an element.
const LARGE: &str = "a difference is too large";

/// How the bits of a block encode its changes.
pub(crate) struct Code {
    /// The number of elements in the block.
    pub(crate) len: usize,
    /// The parameter of the gap code.
    pub(crate) gaps: u32,
    /// The parameter of the magnitude code, less than `width`.
    pub(crate) magnitudes: u32,
    /// The number of bits in an element.
    pub(crate) width: u32,
}

vectorised! {
    /// Reads the position and the difference of each changed element. Returns the number of bytes
    /// read, or the cause if the bits are malformed.
    pub fn read_changes(
        code: &Code,
        bytes: &[u8],
        positions: &mut [u16],
        differences: &mut [u32],
    ) -> Result<usize, &'static str> {
        let &Code { len, gaps, magnitudes, width } = code;
        let (most_zeros, gap_mask) = (BLOCK as u32 >> gaps, (1 << gaps) - 1);
        let mask = u32::MAX >> (u32::BITS - width);
        let (mut bits, mut next) = (Reader::new(bytes), 0);
        for (at, difference_of) in positions.iter_mut().zip(differences) {
            // Almost always the reader has all bits of the change at hand. No branch then depends
            // on them.
            let ahead = bits.peek();
            let high = ahead.trailing_zeros();
            let after_zeros = ahead >> (high & 63) >> 1;
            let after_gap = after_zeros >> gaps;
            let more = after_gap.trailing_zeros();
            let most = (more & 63) + magnitudes;
            let length = high + gaps + more + most + 3;
            let (gap, difference) = if length <= 56 && high <= most_zeros && most < width {
                bits.skip(length);
                let low = after_gap >> more >> 1;
                let coded = (1 << most) | (low & ((1 << most) - 1));
                let magnitude = (coded - (1 << magnitudes)) as u32 + 1;
                let is_negative = (low >> most) as u32 & 1;
                // Inverts the bits and adds one if it is negative.
                let difference = (magnitude ^ is_negative.wrapping_neg()).wrapping_add(is_negative);
                ((high << gaps) | (after_zeros as u32 & gap_mask), difference)
            } else {
                let one;
                (bits, one) = read_long(bits, code)?;
                one
            };
            let position = next + gap as usize;
            if position >= len {
                return Err(OUTSIDE);
            }
            next = position + 1;
            (*at, *difference_of) = (position as u16, difference & mask);
        }
        bits.end().ok_or(SHORT)
    }
}

/// Reads a change of any length. It takes the reader by value, so that [`read_changes`] keeps it in
/// registers.
#[cold]
#[inline(never)]
fn read_long<'a>(
    mut bits: Reader<'a>,
    &Code { gaps, magnitudes, width, .. }: &Code,
) -> Result<(Reader<'a>, (u32, u32)), &'static str> {
    let high = bits.unary(BLOCK as u32 >> gaps).ok_or(OUTSIDE)?;
    let gap = (high << gaps) | bits.read(gaps);
    let most = bits.unary(width - magnitudes).ok_or(LARGE)? + magnitudes;
    if most > width - 1 {
        return Err(LARGE);
    }
    let coded = (1u64 << most) | u64::from(bits.read(most));
    let magnitude = (coded - (1 << magnitudes)) as u32 + 1;
    let difference = if bits.read(1) == 1 { magnitude.wrapping_neg() } else { magnitude };
    Ok((bits, (gap, difference)))
}
