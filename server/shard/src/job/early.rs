//! New values of slices that this server is to copy, and for which it has no memory yet: they wait
//! until the copy begins. If they were refused, a rank could not train while backups are made anew.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, MutexGuard},
};

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, Error, Result, geometry::SliceContributors};

use super::Job;
use crate::{ranges::Ranges, round::Chunk};

/// The new values of one attempt.
#[derive(Debug, Default)]
pub(super) struct EarlyValues {
    attempt: Option<Attempt>,
    kept: HashMap<u32, Kept>,
    /// The slices whose values were dropped. They cannot be copied in the attempt.
    dropped: HashSet<u32>,
    /// `true` while this server has no memory for further slices: it keeps no values of them.
    is_full: bool,
}

/// The values of a slice: no more than its elements.
#[derive(Debug, Default)]
struct Kept {
    /// The elements that have arrived, by rank.
    received: BTreeMap<u32, Ranges>,
    chunks: Vec<Chunk>,
}

impl EarlyValues {
    /// Keeps those elements of `chunk` that have not arrived before. Returns their number.
    fn keep(&mut self, attempt: Attempt, index: u32, chunk: &Chunk) -> u64 {
        if self.attempt != Some(attempt) {
            *self = Self { attempt: Some(attempt), is_full: self.is_full, ..Self::default() };
        }
        if self.is_full || self.dropped.contains(&index) {
            self.dropped.insert(index);
            return chunk.range().len() as u64;
        }
        let Kept { received, chunks } = self.kept.entry(index).or_default();
        let received = received.entry(chunk.rank).or_default();
        let mut new = 0;
        for (range, _) in received.split(chunk.range()).into_iter().filter(|(_, known)| !known) {
            new += range.len() as u64;
            received.insert(range.clone());
            let part = chunk.select(range);
            // The memory belongs to the rank, or to the rest of a message.
            chunks.push(Chunk { bytes: Bytes::copy_from_slice(&part.bytes), ..part });
        }
        new
    }

    /// The first of `slices` whose values in `attempt` were dropped.
    fn dropped(&self, attempt: Attempt, slices: &[u32]) -> Option<u32> {
        let is_dropped = |slice: &&u32| self.dropped.contains(slice);
        slices.iter().find(is_dropped).copied().filter(|_| self.attempt == Some(attempt))
    }

    fn take(&mut self, attempt: Attempt, index: u32) -> Vec<Chunk> {
        let kept = self.kept.remove(&index).filter(|_| self.attempt == Some(attempt));
        kept.map(|kept| kept.chunks).unwrap_or_default()
    }
}

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// Stores a chunk of a tensor's new values. Returns the number of new elements.
    pub fn replace(&self, attempt: Attempt, index: u32, chunk: &Chunk) -> Result<u64> {
        if self.is_to_copy(index) {
            let mut early = self.early();
            // The copy may have begun meanwhile.
            if self.is_to_copy(index) {
                drop(self.check_open(attempt)?);
                return Ok(early.keep(attempt, index, chunk));
            }
        }
        let slice = self.slice(index)?;
        let current = || self.check_attempt(attempt, slice).map(drop);
        self.note(index, slice.replace(attempt, chunk, current))
    }

    /// Returns whether this server is to copy a slice for which it has no memory yet.
    pub fn is_to_copy(&self, index: u32) -> bool {
        let is_new = self.slices.get(index as usize).is_some_and(|slice| slice.get().is_none());
        is_new && self.version().is_some() && self.is_placed_here(index)
    }

    fn is_placed_here(&self, index: u32) -> bool {
        let placement = self.placement();
        let here = |&owner: &u32| placement.servers()[owner as usize].id == self.server;
        placement.owners(index as usize).iter().any(here)
    }

    /// The ranks that contribute to a slice that this server holds, or is to copy.
    ///
    /// # Errors
    /// Those of [`Self::slice`].
    pub fn contributors(&self, index: u32) -> Result<Arc<[SliceContributors]>> {
        if !self.is_to_copy(index) {
            return Ok(self.slice(index)?.contributors.clone());
        }
        let cut = &self.spec.manifest.slices()[index as usize];
        Ok(self.spec.contributions(cut.tensor).of_slice(cut))
    }

    /// Checks that no values of the slices of a copy were dropped in the open attempt.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn check_early(&self, slices: &[u32]) -> Result<()> {
        match self.early().dropped(self.attempt(), slices) {
            None => Ok(()),
            Some(slice) => Err(Error::OutOfMemory {
                what: format!("new values of slice {slice}"),
                bytes: self.spec.arrays(slice as usize).required().bytes,
            }),
        }
    }

    /// Stores the values of slices that have been allocated since.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn store_early(&self, slices: &[u32]) -> Result<()> {
        let attempt = self.attempt();
        for &index in slices {
            let chunks = self.early().take(attempt, index);
            for chunk in &chunks {
                if let Err(error) = self.replace(attempt, index, chunk) {
                    self.early().dropped.insert(index);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Says whether this server has memory for further slices.
    pub(super) fn set_full(&self, is_full: bool) {
        let mut early = self.early();
        early.is_full = is_full;
        if is_full {
            let kept = std::mem::take(&mut early.kept);
            early.dropped.extend(kept.into_keys());
        }
    }

    fn early(&self) -> MutexGuard<'_, EarlyValues> {
        self.early.lock().expect("no holder of the lock panics")
    }
}
