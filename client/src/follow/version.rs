//! A version that a follower has received and not applied yet.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_model::LineVersion;

use crate::Pinned;

/// The reason for a full copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Copied {
    /// The reader had no version.
    Joined,
    /// The servers do not know the changes since the reader's version.
    Behind,
    /// The job has returned to a checkpoint, or is another job of the same name.
    Rewound,
    /// The hash of the reader's values differs: somebody else has written to them.
    Differed,
    /// A full copy was interrupted.
    Interrupted,
}

impl Copied {
    /// The name of the reason.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::Behind => "behind",
            Self::Rewound => "rewound",
            Self::Differed => "differed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// The change of one slice.
#[derive(Debug, Clone)]
pub(super) struct SliceChange {
    pub(super) change: Bytes,
    /// The hash of the slice after it.
    pub(super) hash: u64,
}

#[derive(Debug)]
pub(super) enum Content {
    /// All values, which the servers keep until they are applied. `None`: they have been, or the
    /// servers keep them no longer.
    Full(Option<Box<Pinned>>, Copied),
    /// The changes since a version.
    Changes { from: u64, slices: BTreeMap<u32, SliceChange> },
}

/// A version of a job that a follower has received: [`crate::Follower::apply`] writes it to the
/// arrays of the reader.
#[derive(Debug)]
pub struct FollowedVersion {
    pub(super) number: u64,
    pub(super) line: Option<u64>,
    pub(super) content: Content,
    /// The number of elements that are followed.
    pub(super) numel: u64,
    pub(super) bytes: u64,
    /// The number of elements that differ from the reader's version, once it is known.
    pub(super) changed: Option<u64>,
}

impl FollowedVersion {
    pub(super) fn full(line: Option<u64>, pinned: Pinned, reason: Copied) -> Self {
        let number = pinned.version();
        let content = Content::Full(Some(Box::new(pinned)), reason);
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

    /// The version and its line.
    pub fn version(&self) -> LineVersion {
        LineVersion { version: self.number, line: self.line.unwrap_or_default() }
    }

    /// The reason, if this is a full copy.
    pub fn copied(&self) -> Option<Copied> {
        match &self.content {
            Content::Full(_, reason) => Some(*reason),
            Content::Changes { .. } => None,
        }
    }

    /// The bytes that the servers have sent for it: of a full copy, once it is applied.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The fraction of the elements that differ from the version that the reader had, once the
    /// version is applied: 1 for a full copy.
    pub fn changed_fraction(&self) -> Option<f64> {
        match self.content {
            Content::Full(..) => Some(1.0),
            Content::Changes { .. } if self.numel == 0 => Some(0.0),
            Content::Changes { .. } => Some(self.changed? as f64 / self.numel as f64),
        }
    }
}
