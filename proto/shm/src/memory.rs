//! The memory of a pane, as bytes of one holder.

#![allow(unsafe_code)]

use std::{
    io,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use crate::Pane;

/// Bytes that begin at a page, and in which segments of another process appear.
///
/// Whoever [shows](Pane::show) pages in them guarantees that the other process does not write the
/// pages meanwhile.
#[derive(Debug)]
pub struct Memory(Arc<Pane>);

impl Memory {
    /// Reserves `len` zero bytes.
    ///
    /// # Errors
    /// Those of [`Pane::new`].
    pub fn new(len: usize) -> io::Result<Self> {
        Pane::new(len).map(Self)
    }

    /// The bytes, and the pane, which may show others in them as long as they are borrowed.
    pub fn to_show(&mut self) -> (&mut [u8], Arc<Pane>) {
        let pane = self.0.clone();
        (self, pane)
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pane is mapped as long as it exists, and nobody but the holder writes it.
        unsafe { std::slice::from_raw_parts(self.0.address() as *const u8, self.0.len()) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.address() as *mut u8, self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Keeper, PAGE, Segment, View};

    #[test]
    fn memory_has_what_the_pane_shows_and_can_be_written() {
        let mut memory = Memory::new(PAGE + 1).unwrap();
        memory[PAGE] = 3;
        assert_eq!((memory.len(), memory[0], memory[PAGE]), (PAGE + 1, 0, 3));
        let segment = Segment::create("test", 2 * PAGE).unwrap();
        let view = Arc::new(View::new(segment.read_only().unwrap(), 2 * PAGE).unwrap());
        let (_, pane) = memory.to_show();
        assert!(pane.show(0..PAGE + 1, &view, 0, &mut Some(Box::new(()) as Keeper)).unwrap());
        assert!(memory.iter().all(|&byte| byte == 0));
        memory[1] = 4;
        assert_eq!((memory[1], segment.bytes(1..2)[0]), (4, 0));
    }
}
