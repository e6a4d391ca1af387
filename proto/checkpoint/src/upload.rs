//! Writes a file piece by piece.

use bytes::Bytes;
use object_store::{ObjectStoreExt, WriteMultipart, path::Path};
use zeroshard_proto::Result;

use crate::Storage;

/// The size of the chunks that are stored.
pub(crate) const CHUNK_BYTES: usize = 16 << 20;
/// The number of chunks that are stored at the same time.
pub(crate) const CHUNKS: usize = 4;

/// A file that is being written.
pub(crate) struct Upload<'a> {
    storage: &'a Storage,
    path: Path,
    /// `None` after its end.
    parts: Option<WriteMultipart>,
}

impl<'a> Upload<'a> {
    pub(crate) async fn begin(storage: &'a Storage, path: Path) -> Result<Self> {
        match storage.store().put_multipart(&path).await {
            Ok(upload) => {
                let parts = WriteMultipart::new_with_chunk_size(upload, CHUNK_BYTES);
                Ok(Self { storage, path, parts: Some(parts) })
            }
            Err(error) => Err(storage.failed("write", &path, &error)),
        }
    }

    /// Stores bytes, without a copy where a chunk is full.
    pub(crate) async fn put(&mut self, bytes: Bytes) -> Result<()> {
        let Some(parts) = &mut self.parts else { return Ok(()) };
        let room = parts.wait_for_capacity(CHUNKS).await;
        room.map_err(|error| self.storage.failed("write", &self.path, &error))?;
        parts.put(bytes);
        Ok(())
    }

    pub(crate) async fn finish(mut self) -> Result<()> {
        let Some(parts) = self.parts.take() else { return Ok(()) };
        match parts.finish().await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.storage.failed("write", &self.path, &error)),
        }
    }
}

impl Drop for Upload<'_> {
    /// Aborts an upload that was given up: an object store keeps its parts otherwise.
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(parts.abort());
        }
    }
}
