//! Applies a change to a reader's values, and hashes what it does.

use zeroshard_loops::Level;
use zeroshard_model::DType;

use crate::{
    block::{BLOCK, Block, Blocks, Malformed},
    hash,
    ordered::Bits,
};

/// The type and position of a slice's values.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The dtype of the values.
    pub dtype: DType,
    /// The position of the slice's first element in its tensor.
    pub first: u64,
}

/// The effect of a change on a slice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effect {
    /// The hash after the change minus the hash before it, modulo 2^64.
    pub difference: u64,
    /// The number of elements that change.
    pub changed: u64,
}

/// Applies `change` to `values`, which are little-endian bytes. Add the difference to the hash of
/// the old values, and compare the sum with the hash that the server sent. If somebody has written
/// to an element that changes, the two differ: call [`undo`].
///
/// # Errors
/// [`Malformed`]. Some values have changed by then: call [`undo`].
pub fn apply(place: Place, values: &mut [u8], change: &[u8]) -> Result<Effect, Malformed> {
    match place.dtype {
        DType::F32 => apply_to::<u32>(place, values, change),
        DType::Bf16 | DType::F16 => apply_to::<u16>(place, values, change),
    }
}

fn apply_to<T: Bits>(place: Place, values: &mut [u8], change: &[u8]) -> Result<Effect, Malformed> {
    let (level, mut bits, mut effect) = (Level::best(), Vec::new(), Effect::default());
    visit::<T>(place.dtype, values, change, |block, values| {
        // One loop reads and writes, and another one computes: a core then waits for several
        // elements from memory at a time.
        bits.clear();
        bits.extend(block.changed().map(|(position, difference)| {
            let value = &mut values[position * T::SIZE..][..T::SIZE];
            let before = T::read(value);
            let after = before.moved(difference);
            after.write(value);
            [before, after].map(T::widen)
        }));
        let first = place.first + block.start as u64;
        let difference = hash::changes(level, first, &block.positions, &bits);
        effect.difference = effect.difference.wrapping_add(difference);
        effect.changed += bits.len() as u64;
    })?;
    Ok(effect)
}

/// Takes the values back to what they were before [`apply`], bit for bit, also if it has failed.
pub fn undo(dtype: DType, values: &mut [u8], change: &[u8]) {
    fn undo_of<T: Bits>(dtype: DType, values: &mut [u8], change: &[u8]) {
        let undone = visit::<T>(dtype, values, change, |block, values| {
            for (position, difference) in block.changed() {
                let value = &mut values[position * T::SIZE..][..T::SIZE];
                T::read(value).moved(difference.wrapping_neg()).write(value);
            }
        });
        // It fails at the block at which `apply` has failed.
        _ = undone;
    }
    match dtype {
        DType::F32 => undo_of::<u32>(dtype, values, change),
        DType::Bf16 | DType::F16 => undo_of::<u16>(dtype, values, change),
    }
}

/// Calls `visit` with each block, and the values from its beginning on.
fn visit<T: Bits>(
    dtype: DType,
    values: &mut [u8],
    change: &[u8],
    mut visit: impl FnMut(&Block, &mut [u8]),
) -> Result<(), Malformed> {
    let mut blocks = Blocks::new(dtype, values.len() / T::SIZE, change);
    let mut block = Block::default();
    while blocks.next(&mut block)? {
        visit(&block, &mut values[block.start * T::SIZE..]);
    }
    Ok(())
}

/// Returns the positions of the changed elements in the slice, ascending. Callers whose values are
/// outside the memory of this process gather the elements there for [`apply_gathered`].
///
/// # Errors
/// [`Malformed`].
pub fn positions(dtype: DType, numel: usize, change: &[u8]) -> Result<Vec<u64>, Malformed> {
    let mut blocks = Blocks::new(dtype, numel, change);
    let (mut block, mut positions) = (Block::default(), Vec::new());
    while blocks.next(&mut block)? {
        positions.extend(block.changed().map(|(position, _)| (block.start + position) as u64));
    }
    Ok(positions)
}

/// Replaces old values with new ones. `gathered` starts with the old values at the [`positions`] of
/// the change, in the same order.
///
/// # Errors
/// [`Malformed`]. Some values may have been replaced by then.
pub fn apply_gathered(
    place: Place,
    numel: usize,
    gathered: &mut [u8],
    change: &[u8],
) -> Result<Effect, Malformed> {
    match place.dtype {
        DType::F32 => apply_to_gathered::<u32>(place, numel, gathered, change),
        DType::Bf16 | DType::F16 => apply_to_gathered::<u16>(place, numel, gathered, change),
    }
}

fn apply_to_gathered<T: Bits>(
    place: Place,
    numel: usize,
    gathered: &mut [u8],
    change: &[u8],
) -> Result<Effect, Malformed> {
    let mut blocks = Blocks::new(place.dtype, numel, change);
    let mut values = gathered.chunks_exact_mut(T::SIZE);
    let (mut block, mut effect) = (Block::default(), Effect::default());
    while blocks.next(&mut block)? {
        for (position, difference) in block.changed() {
            let Some(value) = values.next() else {
                let cause = "it has more changes than values";
                return Err(Malformed { block: block.start / BLOCK, cause });
            };
            let before = T::read(value);
            let after = before.moved(difference);
            after.write(value);
            let index = place.first + (block.start + position) as u64;
            let term = hash::term_change(index, before.widen(), after.widen());
            effect.difference = effect.difference.wrapping_add(term);
            effect.changed += 1;
        }
    }
    Ok(effect)
}
