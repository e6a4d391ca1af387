//! A version that a follower has received but not applied yet.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_changes::{Copied, SliceChange};
use zeroshard_model::LineVersion;

use crate::Pinned;

#[derive(Debug)]
pub(super) enum Content {
    /// A full copy.
    Full(Values, Copied),
    /// The changes since a version.
    Changes { from: u64, slices: BTreeMap<u32, SliceChange> },
}

/// Where the values of a full copy are.
#[derive(Debug)]
pub(super) enum Values {
    Pinned(Box<Pinned>),
    Mirror,
    /// They have been applied, or the pin or the mirror is gone.
    Gone,
}

/// A version of a job that a follower has received: [`crate::Follower::apply`] writes it to the
/// arrays of the reader.
#[derive(Debug)]
pub struct FollowedVersion {
    pub(super) number: u64,
    pub(super) line: Option<u64>,
    pub(super) content: Content,
    /// The number of followed elements.
    pub(super) numel: u64,
    /// The number of bytes received for the version.
    pub(super) bytes: u64,
    /// The number of elements that differ from the reader's earlier version, once it is known.
    pub(super) changed: Option<u64>,
}

impl FollowedVersion {
    pub(super) fn full(line: Option<u64>, pinned: Pinned, reason: Copied) -> Self {
        let number = pinned.version();
        let content = Content::Full(Values::Pinned(Box::new(pinned)), reason);
        Self { content, ..Self::of_mirror(line, number, reason) }
    }

    /// A full copy that a mirror sends.
    pub(super) fn of_mirror(line: Option<u64>, number: u64, reason: Copied) -> Self {
        let content = Content::Full(Values::Mirror, reason);
        Self { number, line, content, numel: 0, bytes: 0, changed: None }
    }

    pub(super) fn changed(
        line: Option<u64>,
        (from, number): (u64, u64),
        slices: BTreeMap<u32, SliceChange>,
        numel: u64,
    ) -> Self {
        let bytes = slices.values().map(|of| of.change.len() as u64).sum();
        let content = Content::Changes { from, slices };
        Self { number, line, content, numel, bytes, changed: None }
    }

    /// Returns the version and its line.
    pub fn version(&self) -> LineVersion {
        LineVersion { version: self.number, line: self.line.unwrap_or_default() }
    }

    /// Returns the reason if this is a full copy.
    pub fn copied(&self) -> Option<Copied> {
        match &self.content {
            Content::Full(_, reason) => Some(*reason),
            Content::Changes { .. } => None,
        }
    }

    /// Returns the number of bytes received for the version. For a full copy it is 0 until the
    /// version is applied.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the change of each followed slice, with the hash of the slice after it. Returns
    /// `None` for a full copy. A mirror sends the changes on.
    pub fn changes(&self) -> Option<impl Iterator<Item = (u32, Bytes, u64)> + use<'_>> {
        match &self.content {
            Content::Full(..) => None,
            Content::Changes { slices, .. } => {
                Some(slices.iter().map(|(slice, of)| (*slice, of.change.clone(), of.hash)))
            }
        }
    }

    /// Returns the fraction of the elements that differ from the reader's earlier version. It is 1
    /// for a full copy, and `None` for changes that are not applied yet.
    pub fn changed_fraction(&self) -> Option<f64> {
        match self.content {
            Content::Full(..) => Some(1.0),
            Content::Changes { .. } if self.numel == 0 => Some(0.0),
            Content::Changes { .. } => Some(self.changed? as f64 / self.numel as f64),
        }
    }
}
