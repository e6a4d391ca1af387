//! A segment of another process, for reading.

#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

/// A segment of another process that this one only reads. The other process must not write the
/// bytes that are being read; the protocol between them excludes it.
#[derive(Debug)]
pub struct View {
    file: OwnedFd,
    map: MmapRaw,
}

impl View {
    /// Maps `len` bytes of a descriptor that another process has sent.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is not a segment of this size that cannot shrink; those
    /// of the system.
    pub fn new(file: OwnedFd, len: usize) -> io::Result<Self> {
        check(&file, len)?;
        let map = MmapOptions::new().len(len).map_raw_read_only(&file)?;
        let _ = map.advise(Advice::DontFork);
        Ok(Self { file, map })
    }

    /// The descriptor, for further mappings.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// `len` bytes from byte `at` on; `None` if they are not within the segment.
    pub fn bytes(&self, at: u64, len: u64) -> Option<&[u8]> {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        if at.checked_add(len)? > self.map.len() {
            return None;
        }
        // SAFETY: the range is within the mapping, which cannot shrink, and lives as `self` does.
        Some(unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(at), len) })
    }
}

/// Checks that a descriptor is a segment of `len` bytes that stays at least that long: a shorter
/// one would kill this process when it reads the end.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`].
pub(crate) fn check(file: &impl AsFd, len: usize) -> io::Result<()> {
    let found = rustix::fs::fstat(file)?.st_size;
    let seals = rustix::fs::fcntl_get_seals(file)?;
    if len == 0 || found != len as i64 || !seals.contains(SealFlags::SHRINK) {
        let cause = format!("a segment of {len} bytes was announced; {found} bytes came");
        return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE, Segment};

    #[test]
    fn a_file_that_could_be_shortened_or_has_another_size_is_refused() {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let plain = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&plain, PAGE as u64).unwrap();
        let segment = Segment::create("test", PAGE).unwrap();
        let file = || segment.file().try_clone_to_owned().unwrap();
        assert!(View::new(plain, PAGE).is_err());
        assert!(View::new(file(), 2 * PAGE).is_err() && View::new(file(), 0).is_err());
        let view = View::new(file(), PAGE).unwrap();
        for (at, len) in [(0, PAGE as u64 + 1), (PAGE as u64, 1), (u64::MAX, 2), (1, u64::MAX)] {
            assert_eq!(view.bytes(at, len), None);
        }
        assert_eq!(view.bytes(PAGE as u64, 0), Some(&[][..]));
    }
}
