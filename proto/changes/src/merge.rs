//! Adds consecutive changes of a slice without its values.

use zeroshard_model::DType;

use crate::{
    block::{BLOCK, Block, Blocks, Malformed},
    ordered::mask,
};

/// Adds consecutive `changes`. The result is bitwise identical to the change that a comparison of
/// the first version with the last one would record.
///
/// # Errors
/// [`Malformed`].
pub fn merge(dtype: DType, numel: usize, changes: &[&[u8]]) -> Result<Vec<u8>, Malformed> {
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
