//! The ranks' data for checkpoints: random states, positions in their data, and so on.
//!
//! A rank sends its data with its commit, or after the step if the data depends on the step. In the
//! second case a checkpoint of the version is complete only with the data of every such rank. If a
//! rank ends before it has sent its data, no checkpoint of the version can be made, and no worker
//! could continue from the version as that rank would have.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::state::members::Members;

/// The data of the ranks for a version.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UserData {
    ranks: BTreeMap<u32, Bytes>,
    /// The ranks that have not sent their data yet.
    awaited: BTreeSet<u32>,
    /// The ranks that ended before they had sent their data.
    missing: BTreeSet<u32>,
    /// `true` if the last coordinator had the data that is missing, as far as it had been sent.
    went_with_coordinator: bool,
    /// `true` if the version was restored under the last coordinator, which had read the data.
    is_unread: bool,
}

impl UserData {
    /// Collects the data that ranks sent with their commits. `awaited`: ranks that send it later.
    pub(crate) fn committed(ranks: BTreeMap<u32, Bytes>, awaited: BTreeSet<u32>) -> Self {
        Self { ranks, awaited, ..Self::default() }
    }

    /// Represents the data of a version that the last coordinator restored.
    pub(crate) fn unread() -> Self {
        Self { is_unread: true, ..Self::default() }
    }

    /// That of a version that was restored from a checkpoint, which may lack that of some ranks.
    pub fn restored(ranks: BTreeMap<u32, Bytes>, lost: &[u32]) -> Self {
        Self { ranks, missing: lost.iter().copied().collect(), ..Self::default() }
    }

    /// The data of ranks, none of which has been received by this coordinator. That of ranks that
    /// are not `members` is lost.
    pub(crate) fn lost_with_coordinator(ranks: &[u32], members: &Members) -> Self {
        let is_member = |rank: &u32| members.get(*rank).is_some();
        let (awaited, missing) = ranks.iter().partition(|rank| is_member(rank));
        Self { awaited, missing, went_with_coordinator: true, ..Self::default() }
    }

    /// The first rank without whose data the version cannot be saved. When the training has ended,
    /// the model is saved without data that ranks have sent and the last coordinator has lost. If a
    /// rank has never sent it, programs continue from an earlier checkpoint.
    pub(crate) fn lost(&self, has_ended: bool) -> Option<u32> {
        let is_needed = |_: &u32| !(has_ended && self.went_with_coordinator);
        self.missing.first().copied().filter(is_needed).or(self.is_unread.then_some(0))
    }

    /// The ranks that have data.
    pub(crate) fn all(&self) -> BTreeSet<u32> {
        self.ranks.keys().chain(&self.awaited).chain(&self.missing).copied().collect()
    }

    /// Takes the data, and returns it with the ranks that ended before they sent theirs.
    pub(crate) fn take(&mut self) -> (BTreeMap<u32, Bytes>, Vec<u32>) {
        (std::mem::take(&mut self.ranks), self.missing.iter().copied().collect())
    }

    /// Returns the ranks that have not sent their data yet.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = u32> + '_ {
        self.awaited.iter().copied()
    }

    /// Returns the first rank that ended before it sent its data.
    pub(crate) fn first_missing(&self) -> Option<u32> {
        self.missing.first().copied()
    }

    /// Notes that a rank has ended. Returns `true` if its data was awaited, and is now missing.
    pub(crate) fn ended(&mut self, rank: u32) -> bool {
        let was_awaited = self.awaited.remove(&rank);
        if was_awaited {
            self.missing.insert(rank);
        }
        was_awaited
    }

    /// Returns whether every rank has sent its data.
    pub(crate) fn is_complete(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Stores the data of a rank. Returns whether it was the last that was awaited.
    pub(crate) fn set(&mut self, rank: u32, data: Bytes) -> bool {
        if !data.is_empty() {
            self.ranks.insert(rank, data);
        }
        self.awaited.remove(&rank) && self.is_complete()
    }
}
