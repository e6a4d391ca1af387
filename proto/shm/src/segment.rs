//! A segment, as the process that creates it sees it.

// The kernel maps memory; this file hands it out within its bounds.
#![allow(unsafe_code)]

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};

/// Memory of this process that other processes can map. Its size never changes.
#[derive(Debug)]
pub struct Segment {
    file: OwnedFd,
    map: MmapRaw,
}

impl Segment {
    /// Creates a segment of `len` zero bytes, more than 0. Pages exist from their first use on.
    /// `name` is visible in `/proc`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        // A child of a fork has no use for it. Not all kernels know the advice.
        let _ = map.advise(Advice::DontFork);
        Ok(Self { file, map })
    }

    /// A descriptor for a process that may only read. It cannot be mapped for writing, and only the
    /// user of this process could open the segment again. `F_SEAL_FUTURE_WRITE` would exclude that,
    /// too, but then no page can be given back.
    ///
    /// # Errors
    /// Those of the system, for example without `/proc`.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        rustix::fs::fchmod(&self.file, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The descriptor, for a process that may write.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Always `false`.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Has the kernel provide the pages of a range now.
    ///
    /// # Errors
    /// Those of the system if there is not enough memory, or before Linux 5.14.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.map.advise_range(Advice::PopulateWrite, range.start, range.len())
    }

    /// Gives the pages of a range back. They are zero afterwards.
    ///
    /// # Errors
    /// Those of the system.
    pub fn release(&self, range: Range<usize>) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, len) = (range.start as u64, range.len() as u64);
        Ok(rustix::fs::fallocate(&self.file, flags, start, len)?)
    }

    /// The bytes of a range, which another process may change at any time: a reader must not rely
    /// on reading the same value twice.
    ///
    /// # Panics
    /// If the range is not within the segment.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.check(&range);
        // SAFETY: the range is within the mapping, which lives as long as `self`. Nobody in this
        // process writes to it, except through a `Block` that the caller would have to hold.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), range.len()) }
    }

    /// The bytes of a range, for writing.
    ///
    /// # Safety
    /// Nobody else in this process may use any byte of the range meanwhile.
    ///
    /// # Panics
    /// If the range is not within the segment.
    #[expect(clippy::mut_from_ref, reason = "ranges are divided by the callers in this crate")]
    pub(crate) unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        self.check(&range);
        // SAFETY: the range is within the mapping, and the caller excludes other users.
        unsafe {
            std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(range.start), range.len())
        }
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE, View};

    #[test]
    fn a_reader_can_neither_write_nor_resize_a_segment() {
        let segment = Segment::create("test", 4 * PAGE).unwrap();
        // SAFETY: no other reference exists.
        unsafe { segment.bytes_mut(0..3) }.copy_from_slice(b"abc");
        let other = segment.read_only().unwrap();
        assert!(MmapOptions::new().len(PAGE).map_raw(&other).is_err());
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&other, flags, 0, PAGE as u64).is_err());
        for len in [0, PAGE as u64, 8 * PAGE as u64] {
            assert!(rustix::fs::ftruncate(&other, len).is_err());
            assert!(rustix::fs::ftruncate(segment.file(), len).is_err(), "also for a writer");
        }
        let seals = SealFlags::from_bits_retain(1 << 4);
        assert!(rustix::fs::fcntl_add_seals(&other, seals).is_err());
        let view = View::new(other, 4 * PAGE).unwrap();
        assert_eq!(view.bytes(1, 2), Some(&b"bc"[..]));
    }

    #[test]
    fn pages_that_are_given_back_are_zero() {
        let segment = Segment::create("test", 2 * PAGE).unwrap();
        segment.populate(0..2 * PAGE).unwrap();
        // SAFETY: no other reference exists.
        unsafe { segment.bytes_mut(0..2 * PAGE) }.fill(7);
        segment.release(0..PAGE).unwrap();
        assert!(segment.bytes(0..PAGE).iter().all(|&byte| byte == 0));
        assert!(segment.bytes(PAGE..2 * PAGE).iter().all(|&byte| byte == 7));
    }
}
