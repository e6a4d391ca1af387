//! Zeroed, aligned host memory that fails instead of aborting.

use bytemuck::{Pod, Zeroable};
use memmap2::{MmapMut, MmapOptions};

/// From this size on memory is mapped on its own: the kernel has it back as soon as it is dropped.
/// Below it (a model may have ten thousand small tensors) a mapping each would waste pages and run
/// into the limit on their number.
const MAPPED_FROM: usize = 1 << 20;

/// A cache line: what small arrays are aligned to.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

// SAFETY: a `Line` is 64 bytes with no padding, and any bytes are a `Line`.
unsafe impl Zeroable for Line {}
// SAFETY: as above.
unsafe impl Pod for Line {}

/// A zeroed array of bytes, aligned to at least 64.
pub(super) struct Memory {
    storage: Storage,
    /// INVARIANT: at most the storage's size.
    len: usize,
}

enum Storage {
    Heap(Vec<Line>),
    Mapped(MmapMut),
}

impl Memory {
    /// `len` zero bytes, or nothing where there is not that much.
    pub(super) fn zeroed(len: usize) -> Option<Memory> {
        let storage = if len < MAPPED_FROM {
            let lines = len.div_ceil(size_of::<Line>());
            let mut heap = Vec::new();
            heap.try_reserve_exact(lines).ok()?;
            heap.resize(lines, Line::zeroed());
            Storage::Heap(heap)
        } else {
            // No advice on huge pages: measured on a virtual machine, steps were as fast without
            // them, and a first touch four times as fast (the host had taken free huge pages back).
            //
            // Populated at once: a page that is first read, and then written, is faulted in twice,
            // and the second time all cores are interrupted. It made the first step ten times as
            // long as the others.
            Storage::Mapped(MmapOptions::new().len(len).populate().map_anon().ok()?)
        };
        Some(Memory { storage, len })
    }

    /// The bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        let all = match &self.storage {
            Storage::Heap(lines) => bytemuck::cast_slice(lines),
            Storage::Mapped(map) => &map[..],
        };
        &all[..self.len]
    }

    /// The bytes, to write.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let all = match &mut self.storage {
            Storage::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Storage::Mapped(map) => &mut map[..],
        };
        &mut all[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_are_zeroed_aligned_and_of_the_right_size() {
        for len in [0, 1, 63, 64, 4_000, MAPPED_FROM - 1, MAPPED_FROM, MAPPED_FROM + 1] {
            let mut memory = Memory::zeroed(len).unwrap();
            assert_eq!(memory.bytes().len(), len);
            assert_eq!(memory.bytes().as_ptr().align_offset(64), 0);
            assert!(memory.bytes_mut().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn more_than_there_is_gives_nothing() {
        assert!(Memory::zeroed(usize::MAX / 4).is_none());
    }
}
