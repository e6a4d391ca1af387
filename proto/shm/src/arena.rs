//! The division of a segment into arrays.

#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    fmt, io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use crate::{PAGE, Segment};

/// A segment from which arrays are allocated, in whole pages. Only this process writes to them;
/// others can map the whole segment for reading.
#[derive(Debug)]
pub struct Arena {
    segment: Segment,
    reader: OwnedFd,
    /// The free ranges: first byte and length. INVARIANT: two of them do not touch.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// A zeroed array in an arena, which is its only user in this process.
pub struct Block {
    arena: Arc<Arena>,
    /// INVARIANT: whole pages, which no other block has.
    pages: Range<usize>,
    len: usize,
}

impl Arena {
    /// Creates an arena of `len` bytes, rounded up to whole pages. It takes no memory before it is
    /// used.
    ///
    /// # Errors
    /// Those of the system.
    pub fn create(name: &str, len: usize) -> io::Result<Arc<Self>> {
        let len = len.next_multiple_of(PAGE);
        let segment = Segment::create(name, len)?;
        let reader = segment.read_only()?;
        let free = Mutex::new(BTreeMap::from([(0, len)]));
        Ok(Arc::new(Self { segment, reader, free }))
    }

    /// Allocates `len` zero bytes, more than 0; `None` if there is no room.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<Block> {
        let size = len.checked_next_multiple_of(PAGE)?;
        let mut free = self.free.lock().expect("no holder of the lock panics");
        let (&start, &found) = free.iter().find(|&(_, &found)| found >= size)?;
        free.remove(&start);
        if found > size {
            free.insert(start + size, found - size);
        }
        Some(Block { arena: self.clone(), pages: start..start + size, len })
    }

    /// The descriptor, for processes that read.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.segment.len()
    }

    /// Always `false`.
    pub fn is_empty(&self) -> bool {
        self.segment.is_empty()
    }
}

impl Block {
    /// The position of the block in the segment.
    pub fn range(&self) -> Range<usize> {
        self.pages.start..self.pages.start + self.len
    }

    /// The segment of which this is a part.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.arena.segment.bytes(self.range())
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: no other block has these bytes, and `self` is borrowed exclusively.
        unsafe { self.arena.segment.bytes_mut(self.range()) }
    }

    /// Has the kernel provide the pages of a range of the block now.
    ///
    /// # Errors
    /// Those of the system.
    pub fn populate(&mut self, range: Range<usize>) -> io::Result<()> {
        let start = self.pages.start + range.start / PAGE * PAGE;
        let end = (self.pages.start + range.end).next_multiple_of(PAGE).min(self.pages.end);
        self.arena.segment.populate(start..end.max(start))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Range { mut start, mut end } = self.pages;
        if self.arena.segment.release(start..end).is_err() {
            return; // Its bytes would not be zero when they are allocated again.
        }
        let mut free = self.arena.free.lock().expect("no holder of the lock panics");
        if let Some((&before, &len)) = free.range(..start).next_back()
            && before + len == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(len) = free.remove(&end) {
            end += len;
        }
        free.insert(start, end - start);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.range()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_zeroed_and_reused() {
        let arena = Arena::create("test", 5 * PAGE - 1).unwrap();
        let mut blocks: Vec<Block> =
            [1, PAGE, PAGE + 1].map(|len| arena.allocate(len).unwrap()).into();
        assert!(arena.allocate(PAGE + 1).is_none());
        blocks.push(arena.allocate(PAGE).unwrap());
        assert!(arena.allocate(1).is_none());
        for (value, block) in (1..).zip(&mut blocks) {
            block.populate(0..block.len).unwrap();
            block.bytes_mut().fill(value);
        }
        for (value, block) in (1..).zip(&blocks) {
            assert!(block.bytes().iter().all(|&byte| byte == value));
        }
        // The free ranges grow together, whatever the order.
        for index in [1, 0, 1, 0] {
            blocks.remove(index);
        }
        let whole = arena.allocate(5 * PAGE).unwrap();
        assert_eq!(whole.range(), 0..5 * PAGE);
        assert!(whole.bytes().iter().all(|&byte| byte == 0));
        assert!(arena.allocate(usize::MAX).is_none());
    }
}
