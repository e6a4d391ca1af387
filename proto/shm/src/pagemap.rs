//! The pages that a process has written to, where a file is mapped.

// The kernel writes its answer to memory that this file hands to it.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::{
    io::Errno,
    ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode},
};

use crate::PAGE;

/// The pages of a private mapping of a file that are not pages of the file any more, because this
/// process has written to them: ranges of bytes from `at` on, which is a multiple of [`PAGE`].
///
/// # Errors
/// Those of the system.
pub(crate) fn private_pages(at: usize, len: usize) -> io::Result<Vec<Range<usize>>> {
    static CAN_SCAN: AtomicBool = AtomicBool::new(true);
    let file = pagemap()?;
    if CAN_SCAN.load(Ordering::Relaxed) {
        match scan(file, at, len) {
            // Before Linux 6.7, or where a filter of system calls forbids it.
            Err(Errno::NOTTY | Errno::INVAL | Errno::PERM | Errno::NOSYS) => {
                CAN_SCAN.store(false, Ordering::Relaxed);
            }
            scanned => return Ok(scanned?),
        }
    }
    read(file, at, len)
}

/// The argument of `PAGEMAP_SCAN`. See the kernel's documentation, admin-guide/mm/pagemap.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Categories of pages.
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;

/// Pages of the same category.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Found {
    start: u64,
    end: u64,
    categories: u64,
}

// SAFETY: the number is that of the call with this argument, which lives as long as `self`; the
// kernel writes no more than `vec_len` ranges to `vec`.
unsafe impl Ioctl for Scan {
    /// The number of ranges, and where the search has ended.
    type Output = (usize, u64);

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<Self>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }

    unsafe fn output_from_ptr(
        found: IoctlOutput,
        scan: *mut c_void,
    ) -> rustix::io::Result<Self::Output> {
        // SAFETY: it is what `as_ptr` has returned.
        let walk_end = unsafe { (*scan.cast::<Self>()).walk_end };
        Ok((found as usize, walk_end))
    }
}

fn scan(file: &File, at: usize, len: usize) -> Result<Vec<Range<usize>>, Errno> {
    let mut found = [Found::default(); 64];
    let mut pages: Vec<Range<usize>> = Vec::new();
    let end = (at + len.next_multiple_of(PAGE)) as u64;
    let mut start = at as u64;
    while start < end {
        let scan = Scan {
            size: size_of::<Scan>() as u64,
            start,
            end,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            category_inverted: FILE,
            category_mask: FILE,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: FILE,
            ..Scan::default()
        };
        // SAFETY: `vec` has room for `vec_len` ranges.
        let (count, walk_end) = unsafe { ioctl(file, scan)? };
        pages.extend(found[..count].iter().map(|of| of.start as usize - at..of.end as usize - at));
        start = walk_end;
    }
    Ok(pages)
}

/// Bits of an entry of `/proc/self/pagemap`: the page is in memory, it is swapped out, it belongs
/// to a file.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_OF_FILE: u64 = 1 << 61;

/// The entries that are read at once: those of 4 MiB.
const ENTRIES: usize = 1024;

fn read(file: &File, at: usize, len: usize) -> io::Result<Vec<Range<usize>>> {
    let mut entries = [0; ENTRIES * size_of::<u64>()];
    let mut found: Vec<Range<usize>> = Vec::new();
    for first in (0..len.div_ceil(PAGE)).step_by(ENTRIES) {
        let count = ENTRIES.min(len.div_ceil(PAGE) - first);
        let entries = &mut entries[..count * size_of::<u64>()];
        file.read_exact_at(entries, ((at / PAGE + first) * size_of::<u64>()) as u64)?;
        for (page, entry) in (first..).zip(entries.as_chunks().0) {
            let entry = u64::from_ne_bytes(*entry);
            if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) == 0 || entry & ENTRY_OF_FILE != 0 {
                continue;
            }
            let range = page * PAGE..(page + 1) * PAGE;
            match found.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => found.push(range),
            }
        }
    }
    Ok(found)
}

fn pagemap() -> io::Result<&'static File> {
    static OPENED: OnceLock<Option<File>> = OnceLock::new();
    let file = OPENED.get_or_init(|| File::open("/proc/self/pagemap").ok());
    file.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use memmap2::MmapOptions;

    use super::*;
    use crate::Segment;

    #[test]
    fn both_ways_find_the_pages_that_were_written() {
        const PAGES: usize = 2500;
        let segment = Segment::create("test", PAGES * PAGE).unwrap();
        segment.populate(0..PAGES * PAGE).unwrap();
        // SAFETY: a private mapping.
        let mut map = unsafe { MmapOptions::new().len(PAGES * PAGE).map_copy(&segment.file()) };
        let map = map.as_mut().unwrap();
        let at = map.as_ptr() as usize;
        assert!(map.iter().all(|&byte| byte == 0));
        let file = pagemap().unwrap();
        assert_eq!(read(file, at, map.len()).unwrap(), []);
        let mut expected = Vec::new();
        for page in (0..PAGES).filter(|page| page % 3 == 1) {
            map[page * PAGE + page % PAGE] = 1;
            expected.push(page * PAGE..(page + 1) * PAGE);
        }
        assert_eq!(read(file, at, map.len()).unwrap(), expected);
        match scan(file, at, map.len()) {
            Ok(found) => assert_eq!(found, expected),
            Err(error) => println!("PAGEMAP_SCAN is not available: {error}"),
        }
        assert_eq!(private_pages(at, PAGE).unwrap(), []);
        assert_eq!(private_pages(at + PAGE, PAGE).unwrap(), vec![0..PAGE]);
    }
}
