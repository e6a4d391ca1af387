//! Reads slices, and checks their hashes.

use std::ops::Range;

use blake3::{Hash, Hasher};
use bytes::Bytes;
use object_store::path::Path;
use zeroshard_model::{AppliedSteps, Error, Result};

use crate::{
    Manifest, Part, Storage,
    file::Pieces,
    format::{self, Entry},
};

/// A slice of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedSlice {
    /// The f32 master weights; for a tensor that does not train, its content in its dtype. Little
    /// endian.
    pub values: Bytes,
    /// The state tensors, in the order of the optimizer, and those of the averages; empty for those
    /// that the tensor does not have. f32, little endian.
    pub state: Vec<Bytes>,
    /// The steps applied to the slice.
    pub applied: AppliedSteps,
}

/// The bytes of a slice that are read, hashed and stored at a time. They stay in the cache of a
/// core meanwhile.
const PIECE: usize = 256 << 10;

/// The place of a slice, and its parts with their sizes and hashes.
struct Found {
    path: Path,
    /// The range in the file, in which the parts are consecutive.
    range: Range<u64>,
    parts: Vec<(Part, Entry, Hash)>,
    applied: AppliedSteps,
}

/// The bytes of a slice.
enum Input {
    File(Pieces),
    Memory(Bytes),
}

/// The reason for which a slice was not read.
enum Failed {
    Read(std::io::Error),
    Hash { key: String },
    Store(Error),
}

impl Storage {
    /// Reads a slice. Its memory is bounded by the size of the slice.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`], which names the file and the tensor; [`Error::Storage`].
    pub async fn read_slice(&self, manifest: &Manifest, slice: u32) -> Result<SavedSlice> {
        let found = self.find(manifest, slice)?;
        let spec = manifest.spec();
        let states = spec.state_of(spec.manifest.slices()[slice as usize].tensor).len();
        let mut saved = SavedSlice {
            values: Bytes::new(),
            state: vec![Bytes::new(); states],
            applied: found.applied,
        };
        let mut bytes = self.read(&found.path, found.range.clone()).await?;
        let whole = bytes.clone();
        for (part, of, _) in &found.parts {
            let part_bytes = bytes.split_to(of.bytes);
            match part {
                Part::Values => saved.values = part_bytes,
                Part::State(position) => saved.state[*position] = part_bytes,
            }
        }
        self.pass(found, Input::Memory(whole), |_, _, _| Ok(())).await?;
        Ok(saved)
    }

    /// Reads a slice, and passes each part to `store` in pieces, in order: the part, the position
    /// of the first byte in the part, and the bytes. Elements are not divided. The hashes are
    /// checked after the pieces were passed on, so their content is valid only if this succeeds. A
    /// slice in a directory needs no memory besides one piece.
    ///
    /// # Errors
    /// Those of [`Self::read_slice`] and of `store`.
    pub async fn stream_slice(
        &self,
        manifest: &Manifest,
        slice: u32,
        store: impl FnMut(Part, usize, &[u8]) -> Result<()> + Send + 'static,
    ) -> Result<AppliedSteps> {
        let found = self.find(manifest, slice)?;
        let opened = self.local().filter(|_| !found.range.is_empty()).and_then(|local| {
            let path = local.path_to_filesystem(&found.path).ok()?;
            Pieces::open(&path, found.range.clone(), PIECE).ok()
        });
        let input = match opened {
            Some(pieces) => Input::File(pieces),
            None => Input::Memory(self.read(&found.path, found.range.clone()).await?),
        };
        self.pass(found, input, store).await
    }

    fn find(&self, manifest: &Manifest, slice: u32) -> Result<Found> {
        let spec = manifest.spec();
        let Some((file, entry, start)) = manifest.place(slice) else {
            return Err(Error::Internal { cause: format!("there is no slice {slice}") });
        };
        let parts = format::parts(spec, slice as usize).into_iter().zip(&entry.hashes);
        let parts: Vec<_> = parts.map(|((part, of), hash)| (part, of, *hash)).collect();
        let bytes: u64 = parts.iter().map(|(_, of, _)| of.bytes as u64).sum();
        Ok(Found {
            path: self.path(manifest.job(), manifest.version(), &file.name),
            range: start..start + bytes,
            parts,
            applied: entry.applied(spec)?,
        })
    }

    /// Passes the parts of a slice to `store`, on a thread outside of the async runtime.
    async fn pass(
        &self,
        found: Found,
        mut input: Input,
        mut store: impl FnMut(Part, usize, &[u8]) -> Result<()> + Send + 'static,
    ) -> Result<AppliedSteps> {
        let Found { path, range, parts, applied } = found;
        let pass = move || input.pass(&parts, &mut store);
        let passed = tokio::task::spawn_blocking(pass).await;
        match passed.map_err(|error| Error::Internal { cause: error.to_string() })? {
            Ok(()) => Ok(applied),
            Err(Failed::Store(error)) => Err(error),
            Err(Failed::Hash { key }) => Err(Error::CheckpointDamaged {
                file: self.name(&path),
                cause: format!("the hash of {key:?} is wrong"),
            }),
            Err(Failed::Read(error)) => {
                // This read fails as well, and says whether the file is damaged.
                self.read(&path, range).await?;
                Err(self.io_failed("read", &path, &error))
            }
        }
    }
}

impl Input {
    fn pass(
        &mut self,
        parts: &[(Part, Entry, Hash)],
        store: &mut impl FnMut(Part, usize, &[u8]) -> Result<()>,
    ) -> Result<(), Failed> {
        let mut begin = 0;
        for (part, of, hash) in parts {
            let mut hasher = Hasher::new();
            for at in (0..of.bytes).step_by(PIECE) {
                let piece = self.piece(begin + at, PIECE.min(of.bytes - at));
                let piece = piece.map_err(Failed::Read)?;
                hasher.update(piece);
                store(*part, at, piece).map_err(Failed::Store)?;
            }
            if hasher.finalize() != *hash {
                return Err(Failed::Hash { key: of.key.clone() });
            }
            begin += of.bytes;
        }
        Ok(())
    }

    /// The bytes from position `at` of the slice on.
    fn piece(&mut self, at: usize, length: usize) -> std::io::Result<&[u8]> {
        match self {
            Self::Memory(bytes) => Ok(&bytes[at..at + length]),
            Self::File(pieces) => pieces.read(at, length),
        }
    }
}
