//! Writes a file piece by piece.

use bytes::Bytes;
use object_store::{ObjectStoreExt, WriteMultipart, path::Path};
use zeroshard_model::{Error, Result};

use crate::{Storage, file::NewFile};

/// The size of the chunks that are stored in an object store.
pub(crate) const CHUNK_BYTES: usize = 16 << 20;
/// The number of chunks that are stored at the same time.
pub(crate) const CHUNKS: usize = 4;

/// A file that is being written. Dropping it removes what has been written.
pub(crate) struct Upload<'a> {
    storage: &'a Storage,
    path: Path,
    target: Target,
}

/// `None` after the end or an error.
enum Target {
    File(Option<NewFile>),
    Parts(Option<WriteMultipart>),
}

impl<'a> Upload<'a> {
    pub(crate) async fn begin(storage: &'a Storage, path: Path) -> Result<Self> {
        let failed = |error| storage.failed("write", &path, &error);
        let target = match storage.local() {
            Some(local) => {
                let file = local.path_to_filesystem(&path).map_err(failed)?;
                let created = blocking(move || NewFile::create(file)).await?;
                let file = created.map_err(|error| storage.io_failed("write", &path, &error));
                Target::File(Some(file?))
            }
            None => {
                let upload = storage.store().put_multipart(&path).await.map_err(failed)?;
                Target::Parts(Some(WriteMultipart::new_with_chunk_size(upload, CHUNK_BYTES)))
            }
        };
        Ok(Self { storage, path, target })
    }

    /// Stores bytes. For an object store, they are not copied where a chunk is full.
    pub(crate) async fn put(&mut self, bytes: Bytes) -> Result<()> {
        let Self { storage, path, target } = self;
        match target {
            Target::File(file) => {
                let Some(mut open) = file.take() else { return Err(self.closed()) };
                let write = move || open.write(&bytes).map(|()| open);
                let written = blocking(write).await?;
                *file = Some(written.map_err(|error| storage.io_failed("write", path, &error))?);
            }
            Target::Parts(parts) => {
                let Some(parts) = parts else { return Err(self.closed()) };
                let room = parts.wait_for_capacity(CHUNKS).await;
                room.map_err(|error| storage.failed("write", path, &error))?;
                parts.put(bytes);
            }
        }
        Ok(())
    }

    pub(crate) async fn finish(mut self) -> Result<()> {
        match &mut self.target {
            Target::File(file) => {
                let Some(file) = file.take() else { return Err(self.closed()) };
                let finished = blocking(move || file.finish()).await?;
                finished.map_err(|error| self.storage.io_failed("write", &self.path, &error))
            }
            Target::Parts(parts) => {
                let Some(parts) = parts.take() else { return Err(self.closed()) };
                let finished = parts.finish().await;
                let failed = |error| self.storage.failed("write", &self.path, &error);
                finished.map(drop).map_err(failed)
            }
        }
    }

    fn closed(&self) -> Error {
        let cause = format!("{} was closed by an error", self.storage.name(&self.path));
        Error::Internal { cause }
    }
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::Internal { cause: error.to_string() })
}

impl Drop for Upload<'_> {
    /// Aborts an upload that was given up: an object store keeps its parts otherwise.
    fn drop(&mut self) {
        if let Target::Parts(parts) = &mut self.target
            && let Some(parts) = parts.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(parts.abort());
        }
    }
}
