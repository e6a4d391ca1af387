//! Scratch space for arrays outside of the memory of the backend: a file that is read and written
//! without the page cache, or host memory (`host`).
//!
//! The file has no name while it is used, so that nothing is left when the process ends, in
//! whatever way. Its content is worth nothing after that.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{Arc, Mutex},
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use tokio::runtime::{Handle, RuntimeFlavor};
use zeroshard_model::direct::{PAGE, open};

use super::{free::Free, host::HostMemory, traffic::Traffic};

/// The beginning of the name that a scratch file has while it is created.
const PREFIX: &str = "zeroshard-scratch-";

/// The operations on scratch space. Tests inject faults here.
pub(crate) trait Disk: Send + Sync {
    /// Reads into `bytes`, and returns the number of bytes that were read.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes from `bytes`, and returns the number of bytes that were written.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize>;

    /// Ensures that there is room for these bytes, so that writing them cannot fail for want of it.
    fn reserve(&self, at: u64, length: u64) -> io::Result<()>;

    /// Returns the room of these bytes, whose content is no longer needed.
    fn release(&self, at: u64, length: u64);
}

impl Disk for File {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        FileExt::read_at(self, bytes, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, at)
    }

    fn reserve(&self, at: u64, length: u64) -> io::Result<()> {
        loop {
            match fallocate(self, FallocateFlags::empty(), at, length) {
                Err(Errno::INTR) => {}
                // The file system finds room when it is written.
                Err(Errno::OPNOTSUPP) => return Ok(()),
                Err(Errno::DQUOT) => return Err(Errno::NOSPC.into()),
                reserved => return Ok(reserved?),
            }
        }
    }

    fn release(&self, at: u64, length: u64) {
        // A file system that cannot do it uses the room again for later arrays.
        let _ = fallocate(self, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, length);
    }
}

/// A file without a name in a directory, or host memory.
pub(crate) struct Scratch {
    disk: Box<dyn Disk>,
    /// The name in errors.
    name: String,
    free: Mutex<Free>,
    traffic: Traffic,
}

impl Scratch {
    /// Creates the file, and removes files that servers have left in `directory` before they had
    /// taken their names away.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn create(directory: &Path, traffic: Traffic) -> io::Result<Arc<Self>> {
        fs::create_dir_all(directory)?;
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                // Another server that starts may have removed it.
                let _ = fs::remove_file(entry.path());
            }
        }
        let number = getrandom::u64()
            .map_err(|e| io::Error::other(format!("cannot draw a random number: {e}")))?;
        let path = directory.join(format!("{PREFIX}{number:016x}"));
        // The name is random. Without direct access, the first try creates the file and fails.
        let mut options = OpenOptions::new();
        let file = open(&path, options.read(true).write(true).create(true).truncate(false))?;
        match fs::remove_file(&path) {
            // A server that starts at the same moment has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed?,
        }
        let name = format!("the scratch file in {}", directory.display());
        Ok(Self::on(Box::new(file), name, traffic))
    }

    /// Scratch space in host memory.
    pub(crate) fn in_host_memory(traffic: Traffic) -> Arc<Self> {
        let name = "host memory (--host-memory)".to_owned();
        Self::on(Box::new(HostMemory::default()), name, traffic)
    }

    /// Scratch space on `disk`.
    pub(crate) fn on(disk: Box<dyn Disk>, name: String, traffic: Traffic) -> Arc<Self> {
        Arc::new(Self { disk, name, free: Mutex::new(Free::default()), traffic })
    }

    /// The name in errors.
    pub(crate) fn name(&self) -> String {
        self.name.clone()
    }

    /// Reserves room for `length` bytes.
    ///
    /// # Errors
    /// Those of the file system, such as [`io::ErrorKind::StorageFull`].
    pub(crate) fn take(self: &Arc<Self>, length: u64) -> io::Result<Extent> {
        let length = length.next_multiple_of(PAGE as u64);
        let at = self.free.lock().expect("no holder of the lock panics").take(length);
        let extent = Extent { scratch: self.clone(), at, length };
        if length > 0 {
            self.disk.reserve(at, length)?;
        }
        Ok(extent)
    }
}

/// A part of the scratch space, returned when dropped.
pub(crate) struct Extent {
    scratch: Arc<Scratch>,
    /// INVARIANT: `at` and `length` are multiples of a page.
    at: u64,
    length: u64,
}

impl Extent {
    /// Fills `pages` with the content from byte `at` on. Both are multiples of a page.
    ///
    /// # Errors
    /// Those of the disk; [`io::ErrorKind::UnexpectedEof`] for bytes that were never written.
    pub(crate) fn read(&self, pages: &mut [u8], at: usize) -> io::Result<()> {
        let start = self.position(at, pages.len());
        let mut filled = 0;
        while filled < pages.len() {
            match self.scratch.disk.read_at(&mut pages[filled..], start + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.scratch.traffic.read.inc_by(filled as u64);
        Ok(())
    }

    /// Writes `pages` from byte `at` on. Both are multiples of a page.
    ///
    /// # Errors
    /// Those of the disk. A part may have been written.
    pub(crate) fn write(&self, pages: &[u8], at: usize) -> io::Result<()> {
        let start = self.position(at, pages.len());
        let mut written = 0;
        while written < pages.len() {
            match self.scratch.disk.write_at(&pages[written..], start + written as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.scratch.traffic.written.inc_by(written as u64);
        Ok(())
    }

    pub(crate) fn scratch(&self) -> &Arc<Scratch> {
        &self.scratch
    }

    fn position(&self, at: usize, length: usize) -> u64 {
        assert!((at | length).is_multiple_of(PAGE), "whole pages");
        assert!((at + length) as u64 <= self.length, "within the extent");
        self.at + at as u64
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        if self.length > 0 {
            self.scratch.disk.release(self.at, self.length);
        }
        let mut free = self.scratch.free.lock().expect("no holder of the lock panics");
        free.give(self.at, self.length);
    }
}

/// Runs work that waits for the disk. On a thread of a runtime with several threads, the other
/// tasks of this thread continue on another one.
pub(super) fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

#[cfg(test)]
#[path = "scratch_tests.rs"]
pub(crate) mod tests;
