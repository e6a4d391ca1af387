//! Records the change that a step makes, from the old and the new values of consecutive elements.

use zeroshard_model::DType;

use crate::{
    block::{BLOCK, Block},
    hash,
    ordered::Bits,
};

/// The bytes that are compared at once. The compiler vectorises the comparison, so that a cache line
/// without changes costs a few instructions.
const LINE: usize = 64;

/// The change of a slice from a version to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The code of the change.
    pub change: Vec<u8>,
    /// The hash of the new values less that of the old ones.
    pub hash_difference: u64,
    /// The number of elements that have changed.
    pub changed: u64,
}

/// Receives the old and the new values of a slice in the order of its elements.
#[derive(Debug)]
pub struct Recorder {
    dtype: DType,
    /// The position of the slice's first element in its tensor.
    first: u64,
    numel: usize,
    /// The number of elements that have been compared.
    seen: usize,
    /// The changes of the block that is being compared.
    block: Block,
    recorded: Recorded,
}

impl Recorder {
    /// Records a slice of `numel` elements.
    pub fn new(dtype: DType, first: u64, numel: usize) -> Self {
        let recorded = Recorded { change: Vec::new(), hash_difference: 0, changed: 0 };
        Self { dtype, first, numel, seen: 0, block: Block::default(), recorded }
    }

    /// The number of elements that have not been compared.
    pub fn missing(&self) -> usize {
        self.numel - self.seen
    }

    /// Compares the next elements: little-endian bytes of the dtype. Elements behind the end of the
    /// slice are not read.
    pub fn compare(&mut self, mut before: &[u8], mut after: &[u8]) {
        debug_assert_eq!(before.len(), after.len(), "an old and a new value of each element");
        let size = self.dtype.size();
        while self.missing() > 0 && !after.is_empty() {
            let room = BLOCK.min(self.numel - self.block.start) + self.block.start - self.seen;
            let bytes = after.len().min(room * size);
            let (old, rest_before) = before.split_at(bytes);
            let (new, rest_after) = after.split_at(bytes);
            (before, after) = (rest_before, rest_after);
            match self.dtype {
                DType::F32 => self.compare_in_block::<u32>(old, new),
                DType::Bf16 | DType::F16 => self.compare_in_block::<u16>(old, new),
            }
            self.seen += bytes / size;
            if bytes == room * size {
                self.end_block();
            }
        }
    }

    fn compare_in_block<T: Bits>(&mut self, before: &[u8], after: &[u8]) {
        let start = self.seen - self.block.start;
        let lines = before.chunks(LINE).zip(after.chunks(LINE)).enumerate();
        for (line, (before, after)) in lines {
            if is_equal(before, after) {
                continue;
            }
            let start = start + line * (LINE / T::SIZE);
            let words = before.chunks(8).zip(after.chunks(8)).enumerate();
            for (word, (before, after)) in words {
                if before == after {
                    continue;
                }
                let start = start + word * (8 / T::SIZE);
                let elements = before.chunks_exact(T::SIZE).zip(after.chunks_exact(T::SIZE));
                for (position, (before, after)) in (start..).zip(elements) {
                    let (before, after) = (T::read(before), T::read(after));
                    if before != after {
                        self.note(position, before, after);
                    }
                }
            }
        }
    }

    #[inline]
    fn note<T: Bits>(&mut self, position: usize, before: T, after: T) {
        let index = self.first + (self.block.start + position) as u64;
        let terms = [after, before].map(|bits| hash::term(index, bits.widen()));
        let difference = terms[0].wrapping_sub(terms[1]);
        let recorded = &mut self.recorded;
        recorded.hash_difference = recorded.hash_difference.wrapping_add(difference);
        self.block.push(position, before.difference_to(after));
    }

    fn end_block(&mut self) {
        self.recorded.changed += self.block.positions.len() as u64;
        let len = self.seen - self.block.start;
        self.block.encode(self.dtype, len, &mut self.recorded.change);
        self.block.clear();
        self.block.start = self.seen;
    }

    /// The change; `None` unless all elements have been compared.
    pub fn finish(self) -> Option<Recorded> {
        (self.missing() == 0).then_some(self.recorded)
    }
}

#[inline(always)]
fn is_equal(before: &[u8], after: &[u8]) -> bool {
    match (<&[u8; LINE]>::try_from(before), <&[u8; LINE]>::try_from(after)) {
        (Ok(before), Ok(after)) => {
            let different = before.iter().zip(after).fold(0, |all, (b, a)| all | (b ^ a));
            different == 0
        }
        _ => before == after,
    }
}
