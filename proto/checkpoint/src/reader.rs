//! Reads slices, and checks their hashes.

use bytes::Bytes;
use zeroshard_proto::{AppliedSteps, Error, Result};

use crate::{Manifest, Part, Storage, format};

/// A slice of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedSlice {
    /// The f32 master weights; for a tensor that does not train, its content in its dtype. Little
    /// endian.
    pub values: Bytes,
    /// The state tensors, in the order of the optimizer; empty for those that the tensor does not
    /// have. f32, little endian.
    pub state: Vec<Bytes>,
    /// The steps applied to the slice.
    pub applied: AppliedSteps,
}

impl Storage {
    /// Reads a slice. Its memory is bounded by the size of the slice.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`], which names the file and the tensor; [`Error::Storage`].
    pub async fn read_slice(&self, manifest: &Manifest, slice: u32) -> Result<SavedSlice> {
        let spec = manifest.spec();
        let Some((file, entry, start)) = manifest.place(slice) else {
            return Err(Error::Internal { cause: format!("there is no slice {slice}") });
        };
        let path = self.path(manifest.job(), manifest.version(), &file.name);
        let parts = format::parts(spec, slice as usize);
        let sizes = parts.iter().map(|(_, part)| part.bytes as u64);
        let trains = spec.manifest.trains(slice as usize);
        let states = if trains { spec.groups[0].state().len() } else { 0 };
        let mut saved = SavedSlice {
            values: Bytes::new(),
            state: vec![Bytes::new(); states],
            applied: entry.applied(spec)?,
        };
        // The parts of a slice are consecutive.
        let ranges = format::ranges(start, sizes);
        let whole = start..ranges.last().map_or(start, |range| range.end);
        let bytes = self.read(&path, whole).await?;
        for (((part, of), range), hash) in parts.iter().zip(ranges).zip(&entry.hashes) {
            let part_bytes =
                bytes.slice((range.start - start) as usize..(range.end - start) as usize);
            let checked = part_bytes.clone();
            let found = tokio::task::spawn_blocking(move || blake3::hash(&checked)).await;
            let found = found.map_err(|error| Error::Internal { cause: error.to_string() })?;
            if found != *hash {
                return Err(Error::CheckpointDamaged {
                    file: self.name(&path),
                    cause: format!("the hash of {:?} is wrong", of.key),
                });
            }
            match part {
                Part::Values => saved.values = part_bytes,
                Part::State(position) => saved.state[*position] = part_bytes,
            }
        }
        Ok(saved)
    }
}
