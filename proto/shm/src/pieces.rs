//! A segment of another process, for writing in pieces of one size.

#![allow(unsafe_code)]

use std::{
    io,
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

use crate::view::check;

/// A segment of another process that this one writes, in pieces of one size.
#[derive(Debug)]
pub struct Pieces {
    map: MmapRaw,
    size: usize,
    /// The numbers of free pieces. The one that was used last is taken first: it is in the cache.
    free: Mutex<Vec<usize>>,
}

/// A piece that only its holder uses. Dropped, it is free for the next one: whoever lets the other
/// process read it keeps it until then.
#[derive(Debug)]
pub struct Piece {
    of: Arc<Pieces>,
    number: usize,
}

impl Pieces {
    /// Maps `len` bytes of a descriptor that another process has sent, as pieces of `size` bytes,
    /// more than 0.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is not a segment of this size that cannot shrink; those
    /// of the system.
    pub fn new(file: OwnedFd, len: usize, size: usize) -> io::Result<Arc<Self>> {
        check(&file, len)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        let _ = map.advise(Advice::DontFork);
        Ok(Arc::new(Self { map, size, free: Mutex::new((0..len / size).rev().collect()) }))
    }

    /// A free piece, if there is one.
    pub fn take(self: &Arc<Self>) -> Option<Piece> {
        let number = self.free.lock().expect("no holder of the lock panics").pop()?;
        Some(Piece { of: self.clone(), number })
    }

    /// Gives the memory of the free pieces back to the system. They have memory again when they are
    /// used.
    ///
    /// # Errors
    /// Those of the system.
    pub fn release(&self) -> io::Result<()> {
        // Nobody takes a piece meanwhile.
        let free = self.free.lock().expect("no holder of the lock panics");
        free.iter().try_for_each(|number| {
            // SAFETY: no `Piece` has this number, so that nobody has a reference to its bytes.
            unsafe {
                let at = number * self.size;
                self.map.unchecked_advise_range(UncheckedAdvice::Remove, at, self.size)
            }
        })
    }

    /// The size of a piece in bytes.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl Piece {
    /// The first byte of the piece in the segment.
    pub fn at(&self) -> u64 {
        (self.number * self.of.size) as u64
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.of.free.lock().expect("no holder of the lock panics").push(self.number);
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the piece is within the mapping, and no other `Piece` has this number.
        unsafe {
            let start = self.of.map.as_ptr().add(self.number * self.of.size);
            std::slice::from_raw_parts(start, self.of.size)
        }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe {
            let start = self.of.map.as_mut_ptr().add(self.number * self.of.size);
            std::slice::from_raw_parts_mut(start, self.of.size)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE, Segment};

    #[test]
    fn a_piece_has_one_holder_and_is_free_again_when_it_is_dropped() {
        let segment = Segment::create("test", 3 * PAGE).unwrap();
        let file = segment.file().try_clone_to_owned().unwrap();
        let pieces = Pieces::new(file, 3 * PAGE, PAGE).unwrap();
        let mut held: Vec<Piece> = std::iter::from_fn(|| pieces.take()).collect();
        assert_eq!(held.len(), 3);
        for (value, piece) in (1..).zip(&mut held) {
            piece.fill(value);
        }
        drop(held.pop());
        let again = pieces.take().unwrap();
        assert!(pieces.take().is_none() && again.iter().all(|&byte| byte == 3));
        let at = held[1].at() as usize;
        assert!(segment.bytes(at..at + PAGE).iter().all(|&byte| byte == 2));
    }

    #[test]
    fn only_free_pieces_are_given_back() {
        let segment = Segment::create("test", 2 * PAGE).unwrap();
        let file = segment.file().try_clone_to_owned().unwrap();
        let pieces = Pieces::new(file, 2 * PAGE, PAGE).unwrap();
        let (mut held, mut other) = (pieces.take().unwrap(), pieces.take().unwrap());
        held.fill(1);
        other.fill(2);
        drop(other);
        pieces.release().unwrap();
        assert!(held.iter().all(|&byte| byte == 1));
        assert!(pieces.take().unwrap().iter().all(|&byte| byte == 0));
    }
}
