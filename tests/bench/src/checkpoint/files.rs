//! Plain files, with which checkpoints are compared, and the page cache.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    thread,
};

use rustix::fs::{Advice, fadvise};

/// The number of bytes that are read or written with one call.
pub(super) const BLOCK: usize = 4 << 20;

/// A file and its size in bytes.
pub(super) type Sized = (PathBuf, u64);

/// The data files of all checkpoints in the folder of a job.
pub(super) fn data_files(job: &Path) -> io::Result<Vec<Sized>> {
    let mut files = Vec::new();
    for version in fs::read_dir(job)? {
        for file in fs::read_dir(version?.path())? {
            let file = file?;
            if file.path().extension().is_some_and(|extension| extension == "safetensors") {
                files.push((file.path(), file.metadata()?.len()));
            }
        }
    }
    Ok(files)
}

/// Writes files sequentially, with repetitions of `content`, and flushes them to disk.
pub(super) fn write(files: &[Sized], threads: usize, content: &[u8]) -> io::Result<()> {
    in_threads(files, threads, |(path, bytes)| {
        let mut file = File::create(path)?;
        let mut left = *bytes;
        while left > 0 {
            let block = left.min(content.len() as u64);
            file.write_all(&content[..block as usize])?;
            left -= block;
        }
        file.sync_all()
    })
}

/// Reads files sequentially.
pub(super) fn read(files: &[Sized], threads: usize) -> io::Result<()> {
    in_threads(files, threads, |(path, _)| {
        let mut file = File::open(path)?;
        let mut block = vec![0; BLOCK];
        while file.read(&mut block)? > 0 {}
        Ok(())
    })
}

/// Calls `work` for every file, in this number of threads.
fn in_threads(
    files: &[Sized],
    threads: usize,
    work: impl Fn(&Sized) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let work = &work;
    thread::scope(|scope| {
        let running: Vec<_> = files
            .chunks(files.len().div_ceil(threads).max(1))
            .map(|files| scope.spawn(move || files.iter().try_for_each(work)))
            .collect();
        let panicked = |_| Err(io::Error::other("a thread panicked"));
        running.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
    })
}

/// Removes the pages of files that have been flushed to disk from the page cache. The rest of the
/// cache remains, so that other programs are not disturbed.
pub(super) fn evict(files: &[Sized]) -> io::Result<()> {
    for (path, _) in files {
        // A length of 0 is the whole file.
        fadvise(File::open(path)?, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// The number of bytes that a process has read from disks and not from the page cache.
pub(super) fn read_from_disk(process: &str) -> io::Result<u64> {
    let counters = fs::read_to_string(format!("/proc/{process}/io"))?;
    let line = counters.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    let bytes = line.and_then(|bytes| bytes.parse().ok());
    bytes.ok_or_else(|| io::Error::other(format!("/proc/{process}/io has no read_bytes")))
}
