//! What a mirror knows of the job that it follows, and which versions its readers get. It calls
//! nobody and holds no values.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::SliceChange;
use history::History;

mod history;

/// The versions of a reader's request to a mirror.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The version that the reader has.
    pub from: Option<u64>,
    /// The version that the reader wants; `None`: the newest one.
    pub to: Option<u64>,
    /// The newest version must be after this one; `None`: after the one that the reader has.
    pub newer_than: Option<u64>,
}

impl Wanted {
    /// The version for which the mirror waits.
    fn awaited(self) -> u64 {
        let newer = || self.newer_than.or(self.from).map_or(0, |than| than.saturating_add(1));
        self.to.unwrap_or_else(newer)
    }
}

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The version to which the changes lead.
    pub version: u64,
    /// The version after which they begin; `None`: the reader gets no changes.
    pub from: Option<u64>,
}

/// The job, the newest version, and the changes before it.
#[derive(Debug)]
pub struct Mirror {
    /// The id and the line of the job; `None` before the first version.
    of: Option<(u64, Option<u64>)>,
    version: u64,
    history: History,
}

impl Mirror {
    /// A mirror without a version. It keeps at most this number of bytes of changes.
    pub fn new(history_bytes: u64) -> Self {
        Self { of: None, version: 0, history: History::new(history_bytes) }
    }

    /// Returns the newest version that readers get, or `None` before the first one.
    pub fn version(&self) -> Option<u64> {
        self.of.map(|_| self.version)
    }

    /// Notes that the mirror has a full copy of a job on a line. Readers get no changes from
    /// earlier versions.
    pub fn copied(&mut self, of: (u64, Option<u64>), version: u64) {
        (self.of, self.version) = (Some(of), version);
        self.history.clear();
    }

    /// Notes that changes to a new version have arrived. Readers get them before the mirror has
    /// applied them to its own values.
    pub fn publish(&mut self, [from, to]: [u64; 2], slices: BTreeMap<u32, SliceChange>) {
        self.version = to;
        self.history.push([from, to], slices);
    }

    /// Notes that the job was created again with other tensors. Readers get nothing until the next
    /// full copy.
    pub fn lose(&mut self) {
        self.of = None;
    }

    /// Returns whether the mirror has the job with this id (0: any) on this line.
    pub fn has(&self, (id, line): (u64, Option<u64>)) -> bool {
        self.of.is_some_and(|of| [0, of.0].contains(&id) && (line.is_none() || line == of.1))
    }

    /// Returns the versions of the answer, or `None` if the reader has to wait for a newer one.
    /// `is_last`: the reader waits no longer.
    pub fn answer(&self, wanted: Wanted, is_last: bool) -> Option<Sent> {
        if self.version < wanted.awaited() && !is_last {
            return None;
        }
        let version = wanted.to.map_or(self.version, |to| to.min(self.version));
        let from = wanted.from.filter(|&from| from < version || wanted.to.is_some());
        Some(Sent { version, from })
    }

    /// Returns the changes of a slice between two versions, one per step, and the hash after them.
    /// Returns `None` if the mirror does not have them. A reader with another version than those
    /// of the mirror needs a full copy.
    pub fn changes(&self, slice: u32, versions: [u64; 2]) -> Option<(Vec<Bytes>, u64)> {
        self.history.between(slice, versions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_waits_for_a_newer_version_and_gets_the_changes_to_it() {
        let mut mirror = Mirror::new(100);
        mirror.copied((9, Some(1)), 5);
        let newest = |from| Wanted { from, ..Wanted::default() };
        assert_eq!(mirror.answer(newest(None), false), Some(Sent { version: 5, from: None }));
        assert_eq!(mirror.answer(newest(Some(5)), false), None);
        assert_eq!(mirror.answer(newest(Some(5)), true), Some(Sent { version: 5, from: None }));
        mirror.publish([5, 7], BTreeMap::new());
        assert_eq!(mirror.answer(newest(Some(5)), false), Some(Sent { version: 7, from: Some(5) }));
        let shown = Wanted { newer_than: Some(7), ..newest(Some(5)) };
        assert_eq!(mirror.answer(shown, false), None);
        // The reader was answered by a newer mirror before.
        assert_eq!(mirror.answer(newest(Some(8)), true), Some(Sent { version: 7, from: None }));
    }

    #[test]
    fn a_request_for_one_version_is_answered_with_it() {
        let mut mirror = Mirror::new(100);
        mirror.copied((9, Some(1)), 5);
        mirror.publish([5, 7], BTreeMap::new());
        let to = |from, to| Wanted { from: Some(from), to: Some(to), newer_than: None };
        assert_eq!(mirror.answer(to(4, 6), false), Some(Sent { version: 6, from: Some(4) }));
        assert_eq!(mirror.answer(to(7, 7), false), Some(Sent { version: 7, from: Some(7) }));
        assert_eq!(mirror.answer(to(7, 8), false), None);
        assert_eq!(mirror.answer(to(7, u64::MAX), true), Some(Sent { version: 7, from: Some(7) }));
    }

    #[test]
    fn a_mirror_has_one_line_of_one_job_from_its_full_copy_on() {
        let mut mirror = Mirror::new(100);
        assert!(!mirror.has((9, None)) && mirror.version().is_none());
        mirror.copied((9, Some(1)), 5);
        for (of, expected) in [
            ((9, Some(1)), true),
            ((0, Some(1)), true),
            ((9, None), true),
            ((9, Some(0)), false),
            ((8, Some(1)), false),
        ] {
            assert_eq!(mirror.has(of), expected, "{of:?}");
        }
        mirror.lose();
        assert!(!mirror.has((9, Some(1))) && mirror.version().is_none());
    }
}
