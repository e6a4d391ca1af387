//! Reads every byte of a checkpoint, and checks it.

use std::ops::Range;

use blake3::Hash;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use zeroshard_model::{Error, Result};

use crate::{Manifest, Storage, format, manifest::File};

/// The size at which a range of consecutive tensors ends that is read at once.
const READ_BYTES: u64 = 16 << 20;
/// The number of ranges that are read and hashed at the same time.
const READS: usize = 4;

/// A tensor of a file, or its header.
struct Piece {
    range: Range<u64>,
    hash: Hash,
    /// What the range contains, for messages.
    what: String,
}

impl Storage {
    /// Reads all files of a checkpoint, and checks the hashes of everything in them. `progress`
    /// receives the number of bytes that were read since its last call. Memory is bounded by four
    /// times 16 MiB and the largest tensor.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`], which names the file and the tensor; [`Error::Storage`].
    pub async fn verify(&self, manifest: &Manifest, mut progress: impl FnMut(u64)) -> Result<()> {
        for file in manifest.entries() {
            let path = self.path(manifest.job(), manifest.version(), &file.name);
            let size = self.size(&path).await?;
            if size != file.bytes {
                let cause = format!("it has {size} bytes instead of {}", file.bytes);
                return Err(Error::CheckpointDamaged { file: self.name(&path), cause });
            }
            let reads = ranges(pieces(manifest, file)).into_iter();
            let checked = reads.map(|pieces| self.check(&path, pieces));
            let mut checked = stream::iter(checked).buffered(READS);
            while let Some(bytes) = checked.next().await {
                progress(bytes?);
            }
        }
        Ok(())
    }

    /// Reads consecutive pieces, and compares them with their hashes. Returns their size in bytes.
    async fn check(&self, path: &Path, pieces: Vec<Piece>) -> Result<u64> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Ok(0) };
        let (start, end) = (first.range.start, last.range.end);
        let bytes = self.read(path, start..end).await?;
        let check = move || {
            let mut pieces = pieces.into_iter();
            pieces.find(|Piece { range, hash, .. }| {
                let range = (range.start - start) as usize..(range.end - start) as usize;
                blake3::hash(&bytes[range]) != *hash
            })
        };
        let wrong = tokio::task::spawn_blocking(check).await;
        match wrong.map_err(|error| Error::Internal { cause: error.to_string() })? {
            None => Ok(end - start),
            Some(piece) => {
                let cause = format!("the hash of {} is wrong", piece.what);
                Err(Error::CheckpointDamaged { file: self.name(path), cause })
            }
        }
    }

    async fn size(&self, path: &Path) -> Result<u64> {
        use object_store::ObjectStoreExt;
        match self.store().head(path).await {
            Ok(found) => Ok(found.size),
            Err(object_store::Error::NotFound { .. }) => {
                let cause = "it is missing".to_owned();
                Err(Error::CheckpointDamaged { file: self.name(path), cause })
            }
            Err(error) => Err(self.failed("read", path, &error)),
        }
    }
}

/// Everything that is in a file, in order.
fn pieces(manifest: &Manifest, file: &File) -> Vec<Piece> {
    let spec = manifest.spec();
    let header = file.header_bytes(spec);
    let tensors = format::ranges(header, file.sizes(spec)).into_iter().zip(file.hashes());
    let parts = file.slices.iter().flat_map(|entry| format::parts(spec, entry.slice as usize));
    let ranks = file.ranks.iter().map(|entry| format!("rank/{}", entry.rank));
    let keys = parts.map(|(_, part)| part.key).chain(ranks);
    let tensors = tensors.zip(keys).map(|((range, hash), key)| Piece {
        range,
        hash: *hash,
        what: format!("{key:?}"),
    });
    let header = Piece { range: 0..header, hash: file.header, what: "its header".to_owned() };
    std::iter::once(header).chain(tensors).collect()
}

/// Groups consecutive pieces.
fn ranges(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let (mut ranges, mut bytes) = (Vec::<Vec<Piece>>::new(), READ_BYTES);
    for piece in pieces {
        let size = piece.range.end - piece.range.start;
        match ranges.last_mut() {
            Some(range) if bytes.saturating_add(size) <= READ_BYTES => {
                bytes += size;
                range.push(piece);
            }
            _ => {
                bytes = size;
                ranges.push(vec![piece]);
            }
        }
    }
    ranges
}
