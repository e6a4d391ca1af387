//! Files of checkpoints in a directory, which are read and written without the page cache.
//!
//! A checkpoint is much larger than most caches, and is read rarely: its pages in the cache would
//! be memory that is allocated, cleared and copied for nothing, on cores that steps need. They are
//! read if they are there already. File systems without direct access are used with the cache.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Advice, fadvise},
    io::{ReadWriteFlags, preadv2},
};

use zeroshard_model::direct::{PAGE, Pages, open};

/// The bytes that are written with one call. A thread of low priority waits for a core after each.
const WRITTEN: usize = 1 << 20;

/// A range of a file, of which pieces are read.
pub(crate) struct Pieces {
    file: File,
    /// The position of the first byte of the range in the file.
    start: u64,
    pages: Pages,
}

impl Pieces {
    /// Opens a range that is not empty, to read pieces of at most `size` bytes.
    pub(crate) fn open(path: &Path, range: Range<u64>, size: usize) -> io::Result<Self> {
        let cached = File::open(path)?;
        let file = match is_cached(&cached, range.end - 1) {
            true => cached,
            false => open(path, OpenOptions::new().read(true))?,
        };
        // A piece begins and ends inside of pages.
        Ok(Self { file, start: range.start, pages: Pages::new(size + 2 * PAGE) })
    }

    /// The `length` bytes from position `at` of the range on.
    pub(crate) fn read(&mut self, at: usize, length: usize) -> io::Result<&[u8]> {
        let at = self.start + at as u64;
        let before = (at % PAGE as u64) as usize;
        let (first, needed) = (at - before as u64, before + length);
        let pages = self.pages.bytes(0..needed.next_multiple_of(PAGE));
        let mut filled = 0;
        while filled < needed {
            match self.file.read_at(&mut pages[filled..], first + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(&pages[before..needed])
    }
}

/// Returns whether the page at a position is in the page cache. It stands for those around it,
/// which were written or read together with it.
fn is_cached(file: &File, at: u64) -> bool {
    // Without this advice, the kernel begins to read the following pages as well.
    let advised = fadvise(file, 0, None, Advice::Random);
    let mut byte = [0];
    let buffers = &mut [io::IoSliceMut::new(&mut byte)];
    advised.is_ok() && matches!(preadv2(file, buffers, at, ReadWriteFlags::NOWAIT), Ok(1))
}

/// A file that is being written. It has its name when it is complete and on the disk; it is removed
/// if it is dropped before.
pub(crate) struct NewFile {
    path: PathBuf,
    /// The name of an unfinished file in [`crate::unfinished`].
    unfinished: PathBuf,
    file: File,
    /// The bytes that are not written yet.
    pages: Pages,
    filled: usize,
    /// The bytes that are written.
    written: u64,
}

impl NewFile {
    /// Creates the file, and its directory.
    pub(crate) fn create(path: PathBuf) -> io::Result<Self> {
        let mut unfinished = path.clone().into_os_string();
        unfinished.push("#0");
        let unfinished = PathBuf::from(unfinished);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let file = open(&unfinished, OpenOptions::new().write(true).create(true).truncate(true))?;
        Ok(Self { path, unfinished, file, pages: Pages::new(WRITTEN), filled: 0, written: 0 })
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let taken = bytes.len().min(WRITTEN - self.filled);
            let (now, later) = bytes.split_at(taken);
            self.pages.bytes(self.filled..self.filled + taken).copy_from_slice(now);
            self.filled += taken;
            bytes = later;
            if self.filled == WRITTEN {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Writes the pages that are filled, the last one up to its end.
    fn flush(&mut self) -> io::Result<()> {
        let end = self.filled.next_multiple_of(PAGE);
        self.pages.bytes(self.filled..end).fill(0);
        self.file.write_all(self.pages.bytes(0..end))?;
        self.written += self.filled as u64;
        self.filled = 0;
        Ok(())
    }

    /// Ends the file, and returns when it is on the disk with its name.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        self.file.set_len(self.written)?;
        self.file.sync_all()?;
        fs::rename(&self.unfinished, &self.path)?;
        // The directories of the version, of the job, and of all jobs: each may be new.
        self.path.ancestors().skip(1).take(3).try_for_each(|of| File::open(of)?.sync_all())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // After the end there is no file with this name.
        let _ = fs::remove_file(&self.unfinished);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    fn write(path: &Path, content: &[u8], pieces: usize) {
        let mut file = NewFile::create(path.to_owned()).unwrap();
        content.chunks(pieces).for_each(|piece| file.write(piece).unwrap());
        file.finish().unwrap();
    }

    /// On the disk of the build, and in memory, where the system has such a directory.
    fn directories() -> Vec<tempfile::TempDir> {
        let (program, memory) = (std::env::current_exe().unwrap(), Path::new("/dev/shm"));
        let mut directories = vec![tempfile::tempdir_in(program.parent().unwrap()).unwrap()];
        directories.extend(memory.is_dir().then(|| tempfile::tempdir_in(memory).unwrap()));
        directories
    }

    #[test]
    fn files_of_any_size_are_written_and_read_in_any_pieces() {
        for directory in directories() {
            let path = directory.path().join("job/1/file");
            let sizes = [0, 1, PAGE - 1, PAGE, WRITTEN - 1, WRITTEN, WRITTEN + 1, 2 * WRITTEN + 77];
            for (size, pieces) in
                sizes.into_iter().zip([1, 1, 7, PAGE, 100_003, WRITTEN, 13, 4_097])
            {
                let content = content(size);
                write(&path, &content, pieces);
                assert_eq!(fs::read(&path).unwrap(), content, "{size} bytes");
                assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
                for (start, length) in [(0, 1), (1, PAGE), (PAGE - 1, 2), (77, 9_999)] {
                    let Some(expected) = content.get(start..start + length) else { continue };
                    let range = start as u64..content.len() as u64;
                    let mut read = Pieces::open(&path, range, length).unwrap();
                    assert_eq!(read.read(0, length).unwrap(), expected);
                    if let Some(expected) = content.get(start + 5..start + 5 + length) {
                        assert_eq!(read.read(5, length).unwrap(), expected);
                    }
                }
            }
        }
    }

    #[test]
    fn a_piece_beyond_the_end_of_a_file_is_an_error() {
        for directory in directories() {
            let path = directory.path().join("file");
            write(&path, &content(10_000), 1_000);
            let mut read = Pieces::open(&path, 0..12_000, 12_000).unwrap();
            assert!(read.read(0, 10_000).is_ok());
            assert!(read.read(9_000, 1_001).is_err());
            assert!(read.read(0, 12_000).is_err());
        }
    }

    #[test]
    fn an_unfinished_file_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = NewFile::create(directory.path().join("file")).unwrap();
        file.write(&content(2 * WRITTEN)).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        drop(file);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
