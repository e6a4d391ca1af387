//! Reads every byte of a checkpoint, and checks it.

use zeroshard_proto::{Error, Result};

use crate::{Manifest, Storage, format, manifest::File};

impl Storage {
    /// Reads all files of a checkpoint, and checks the hashes of everything in them. `progress`
    /// receives the number of bytes that were read since its last call. Memory is bounded by the
    /// largest slice.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`], which names the file and the tensor; [`Error::Storage`].
    pub async fn verify(&self, manifest: &Manifest, mut progress: impl FnMut(u64)) -> Result<()> {
        for file in manifest.entries() {
            self.verify_file(manifest, file, &mut progress).await?;
        }
        Ok(())
    }

    async fn verify_file(
        &self,
        manifest: &Manifest,
        file: &File,
        progress: &mut impl FnMut(u64),
    ) -> Result<()> {
        let spec = manifest.spec();
        let path = self.path(manifest.job(), manifest.version(), &file.name);
        let damaged = |cause| Error::CheckpointDamaged { file: self.name(&path), cause };
        let size = self.size(&path).await?;
        if size != file.bytes {
            return Err(damaged(format!("it has {size} bytes instead of {}", file.bytes)));
        }
        let header = file.header_bytes(spec);
        let mut check = async |range: std::ops::Range<u64>, hash: &blake3::Hash, what: String| {
            let bytes = self.read(&path, range).await?;
            if blake3::hash(&bytes) != *hash {
                return Err(damaged(format!("the hash of {what} is wrong")));
            }
            progress(bytes.len() as u64);
            Ok(())
        };
        check(0..header, &file.header, "its header".to_owned()).await?;
        let ranges = format::ranges(header, file.sizes(spec));
        for ((range, hash), key) in ranges.into_iter().zip(file.hashes()).zip(keys(manifest, file))
        {
            check(range, hash, format!("{key:?}")).await?;
        }
        Ok(())
    }

    async fn size(&self, path: &object_store::path::Path) -> Result<u64> {
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

/// The keys of the tensors in a file, in order.
fn keys<'a>(manifest: &'a Manifest, file: &'a File) -> impl Iterator<Item = String> + 'a {
    let parts =
        file.slices.iter().flat_map(|entry| format::parts(manifest.spec(), entry.slice as usize));
    let ranks = file.ranks.iter().map(|entry| format!("rank/{}", entry.rank));
    parts.map(|(_, part)| part.key).chain(ranks)
}
