//! The data of the ranks in a checkpoint: a file with a tensor of bytes for each rank.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_model::{Error, LineVersion, Result};
use zeroshard_proto::pb;

use crate::{
    Manifest, Storage,
    format::{self, Entry},
    storage::prefix_of,
    upload::Upload,
};

impl Storage {
    /// Writes the data of ranks.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn write_user_data(
        &self,
        job: &str,
        version: LineVersion,
        save: u64,
        ranks: &BTreeMap<u32, Bytes>,
    ) -> Result<pb::CheckpointFile> {
        let entry = |(rank, bytes): (&u32, &Bytes)| Entry {
            key: format!("rank/{rank}"),
            dtype: "U8",
            shape: vec![bytes.len() as u64],
            bytes: bytes.len(),
        };
        let entries: Vec<Entry> = ranks.iter().map(entry).collect();
        let header = Bytes::from(format::header(&entries));
        let content: usize = entries.iter().map(|entry| entry.bytes).sum();
        let hash = |bytes: &Bytes| Bytes::copy_from_slice(blake3::hash(bytes).as_bytes());
        let saved =
            |(&rank, bytes): (&u32, &Bytes)| pb::SavedRank { rank, bytes: bytes.len() as u64 };
        let file = pb::CheckpointFile {
            name: format!("{}ranks.safetensors", prefix_of(save)),
            bytes: (header.len() + content) as u64,
            header_hash: hash(&header),
            tensor_hashes: ranks.values().map(hash).collect(),
            slices: Vec::new(),
            ranks: ranks.iter().map(saved).collect(),
        };
        let path = self.path(job, version, &file.name);
        let mut upload = Upload::begin(self, path).await?;
        upload.put(header).await?;
        for bytes in ranks.values() {
            upload.put(bytes.clone()).await?;
        }
        upload.finish().await?;
        Ok(file)
    }

    /// The data that a rank has stored; `None` if it has stored none.
    ///
    /// # Errors
    /// [`Error::UserDataLost`] if it was lost before the save; [`Error::CheckpointDamaged`],
    /// [`Error::Storage`].
    pub async fn user_data(&self, manifest: &Manifest, rank: u32) -> Result<Option<Bytes>> {
        if manifest.lost_ranks().contains(&rank) {
            let (job, version) = (manifest.job().to_owned(), manifest.version().version);
            return Err(Error::UserDataLost { job, version, rank });
        }
        for file in manifest.entries() {
            let Some(position) = file.ranks.iter().position(|entry| entry.rank == rank) else {
                continue;
            };
            let header = file.header_bytes(manifest.spec());
            let ranges = format::ranges(header, file.sizes(manifest.spec()));
            let path = self.path(manifest.job(), manifest.version(), &file.name);
            let bytes = self.read(&path, ranges[position].clone()).await?;
            if blake3::hash(&bytes) != file.ranks[position].hash {
                return Err(Error::CheckpointDamaged {
                    file: self.name(&path),
                    cause: format!("the hash of the data of rank {rank} is wrong"),
                });
            }
            return Ok(Some(bytes));
        }
        Ok(None)
    }
}
