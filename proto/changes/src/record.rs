//! Records the change that a step makes, by comparing the old and the new values.
//!
//! The recorder runs inside the step. It therefore skips unchanged elements with vector
//! instructions, and processes the changed elements of a whole block at a time.

use zeroshard_loops::{
    Level,
    differ::{GROUP, differ16, differ32},
};
use zeroshard_model::DType;

use crate::{
    block::{BLOCK, Block},
    hash,
    ordered::Bits,
};

/// The maximum number of elements that are compared at once. A step usually passes a tile.
const COMPARED: usize = 512;

/// The recorded change of a slice from one version to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The encoded change.
    pub change: Vec<u8>,
    /// The hash of the new values minus the hash of the old ones, modulo 2^64.
    pub hash_difference: u64,
    /// The number of elements that have changed.
    pub changed: u64,
}

/// Receives the old and the new values of a slice in the order of its elements.
#[derive(Debug)]
pub struct Recorder {
    level: Level,
    dtype: DType,
    /// The position of the slice's first element in its tensor.
    first: u64,
    numel: usize,
    /// The number of elements compared so far.
    seen: usize,
    /// The changed elements of the current block. Their differences are computed at its end.
    block: Block,
    /// The bits of each changed element of the block, before and after the step.
    bits: Vec<[u32; 2]>,
    recorded: Recorded,
}

impl Recorder {
    /// Records a slice of `numel` elements. `first` is the position of its first element in the
    /// tensor.
    pub fn new(level: Level, dtype: DType, first: u64, numel: usize) -> Self {
        let recorded = Recorded { change: Vec::new(), hash_difference: 0, changed: 0 };
        let (block, bits) = (Block::default(), Vec::new());
        Self { level, dtype, first, numel, seen: 0, block, bits, recorded }
    }

    /// The number of elements not compared yet.
    pub fn missing(&self) -> usize {
        self.numel - self.seen
    }

    /// Compares the next elements, given as little-endian bytes of the dtype. Ignores elements past
    /// the end of the slice.
    pub fn compare(&mut self, before: &[u8], after: &[u8]) {
        debug_assert_eq!(before.len(), after.len(), "an old and a new value of each element");
        match self.dtype {
            DType::F32 => self.compare_as::<u32>(before, after),
            DType::Bf16 | DType::F16 => self.compare_as::<u16>(before, after),
        }
    }

    fn compare_as<T: Bits>(&mut self, mut before: &[u8], mut after: &[u8]) {
        while self.missing() > 0 && !after.is_empty() {
            let room = BLOCK.min(self.numel - self.block.start) + self.block.start - self.seen;
            let bytes = after.len().min(room.min(COMPARED) * T::SIZE);
            let (old, rest_before) = before.split_at(bytes);
            let (new, rest_after) = after.split_at(bytes);
            (before, after) = (rest_before, rest_after);
            self.compare_some::<T>(old, new);
            self.seen += bytes / T::SIZE;
            if bytes == room * T::SIZE {
                self.end_block::<T>();
            }
        }
    }

    /// Compares at most [`COMPARED`] elements.
    fn compare_some<T: Bits>(&mut self, before: &[u8], after: &[u8]) {
        let mut masks = [0; COMPARED / GROUP];
        let differ = if T::SIZE == size_of::<u16>() { differ16 } else { differ32 };
        let (whole, group) = (after.len() / (GROUP * T::SIZE), GROUP * T::SIZE);
        let masks = &mut masks[..after.len().div_ceil(group)];
        differ(self.level, before, after, masks);
        if let Some(last) = masks.get_mut(whole) {
            // The padding is equal.
            let padded = |of: &[u8]| {
                let mut padded = [0; GROUP * size_of::<u32>()];
                padded[..of.len() - whole * group].copy_from_slice(&of[whole * group..]);
                padded
            };
            let [before, after] = [before, after].map(padded);
            differ(self.level, &before[..group], &after[..group], std::slice::from_mut(last));
        }
        let start = self.seen - self.block.start;
        for (number, &mask) in masks.iter().enumerate() {
            let mut mask = mask;
            while mask != 0 {
                let position = number * GROUP + mask.trailing_zeros() as usize;
                mask &= mask - 1;
                let at = position * T::SIZE;
                self.block.positions.push((start + position) as u16);
                self.bits.push([before, after].map(|of| T::read(&of[at..]).widen()));
            }
        }
    }

    fn end_block<T: Bits>(&mut self) {
        let Self { block, bits, recorded, .. } = self;
        let differences = bits.iter().map(|&[b, a]| T::narrow(b).difference_to(T::narrow(a)));
        block.differences.extend(differences);
        let first = self.first + block.start as u64;
        let difference = hash::changes(self.level, first, &block.positions, bits);
        recorded.hash_difference = recorded.hash_difference.wrapping_add(difference);
        recorded.changed += block.positions.len() as u64;
        block.encode(self.dtype, self.seen - block.start, &mut recorded.change);
        block.clear();
        block.start = self.seen;
        bits.clear();
    }

    /// Returns the change, or `None` unless all elements were compared.
    pub fn finish(self) -> Option<Recorded> {
        (self.missing() == 0).then_some(self.recorded)
    }
}
