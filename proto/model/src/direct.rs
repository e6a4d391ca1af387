//! Files that are read and written without the page cache: aligned memory, and files opened for it.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::fs::OFlags;

/// The alignment of direct access: a page, and a multiple of the sectors of all common disks.
pub const PAGE: usize = 4096;

/// Memory that begins with a page.
#[derive(Debug)]
pub struct Pages {
    memory: Vec<u8>,
    start: usize,
}

impl Pages {
    /// `length` bytes.
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Self { memory, start }
    }

    /// A range of the bytes.
    pub fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.memory[self.start..][range]
    }
}

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

/// Opens a file without the page cache or, if its file system cannot do that, with it.
///
/// # Errors
/// Those of [`OpenOptions::open`].
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let direct = OFlags::DIRECT.bits() as i32;
    match options.custom_flags(direct).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            options.custom_flags(0).open(path)
        }
        opened => opened,
    }
}
