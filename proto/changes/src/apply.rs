//! Checks a change against a reader's values, and applies it to them.

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

impl Effect {
    /// Adds the element at `position` of the slice.
    #[inline]
    fn add<T: Bits>(&mut self, place: Place, position: usize, [before, after]: [T; 2]) {
        let index = place.first + position as u64;
        let term = hash::term_change(index, before.widen(), after.widen());
        self.difference = self.difference.wrapping_add(term);
        self.changed += 1;
    }
}

/// Computes how `change` would alter `values`, which are little-endian bytes, without writing to
/// them. Add the difference to the hash of the old values, and compare the sum with the hash that
/// the server sent. If somebody has written to an element that changes, the two differ.
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
        for (&position, &difference) in block.positions.iter().zip(&block.differences) {
            let position = block.start + usize::from(position);
            let before = T::read(&values[position * T::SIZE..]);
            effect.add(place, position, [before, before.moved(difference)]);
        }
    }
    Ok(effect)
}

/// Applies `change` to `values`, which are little-endian bytes.
///
/// # Errors
/// [`Malformed`]. Some values may have changed by then, so call [`hash_change`] first.
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

/// Returns the positions of the changed elements in the slice, ascending. Callers whose values are
/// outside the memory of this process gather the elements there for [`apply_gathered`].
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
        for (&position, &difference) in block.positions.iter().zip(&block.differences) {
            let position = block.start + usize::from(position);
            let Some(value) = values.next() else {
                return Err(Malformed {
                    block: block.start / BLOCK,
                    cause: "it has more changes than values",
                });
            };
            let before = T::read(value);
            let after = before.moved(difference);
            effect.add(place, position, [before, after]);
            after.write(value);
        }
    }
    Ok(effect)
}
