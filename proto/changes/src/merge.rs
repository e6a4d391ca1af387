//! Adds consecutive changes of a slice without its values.

use bytes::Bytes;
use zeroshard_model::{DType, Error, Result};

use crate::{
    block::{BLOCK, Block, Blocks, Malformed},
    ordered::mask,
};

/// Adds consecutive `changes`. The result is bitwise identical to the change that a comparison of
/// the first version with the last one would record.
///
/// # Errors
/// [`Malformed`].
pub fn merge(
    dtype: DType,
    numel: usize,
    changes: &[&[u8]],
) -> std::result::Result<Vec<u8>, Malformed> {
    let mut changes: Vec<_> =
        changes.iter().map(|change| Blocks::new(dtype, numel, change)).collect();
    let mask = mask(dtype);
    let mut sums = vec![0u32; BLOCK.min(numel)];
    let (mut block, mut merged) = (Block::default(), Vec::new());
    for start in (0..numel).step_by(BLOCK) {
        let len = BLOCK.min(numel - start);
        for change in &mut changes {
            change.next(&mut block)?;
            for (&position, difference) in block.positions.iter().zip(&block.differences) {
                let sum = &mut sums[usize::from(position)];
                *sum = sum.wrapping_add(*difference) & mask;
            }
        }
        block.clear();
        for (position, sum) in sums[..len].iter_mut().enumerate().filter(|(_, sum)| **sum != 0) {
            block.push(position, std::mem::take(sum));
        }
        block.encode(dtype, len, &mut merged);
    }
    // Refuses bytes after the last block.
    changes.iter_mut().try_for_each(|change| change.next(&mut block).map(drop))?;
    Ok(merged)
}

/// Adds consecutive changes of one's own, or none: the result then changes nothing.
///
/// # Errors
/// [`Error::Internal`] if one is malformed, which is a bug.
pub fn sum((dtype, numel): (DType, usize), changes: &[Bytes]) -> Result<Bytes> {
    let changes: Vec<&[u8]> = changes.iter().map(|change| &change[..]).collect();
    let sum = merge(dtype, numel, &changes);
    Ok(sum.map_err(|error| Error::Internal { cause: error.to_string() })?.into())
}
