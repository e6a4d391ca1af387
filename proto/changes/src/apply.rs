//! Applies a change to a reader's values, and hashes what it does.

use zeroshard_model::DType;

use crate::{
    block::{BLOCK, Blocks, Malformed},
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
    let mut effect = Effect::default();
    visit::<T>(place.dtype, values, change, |position, value, difference| {
        let before = T::read(value);
        let after = before.moved(difference);
        after.write(value);
        effect.add(place, position, [before, after]);
    })?;
    Ok(effect)
}

/// Takes the values back to what they were before [`apply`], bit for bit, also if it has failed.
pub fn undo(dtype: DType, values: &mut [u8], change: &[u8]) {
    fn undo_of<T: Bits>(dtype: DType, values: &mut [u8], change: &[u8]) {
        let undone = visit::<T>(dtype, values, change, |_, value, difference| {
            T::read(value).moved(difference.wrapping_neg()).write(value);
        });
        // It fails where `apply` has failed.
        _ = undone;
    }
    match dtype {
        DType::F32 => undo_of::<u32>(dtype, values, change),
        DType::Bf16 | DType::F16 => undo_of::<u16>(dtype, values, change),
    }
}

/// Calls `visit` with the position, the bytes and the difference of each changed element.
#[inline(always)]
fn visit<T: Bits>(
    dtype: DType,
    values: &mut [u8],
    change: &[u8],
    mut visit: impl FnMut(usize, &mut [u8], u32),
) -> Result<(), Malformed> {
    let mut blocks = Blocks::new(dtype, values.len() / T::SIZE, change);
    loop {
        let start = blocks.start();
        let values = values.get_mut(start * T::SIZE..).unwrap_or_default();
        let is_block = blocks.visit(|position, difference| {
            let value = &mut values[position * T::SIZE..][..T::SIZE];
            visit(start + position, value, difference);
        })?;
        if !is_block {
            return Ok(());
        }
    }
}

/// Returns the positions of the changed elements in the slice, ascending. Callers whose values are
/// outside the memory of this process gather the elements there for [`apply_gathered`].
///
/// # Errors
/// [`Malformed`].
pub fn positions(dtype: DType, numel: usize, change: &[u8]) -> Result<Vec<u64>, Malformed> {
    let (mut blocks, mut positions) = (Blocks::new(dtype, numel, change), Vec::new());
    loop {
        let start = blocks.start();
        if !blocks.visit(|position, _| positions.push((start + position) as u64))? {
            return Ok(positions);
        }
    }
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
    let (mut values, mut is_short) = (gathered.chunks_exact_mut(T::SIZE), false);
    let mut effect = Effect::default();
    loop {
        let start = blocks.start();
        let is_block = blocks.visit(|position, difference| {
            let Some(value) = values.next() else {
                is_short = true;
                return;
            };
            let before = T::read(value);
            let after = before.moved(difference);
            effect.add(place, start + position, [before, after]);
            after.write(value);
        })?;
        match is_block {
            _ if is_short => {
                let cause = "it has more changes than values";
                return Err(Malformed { block: start / BLOCK, cause });
            }
            true => {}
            false => return Ok(effect),
        }
    }
}
