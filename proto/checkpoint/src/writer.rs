//! Writes a server's slices of one version, in files of about [`FILE_BYTES`].
//!
//! Memory: up to [`READ_AHEAD`] parts of slices are read and hashed ahead, and up to
//! four chunks of 16 MiB are being stored (`upload`).

use std::sync::Arc;

use blake3::Hash;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use zeroshard_model::{AppliedSteps, Error, JobSpec, LineVersion, Result};
use zeroshard_proto::pb;

use crate::{
    Part, Storage,
    format::{self, Entry},
    storage::prefix_of,
    upload::Upload,
};

/// The size at which a file ends.
const FILE_BYTES: usize = 1 << 30;
/// The number of parts that are read and hashed ahead.
const READ_AHEAD: usize = 4;

/// One version of a server's slices.
pub trait Source: Send + Sync + 'static {
    /// Puts slices that are to be written soon first. Called before each file, with the slices that
    /// are in no file yet.
    fn order(&self, slices: &mut [u32]) {
        _ = slices;
    }

    /// A part of a slice, as little-endian bytes. Called once for each part that the slice has,
    /// from threads that may block.
    ///
    /// # Errors
    /// Any error ends the save.
    fn part(&self, slice: u32, part: Part) -> Result<Bytes>;

    /// The steps applied to the slice. Called before [`Self::done`].
    fn applied(&self, slice: u32) -> AppliedSteps;

    /// All parts of the slice have been read; their bytes may still be in use.
    fn done(&self, slice: u32);
}

/// A server's part of a save.
#[derive(Debug, Clone)]
pub struct Save {
    /// The specification of the job.
    pub spec: Arc<JobSpec>,
    /// The version.
    pub version: LineVersion,
    /// The number of the save.
    pub save: u64,
    /// The id of the server.
    pub server: u64,
}

/// Writes slices. Dropping the future gives the save up; [`Storage::discard`] removes its files.
///
/// # Errors
/// [`Error::Storage`]; those of `source`.
pub async fn write(
    storage: &Storage,
    save: &Save,
    mut slices: Vec<u32>,
    source: Arc<dyn Source>,
) -> Result<Vec<pb::CheckpointFile>> {
    let mut files = Vec::new();
    while !slices.is_empty() {
        source.order(&mut slices);
        let file = next_file(&save.spec, &mut slices);
        let number = files.len();
        let name = format!("{}{:016x}-{number}.safetensors", prefix_of(save.save), save.server);
        files.push(write_file(storage, save, name, &file, &source).await?);
    }
    Ok(files)
}

/// Takes the slices of the next file from the start of `slices`.
fn next_file(spec: &JobSpec, slices: &mut Vec<u32>) -> Vec<u32> {
    let (mut bytes, mut header) = (0, 0);
    let is_last = |&slice: &u32| {
        for (_, entry) in format::parts(spec, slice as usize) {
            bytes += entry.bytes;
            header += format::header_bytes(&entry);
        }
        bytes >= FILE_BYTES || header >= format::HEADER_BYTES
    };
    let last = slices.iter().position(is_last);
    slices.drain(..last.map_or(slices.len(), |last| last + 1)).collect()
}

async fn write_file(
    storage: &Storage,
    save: &Save,
    name: String,
    slices: &[u32],
    source: &Arc<dyn Source>,
) -> Result<pb::CheckpointFile> {
    let parts: Vec<(u32, Part, Entry)> = slices
        .iter()
        .flat_map(|&slice| {
            let parts = format::parts(&save.spec, slice as usize).into_iter();
            parts.map(move |(part, entry)| (slice, part, entry))
        })
        .collect();
    let header = format::header(parts.iter().map(|(_, _, entry)| entry));
    let mut file = pb::CheckpointFile {
        header_hash: Bytes::copy_from_slice(blake3::hash(&header).as_bytes()),
        bytes: header.len() as u64
            + parts.iter().map(|(.., entry)| entry.bytes as u64).sum::<u64>(),
        ..Default::default()
    };
    let path = storage.path(&save.spec.name, save.version, &name);
    let mut upload = Upload::begin(storage, path).await?;
    upload.put(header.into()).await?;
    let wanted: Vec<_> =
        parts.iter().map(|(slice, part, entry)| (*slice, *part, entry.bytes)).collect();
    let order: Vec<u32> = wanted.iter().map(|(slice, ..)| *slice).collect();
    let read = wanted.into_iter().map(|(slice, part, bytes)| {
        let source = source.clone();
        async move { read(source, slice, part, bytes).await }
    });
    let mut read = stream::iter(read).buffered(READ_AHEAD).enumerate();
    while let Some((position, part)) = read.next().await {
        let (bytes, hash) = part?;
        file.tensor_hashes.push(Bytes::copy_from_slice(hash.as_bytes()));
        upload.put(bytes).await?;
        let slice = order[position];
        if order.get(position + 1) != Some(&slice) {
            file.slices.push(saved(&save.spec, slice, source.applied(slice)));
            source.done(slice);
        }
    }
    upload.finish().await?;
    file.name = name;
    Ok(file)
}

fn saved(spec: &JobSpec, slice: u32, applied: AppliedSteps) -> pb::SavedSlice {
    let tensor = spec.manifest.slices()[slice as usize].tensor;
    let scalar_state = spec.scalar_state_of(tensor, &applied);
    pb::SavedSlice { slice, applied: applied.count, scalar_state, averaged: applied.averaged }
}

/// Reads and hashes a part on a thread that may block.
async fn read(
    source: Arc<dyn Source>,
    slice: u32,
    part: Part,
    expected: usize,
) -> Result<(Bytes, Hash)> {
    let read = move || {
        let bytes = source.part(slice, part)?;
        if bytes.len() != expected {
            let found = bytes.len();
            let cause = format!("{part:?} of slice {slice} has {found} bytes, not {expected}");
            return Err(Error::Internal { cause });
        }
        let hash = blake3::hash(&bytes);
        Ok((bytes, hash))
    };
    let read = tokio::task::spawn_blocking(read).await;
    read.unwrap_or_else(|error| Err(Error::Internal { cause: error.to_string() }))
}

#[cfg(test)]
mod tests {
    use zeroshard_model::{Manifest, TensorSpec};

    use super::*;

    /// The sizes of the headers of the files with all slices of a job.
    fn headers(tensors: impl Iterator<Item = TensorSpec>) -> Vec<usize> {
        let groups = vec!["adamw".parse().unwrap()];
        let spec = JobSpec::new("a", Manifest::new(tensors.collect()).unwrap(), groups);
        let mut slices: Vec<u32> = (0..spec.manifest.number_of_slices() as u32).collect();
        let header = |file: Vec<u32>| {
            let parts = file.iter().flat_map(|&slice| format::parts(&spec, slice as usize));
            let entries: Vec<Entry> = parts.map(|(_, entry)| entry).collect();
            format::header(&entries).len()
        };
        let files = std::iter::repeat_with(|| next_file(&spec, &mut slices));
        files.take_while(|file| !file.is_empty()).map(header).collect()
    }

    #[test]
    fn headers_of_many_small_tensors_are_not_too_long_for_readers() {
        let headers = headers((0..60_000).map(|i| TensorSpec::new(format!("layers.{i}"), [1])));
        assert!(headers.len() > 1);
        assert!(headers.iter().all(|&bytes| bytes <= format::HEADER_BYTES + 4096), "{headers:?}");
    }

    #[test]
    fn the_bound_of_a_header_holds_for_names_that_are_escaped() {
        let name = "\"\\".repeat(500);
        let tensors = (0..20).map(|i| TensorSpec::new(format!("{name}{i}"), [1 << 42 >> i]));
        let spec = Manifest::new(tensors.collect()).unwrap();
        let entries = spec.tensors().iter().map(|tensor| Entry {
            key: tensor.name.clone(),
            dtype: "BF16",
            shape: tensor.shape.clone(),
            bytes: tensor.shape[0] as usize,
        });
        let entries: Vec<Entry> = entries.collect();
        let bound: usize = entries.iter().map(format::header_bytes).sum();
        assert!(format::header(&entries).len() <= bound + 16);
    }
}
