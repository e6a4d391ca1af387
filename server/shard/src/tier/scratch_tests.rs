//! The scratch file, on the disk of the build and in memory, and with faults.

use std::sync::atomic::{AtomicU64, Ordering};

use zeroshard_model::direct::Pages;

use super::*;
use crate::tier::Counter;

/// The faults of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Read,
    Write,
    ShortWrite,
    Full,
}

impl Fault {
    pub(crate) const ALL: [Self; 4] = [Self::Read, Self::Write, Self::ShortWrite, Self::Full];
}

/// A disk that fails after a number of further operations of one kind.
pub(crate) struct Faulty {
    file: File,
    fault: Fault,
    left: Arc<AtomicU64>,
}

impl Faulty {
    pub(crate) fn new(fault: Fault, left: Arc<AtomicU64>) -> Self {
        Self { file: tempfile::tempfile().unwrap(), fault, left }
    }

    fn fails(&self, operation: &[Fault]) -> bool {
        let take = |left: u64| left.checked_sub(1);
        operation.contains(&self.fault)
            && self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err()
    }
}

impl Disk for Faulty {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        match self.fails(&[Fault::Read]) {
            true => Err(rustix::io::Errno::IO.into()),
            false => Disk::read_at(&self.file, bytes, at),
        }
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        match (self.fails(&[Fault::Write, Fault::ShortWrite, Fault::Full]), self.fault) {
            (false, _) => Disk::write_at(&self.file, bytes, at),
            (true, Fault::Full) => Err(rustix::io::Errno::NOSPC.into()),
            (true, Fault::ShortWrite) => Ok(0),
            (true, _) => Err(rustix::io::Errno::IO.into()),
        }
    }

    fn reserve(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn release(&self, _: u64, _: u64) {}
}

impl Counter for AtomicU64 {
    fn inc_by(&self, bytes: u64) {
        self.fetch_add(bytes, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
}

pub(crate) fn traffic() -> Traffic {
    Traffic { read: Arc::<AtomicU64>::default(), written: Arc::<AtomicU64>::default() }
}

/// On the disk of the build, and in memory, where the system has such a directory.
fn directories() -> Vec<tempfile::TempDir> {
    let (program, memory) = (std::env::current_exe().unwrap(), Path::new("/dev/shm"));
    let mut directories = vec![tempfile::tempdir_in(program.parent().unwrap()).unwrap()];
    directories.extend(memory.is_dir().then(|| tempfile::tempdir_in(memory).unwrap()));
    directories
}

fn content(seed: usize, length: usize) -> Pages {
    let mut pages = Pages::new(length);
    let bytes = pages.bytes(0..length).iter_mut().enumerate();
    bytes.for_each(|(i, byte)| *byte = (i * 31 + i / 251 + seed) as u8);
    pages
}

#[test]
fn extents_keep_their_content_beside_each_other() {
    for directory in directories() {
        let traffic = traffic();
        let scratch = Scratch::create(directory.path(), traffic.clone()).unwrap();
        let lengths = [PAGE, 5 * PAGE, 300 * PAGE, 2 * PAGE];
        let extents = lengths.map(|length| scratch.take(length as u64 - 7).unwrap());
        for (seed, (extent, length)) in extents.iter().zip(lengths).enumerate() {
            extent.write(&content(seed, length).as_ref()[..length], 0).unwrap();
        }
        for (seed, (extent, length)) in extents.iter().zip(lengths).enumerate() {
            let (mut found, expected) = (Pages::new(length), content(seed, length));
            extent.read(found.bytes(0..length), 0).unwrap();
            assert_eq!(found.bytes(0..length), &expected.as_ref()[..length]);
            let last = length - PAGE;
            extent.read(found.bytes(0..PAGE), last).unwrap();
            assert_eq!(found.bytes(0..PAGE), &expected.as_ref()[last..length]);
        }
        let all = lengths.iter().sum::<usize>() as u64;
        assert_eq!((traffic.written.get(), traffic.read.get()), (all, all + 4 * PAGE as u64));
    }
}

#[test]
fn the_file_has_no_name_and_left_files_are_removed() {
    for directory in directories() {
        let other = directory.path().join("other");
        for path in [directory.path().join(format!("{PREFIX}left")), other.clone()] {
            fs::write(path, "left").unwrap();
        }
        let scratch = Scratch::create(directory.path(), traffic()).unwrap();
        let _extent = scratch.take(PAGE as u64).unwrap();
        let names: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(names, [other]);
    }
}

#[test]
fn a_directory_that_cannot_be_used_is_an_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(Scratch::create(file.path(), traffic()).is_err());
}

#[test]
fn every_fault_is_an_error() {
    for fault in Fault::ALL {
        let left = Arc::new(AtomicU64::new(1));
        let disk = Box::new(Faulty::new(fault, left));
        let scratch = Scratch::on(disk, "/scratch".to_owned(), traffic());
        let extent = scratch.take(PAGE as u64).unwrap();
        let mut pages = content(0, PAGE);
        let mut both = || {
            extent.write(pages.bytes(0..PAGE), 0)?;
            extent.read(pages.bytes(0..PAGE), 0)
        };
        both().unwrap();
        let kind = both().unwrap_err().kind();
        match fault {
            Fault::ShortWrite => assert_eq!(kind, io::ErrorKind::WriteZero),
            Fault::Full => assert_eq!(kind, io::ErrorKind::StorageFull),
            Fault::Read | Fault::Write => {
                assert_eq!(kind, io::Error::from(rustix::io::Errno::IO).kind())
            }
        }
    }
}

#[test]
fn bytes_that_were_never_written_are_not_read_beyond_the_end_of_the_file() {
    let disk = Box::new(Faulty::new(Fault::Read, Arc::new(AtomicU64::new(u64::MAX))));
    let scratch = Scratch::on(disk, "/scratch".to_owned(), traffic());
    let extent = scratch.take(PAGE as u64).unwrap();
    let error = extent.read(Pages::new(PAGE).bytes(0..PAGE), 0).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}
