//! Zeroed, aligned host memory whose allocation can fail without aborting.

use std::{ops::Range, sync::Arc};

use bytemuck::{Pod, Zeroable};
use memmap2::{Advice, MmapMut, MmapOptions};
use zeroshard_shm::{Arena, Block, SHARED_FROM};

/// From this size on, memory is mapped separately, so that the kernel gets it back as soon as it is
/// dropped. For smaller arrays (a model may have ten thousand small tensors) separate mappings
/// would waste pages and reach the limit on the number of mappings.
const MAPPED_FROM: usize = 1 << 20;

/// A cache line, the alignment of small arrays.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

// SAFETY: a `Line` is 64 bytes without padding, and any bytes are a valid `Line`.
unsafe impl Zeroable for Line {}
// SAFETY: as above.
unsafe impl Pod for Line {}

/// The number of bytes that the kernel populates in one call. The process cannot map other memory
/// during the call, so a larger number would delay the calls of other jobs.
const POPULATED: usize = 1 << 20;

/// The address space that must be left after an allocation, for the connections and calls of all
/// jobs: where these find no memory, the process ends.
const HEADROOM: usize = 64 << 20;

/// Returns whether the process can still allocate what the connections and calls of all jobs need.
pub fn has_headroom() -> bool {
    MmapOptions::new().len(HEADROOM).map_anon().is_ok()
}

/// A zeroed array of bytes, aligned to at least 64.
pub struct Memory {
    storage: Storage,
    /// INVARIANT: at most the storage's size.
    len: usize,
}

enum Storage {
    Heap(Vec<Line>),
    Mapped(MmapMut),
    Shared(Block),
}

impl Memory {
    /// Allocates `len` zero bytes; `None` if there is not enough memory.
    pub fn zeroed(len: usize) -> Option<Memory> {
        let storage = if len < MAPPED_FROM {
            let lines = len.div_ceil(size_of::<Line>());
            let mut heap = Vec::new();
            heap.try_reserve_exact(lines).ok()?;
            heap.resize(lines, Line::zeroed());
            Storage::Heap(heap)
        } else {
            // There is no advice on huge pages: measured on a virtual machine, steps were as fast
            // without them, and a first access four times as fast (the host had reclaimed free huge
            // pages).
            Storage::Mapped(MmapOptions::new().len(len).map_anon().ok()?)
        };
        Some(Memory { storage, len })
    }

    /// Allocates `len` zero bytes in `arena`, which other processes can map. A small array, and one
    /// for which the arena has no room, is allocated elsewhere. Returns `None` if there is not
    /// enough memory.
    pub fn shared(arena: &Arc<Arena>, len: usize) -> Option<Memory> {
        match Some(len).filter(|&len| len >= SHARED_FROM).and_then(|len| arena.allocate(len)) {
            Some(block) => Some(Memory { storage: Storage::Shared(block), len }),
            None => Memory::zeroed(len),
        }
    }

    /// Another array of this size in the same place; `None` if there is not enough memory.
    pub fn another(&self) -> Option<Memory> {
        match &self.storage {
            Storage::Shared(block) => Memory::shared(block.arena(), self.len),
            Storage::Heap(_) | Storage::Mapped(_) => Memory::zeroed(self.len),
        }
    }

    /// The position of the array in its arena, if it is in one.
    pub fn place(&self) -> Option<Range<usize>> {
        match &self.storage {
            Storage::Shared(block) => Some(block.range()),
            Storage::Heap(_) | Storage::Mapped(_) => None,
        }
    }

    /// Has the kernel provide the pages of a range now. A page that is first read and then written
    /// is faulted in twice otherwise, and the second fault interrupts all cores: the first step
    /// took ten times as long as the others.
    pub fn populate(&mut self, range: Range<usize>) {
        for start in range.clone().step_by(POPULATED) {
            let length = POPULATED.min(range.end - start);
            // Linux before 5.14 does not support this advice, and populates pages at their first
            // use.
            let _ = match &mut self.storage {
                Storage::Heap(_) => return,
                Storage::Mapped(map) => map.advise_range(Advice::PopulateWrite, start, length),
                Storage::Shared(block) => block.populate(start..start + length),
            };
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        let all = match &self.storage {
            Storage::Heap(lines) => bytemuck::cast_slice(lines),
            Storage::Mapped(map) => &map[..],
            Storage::Shared(block) => block.bytes(),
        };
        &all[..self.len]
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let all = match &mut self.storage {
            Storage::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Storage::Mapped(map) => &mut map[..],
            Storage::Shared(block) => block.bytes_mut(),
        };
        &mut all[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_are_zeroed_aligned_and_of_the_right_size() {
        let arena = Arena::create("test", 16 * MAPPED_FROM).unwrap();
        let lens =
            [0, 1, 63, 64, 4_000, SHARED_FROM, MAPPED_FROM - 1, MAPPED_FROM, MAPPED_FROM + 1];
        let apart = lens.map(|len| (Memory::zeroed(len).unwrap(), len));
        let shared = lens.map(|len| (Memory::shared(&arena, len).unwrap(), len));
        for (mut memory, len) in apart.into_iter().chain(shared) {
            let another = memory.another().unwrap();
            assert_eq!(
                (another.bytes().len(), another.place().is_some()),
                (len, memory.place().is_some())
            );
            assert_eq!(memory.bytes().len(), len);
            assert_eq!(memory.bytes().as_ptr().align_offset(64), 0);
            assert!(memory.bytes_mut().iter().all(|&byte| byte == 0));
            memory.bytes_mut().fill(7);
            memory.populate(len / 3..len);
            assert!(memory.bytes().iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn large_arrays_are_in_the_arena_while_there_is_room() {
        let arena = Arena::create("test", 2 * SHARED_FROM).unwrap();
        assert_eq!(Memory::shared(&arena, SHARED_FROM - 1).unwrap().place(), None);
        let first = Memory::shared(&arena, SHARED_FROM).unwrap();
        assert_eq!(first.place(), Some(0..SHARED_FROM));
        assert_eq!(first.another().unwrap().place(), Some(SHARED_FROM..2 * SHARED_FROM));
        let second = first.another().unwrap();
        assert_eq!((first.another().unwrap().place(), second.bytes().len()), (None, SHARED_FROM));
    }

    #[test]
    fn an_allocation_beyond_the_memory_fails() {
        assert!(Memory::zeroed(usize::MAX / 4).is_none());
    }
}
