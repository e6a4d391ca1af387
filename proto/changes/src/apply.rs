//! Applies changes to the values of a reader.

use zeroshard_model::DType;

use crate::{
    block::{Block, Blocks, Malformed},
    hash,
    ordered::Bits,
};

/// The values of a slice in a reader, and where they are.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The dtype of the values.
    pub dtype: DType,
    /// The position of the slice's first element in its tensor.
    pub first: u64,
}

/// What a change does to a slice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effect {
    /// The hash after the change less the one before it.
    pub difference: u64,
    /// The number of elements that change.
    pub changed: u64,
}

/// The difference that `change` makes to the hash of `values`: little-endian bytes. The values are
/// not changed. The hash of other values than those from which the change was recorded, plus this
/// difference, is not the hash of the new values.
///
/// # Errors
/// [`Malformed`].
pub fn hash_change(place: Place, values: &[u8], change: &[u8]) -> Result<Effect, Malformed> {
    match place.dtype {
        DType::F32 => hash_change_of::<u32>(place, values, change),
        DType::Bf16 | DType::F16 => hash_change_of::<u16>(place, values, change),
    }
}

fn hash_change_of<T: Bits>(
    place: Place,
    values: &[u8],
    change: &[u8],
) -> Result<Effect, Malformed> {
    let mut blocks = Blocks::new(place.dtype, values.len() / T::SIZE, change);
    let (mut block, mut effect) = (Block::default(), Effect::default());
    while blocks.next(&mut block)? {
        effect.changed += block.positions.len() as u64;
        for (&position, &difference) in block.positions.iter().zip(&block.differences) {
            let position = block.start + usize::from(position);
            let before = T::read(&values[position * T::SIZE..]);
            let term = term_change(place, position, before, difference);
            effect.difference = effect.difference.wrapping_add(term);
        }
    }
    Ok(effect)
}

/// The difference that the change of one element makes to the hash.
#[inline]
fn term_change<T: Bits>(place: Place, position: usize, before: T, difference: u32) -> u64 {
    let index = place.first + position as u64;
    let [new, old] = [before.moved(difference), before].map(|of| hash::term(index, of.widen()));
    new.wrapping_sub(old)
}

/// Applies `change` to `values`: little-endian bytes.
///
/// # Errors
/// [`Malformed`], after which some values may have been changed: call [`hash_change`] before.
pub fn apply(dtype: DType, values: &mut [u8], change: &[u8]) -> Result<(), Malformed> {
    match dtype {
        DType::F32 => apply_to::<u32>(dtype, values, change),
        DType::Bf16 | DType::F16 => apply_to::<u16>(dtype, values, change),
    }
}

fn apply_to<T: Bits>(dtype: DType, values: &mut [u8], change: &[u8]) -> Result<(), Malformed> {
    let mut blocks = Blocks::new(dtype, values.len() / T::SIZE, change);
    let mut block = Block::default();
    while blocks.next(&mut block)? {
        for (&position, &difference) in block.positions.iter().zip(&block.differences) {
            let value = &mut values[(block.start + usize::from(position)) * T::SIZE..];
            T::read(value).moved(difference).write(value);
        }
    }
    Ok(())
}

/// The positions of the changed elements in the slice, ascending, for values that are not in the
/// memory of this process.
///
/// # Errors
/// [`Malformed`].
pub fn positions(dtype: DType, numel: usize, change: &[u8]) -> Result<Vec<u64>, Malformed> {
    let mut blocks = Blocks::new(dtype, numel, change);
    let (mut block, mut positions) = (Block::default(), Vec::new());
    while blocks.next(&mut block)? {
        let start = block.start as u64;
        positions.extend(block.positions.iter().map(|&position| start + u64::from(position)));
    }
    Ok(positions)
}

/// Replaces the old values at the [`positions`] of a change by the new ones: `gathered` has them in
/// the same order. Returns the difference to the hash of the slice.
///
/// # Errors
/// [`Malformed`].
pub fn apply_gathered(
    place: Place,
    numel: usize,
    gathered: &mut [u8],
    change: &[u8],
) -> Result<u64, Malformed> {
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
) -> Result<u64, Malformed> {
    let mut blocks = Blocks::new(place.dtype, numel, change);
    let mut values = gathered.chunks_exact_mut(T::SIZE);
    let (mut block, mut sum) = (Block::default(), 0u64);
    while blocks.next(&mut block)? {
        for (&position, &difference) in block.positions.iter().zip(&block.differences) {
            let position = block.start + usize::from(position);
            let Some(value) = values.next() else {
                return Err(Malformed {
                    block: position,
                    cause: "it has more changes than values",
                });
            };
            let before = T::read(value);
            sum = sum.wrapping_add(term_change(place, position, before, difference));
            before.moved(difference).write(value);
        }
    }
    Ok(sum)
}
