//! Encodes a change of a slice block by block, each block in the smallest of three forms. The first
//! byte is the number of the form:
//!
//! - Empty: a zero. No element has changed.
//! - Raw: a one, and the difference of each element as a little-endian integer.
//! - Coded: a two, the parameter of the gap code (one byte), the parameter of the magnitude code
//!   (one byte), the number of changed elements minus one (two bytes), and the bits of each changed
//!   element.
//!
//! A changed element has three parts. A Rice code counts the unchanged elements before it. An
//! exponential Golomb code has the magnitude of its difference, minus one. A final bit is one if
//! the difference is negative. Bits fill each byte from its lowest bit. The encoder chooses both
//! parameters for each block, from its number of changed elements and their magnitudes.
//!
//! In a fine-tuning step, 77 to 90% of the changed elements move by one unit in the last place.
//! These take two bits besides the gap.

use zeroshard_loops::Level;
use zeroshard_model::DType;

use crate::{
    bits::Writer,
    decode::{Code, SHORT, read_changes},
    ordered::width,
};

/// The number of elements in a block. If 1% of the elements change, the five bytes before the bits
/// are 2.5% of the block. The differences of a block fit into the cache of a core.
pub const BLOCK: usize = 16_384;

/// The largest parameter of the gap code, because every gap is smaller than a block.
const MOST_GAP_BITS: u32 = BLOCK.trailing_zeros();

const EMPTY: u8 = 0;
const RAW: u8 = 1;
const CODED: u8 = 2;

/// The bytes are not a valid change of the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("block {block} of the change is malformed: {cause}; fetch the slice in full")]
pub struct Malformed {
    /// The number of the block.
    pub block: usize,
    /// The reason.
    pub cause: &'static str,
}

/// The changed elements of one block.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Block {
    /// The position of the block's first element in the slice.
    pub start: usize,
    /// The positions of the changed elements in the block, ascending.
    pub positions: Vec<u16>,
    /// The difference of each changed element, never 0.
    pub differences: Vec<u32>,
}

impl Block {
    /// Removes all changes.
    pub(crate) fn clear(&mut self) {
        self.positions.clear();
        self.differences.clear();
    }

    /// Returns the position in the block and the difference of each changed element.
    #[inline]
    pub(crate) fn changed(&self) -> impl Iterator<Item = (usize, u32)> {
        let positions = self.positions.iter().map(|&position| usize::from(position));
        positions.zip(self.differences.iter().copied())
    }

    #[inline]
    pub(crate) fn push(&mut self, position: usize, difference: u32) {
        self.positions.push(position as u16);
        self.differences.push(difference);
    }

    /// Encodes the block, which has `len` elements, and appends it to `out`.
    pub(crate) fn encode(&self, dtype: DType, len: usize, out: &mut Vec<u8>) {
        let start = out.len();
        let Some(less_one) = self.positions.len().checked_sub(1) else {
            out.push(EMPTY);
            return;
        };
        let raw = 1 + len * dtype.size();
        if self.positions.len() * 3 < raw * 8 {
            let gaps = gap_parameter(len, self.positions.len());
            let magnitudes = self.magnitude_parameter(dtype);
            out.extend_from_slice(&[CODED, gaps as u8, magnitudes as u8]);
            out.extend_from_slice(&(less_one as u16).to_le_bytes());
            self.write_bits(dtype, [gaps, magnitudes], out);
            if out.len() - start <= raw {
                return;
            }
            out.truncate(start);
        }
        out.push(RAW);
        out.resize(start + raw, 0);
        let (values, size) = (&mut out[start + 1..], dtype.size());
        for (&position, difference) in self.positions.iter().zip(&self.differences) {
            let at = usize::from(position) * size;
            values[at..at + size].copy_from_slice(&difference.to_le_bytes()[..size]);
        }
    }

    fn write_bits(&self, dtype: DType, [gaps, magnitudes]: [u32; 2], out: &mut Vec<u8>) {
        let (mut bits, width) = (Writer::new(out), width(dtype));
        let mut next = 0;
        for (&position, &difference) in self.positions.iter().zip(&self.differences) {
            let gap = u32::from(position) - next;
            next = u32::from(position) + 1;
            let (zeros, rest) = (gap >> gaps, gap & ((1 << gaps) - 1));
            let (magnitude, is_negative) = magnitude(width, difference);
            let coded = u64::from(magnitude) + (1 << magnitudes);
            let most = 63 - coded.leading_zeros();
            let (more, low) = (most - magnitudes, (coded & ((1 << most) - 1)) as u32);
            // The five parts almost always fit into one write.
            let lengths = [zeros + 1, gaps, more + 1, most, 1];
            if lengths.iter().sum::<u32>() <= 32 {
                let parts = [1 << zeros, rest, 1 << more, low, u32::from(is_negative)];
                let (mut all, mut length) = (0, 0);
                for (part, of) in parts.into_iter().zip(lengths) {
                    all |= u64::from(part) << length;
                    length += of;
                }
                bits.write(all as u32, length);
                continue;
            }
            bits.unary(zeros);
            bits.write(rest, gaps);
            bits.unary(more);
            bits.write(low, most);
            bits.write(u32::from(is_negative), 1);
        }
        bits.finish();
    }

    /// Returns the parameter with which the exponential Golomb code takes about the fewest bits.
    fn magnitude_parameter(&self, dtype: DType) -> u32 {
        let (mut lengths, width) = ([0u32; 33], width(dtype));
        for &difference in &self.differences {
            let (magnitude, _) = magnitude(width, difference);
            lengths[(u32::BITS - magnitude.leading_zeros()) as usize] += 1;
        }
        let bits = |parameter: u32| -> u64 {
            let of_length = |length: u32| match length <= parameter {
                true => parameter + 1,
                false => 2 * length - parameter,
            };
            let counted = (0u32..).zip(lengths);
            counted.map(|(length, count)| u64::from(of_length(length)) * u64::from(count)).sum()
        };
        (0..width).min_by_key(|&parameter| bits(parameter)).unwrap_or_default()
    }

    /// Decodes the block at the beginning of `bytes`. Returns the remaining bytes.
    fn decode<'a>(
        &mut self,
        level: Level,
        dtype: DType,
        len: usize,
        bytes: &'a [u8],
    ) -> Result<&'a [u8], &'static str> {
        self.clear();
        let (&form, bytes) = bytes.split_first().ok_or(SHORT)?;
        match form {
            EMPTY => Ok(bytes),
            RAW => {
                let (values, rest) = bytes.split_at_checked(len * dtype.size()).ok_or(SHORT)?;
                for (position, value) in values.chunks_exact(dtype.size()).enumerate() {
                    let mut difference = [0; 4];
                    difference[..value.len()].copy_from_slice(value);
                    match u32::from_le_bytes(difference) {
                        0 => {}
                        difference => self.push(position, difference),
                    }
                }
                Ok(rest)
            }
            CODED => {
                let (&[gaps, magnitudes, low, high], bytes) =
                    bytes.split_first_chunk().ok_or(SHORT)?;
                let [gaps, magnitudes] = [gaps, magnitudes].map(u32::from);
                if gaps > MOST_GAP_BITS || magnitudes >= width(dtype) {
                    return Err("a parameter is too large");
                }
                let changes = usize::from(u16::from_le_bytes([low, high])) + 1;
                if changes > len {
                    return Err("it has more changes than elements");
                }
                // A change takes at least three bits, so the input limits what is allocated.
                if changes * 3 > bytes.len() * 8 {
                    return Err(SHORT);
                }
                self.positions.resize(changes, 0);
                self.differences.resize(changes, 0);
                let code = Code { len, gaps, magnitudes, width: width(dtype) };
                let read =
                    read_changes(level, &code, bytes, &mut self.positions, &mut self.differences)?;
                bytes.get(read..).ok_or(SHORT)
            }
            _ => Err("its form is unknown"),
        }
    }
}

/// Returns the magnitude of a difference of `width` bits minus one, and `true` if the difference is
/// negative.
#[inline]
fn magnitude(width: u32, difference: u32) -> (u32, bool) {
    let unused = u32::BITS - width;
    let signed = (difference << unused) as i32 >> unused;
    (signed.unsigned_abs() - 1, signed < 0)
}

/// Returns the parameter of the Rice code if `changes` of `len` elements change: the smallest k
/// with `(1 - changes / len)^(2^k) <= 0.618`. It takes the fewest bits if positions are random.
fn gap_parameter(len: usize, changes: usize) -> u32 {
    /// 0.618 as a fraction of 2^32.
    const GOLDEN: u64 = 2_654_435_769;
    let mut unchanged = (((len - changes) as u64) << 32) / len as u64;
    let mut parameter = 0;
    while unchanged > GOLDEN && parameter < MOST_GAP_BITS {
        unchanged = (unchanged * unchanged) >> 32;
        parameter += 1;
    }
    parameter
}

/// Decodes a change block by block.
#[derive(Debug, Clone)]
pub struct Blocks<'a> {
    level: Level,
    dtype: DType,
    /// The number of elements in the slice.
    numel: usize,
    /// The number of blocks read so far.
    read: usize,
    rest: &'a [u8],
}

impl<'a> Blocks<'a> {
    /// Decodes the change of a slice with `numel` elements.
    pub fn new(dtype: DType, numel: usize, change: &'a [u8]) -> Self {
        Self { level: Level::best(), dtype, numel, read: 0, rest: change }
    }

    /// Reads the next block. Returns `false` after the last one.
    ///
    /// # Errors
    /// [`Malformed`] if the bytes are not a change of the slice.
    pub fn next(&mut self, block: &mut Block) -> Result<bool, Malformed> {
        let malformed = |cause| Malformed { block: self.read, cause };
        let start = self.read * BLOCK;
        if start >= self.numel {
            return match self.rest {
                [] => Ok(false),
                _ => Err(malformed("there are bytes behind the last block")),
            };
        }
        let len = BLOCK.min(self.numel - start);
        self.rest = block.decode(self.level, self.dtype, len, self.rest).map_err(malformed)?;
        block.start = start;
        self.read += 1;
        Ok(true)
    }
}

/// Returns the change of a slice with `numel` elements if none of them changes.
pub fn unchanged(numel: usize) -> Vec<u8> {
    vec![EMPTY; numel.div_ceil(BLOCK)]
}

/// Returns the maximum size in bytes of a change of `numel` elements: one byte per block more than
/// their values.
pub fn most_bytes(dtype: DType, numel: usize) -> usize {
    numel * dtype.size() + numel.div_ceil(BLOCK)
}
