//! Gathers the changes of all servers of a job up to one version, so that a reader never holds a
//! mixture of versions.
//!
//! Some servers may answer before they have the version that others have. The reader asks these for
//! the rest, and the changes of each slice are added.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_model::DType;

use crate::{block::Malformed, merge};

/// The change of one slice.
#[derive(Debug, Clone)]
pub struct SliceChange {
    /// The change, as [`crate::block`] encodes it.
    pub change: Bytes,
    /// The hash of the slice after the change.
    pub hash: u64,
}

/// The answer of one server to a reader.
#[derive(Debug, Clone)]
pub struct Known {
    /// The newest version of the server, or the one that the reader has asked for.
    pub version: u64,
    /// The changes up to this version; `None`: the server does not know them.
    pub slices: Option<BTreeMap<u32, SliceChange>>,
}

/// The changes from a reader's version to the newest one that any server has.
#[derive(Debug)]
pub struct Gathering {
    from: u64,
    version: u64,
    /// One for each server that was asked.
    answers: Vec<Known>,
}

impl Gathering {
    /// Takes the newest version among `answers`. Returns `None` if it is not after `from` and after
    /// `shown`.
    pub(crate) fn new(from: u64, shown: Option<u64>, answers: Vec<Known>) -> Option<Self> {
        let version = answers.iter().map(|answer| answer.version).max()?;
        let is_newer = version > from.max(shown.unwrap_or_default());
        is_newer.then_some(Self { from, version, answers })
    }

    /// Returns the version to which all changes lead.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the servers that have answered with an earlier version: the position of each among
    /// the answers, and the version from which the reader must ask for the rest. Returns none if a
    /// server does not know the changes.
    pub fn behind(&self) -> Vec<(usize, u64)> {
        if self.answers.iter().any(|answer| answer.slices.is_none()) {
            return Vec::new();
        }
        let behind = self.answers.iter().enumerate().filter(|(_, of)| of.version != self.version);
        behind.map(|(at, of)| (at, of.version.max(self.from))).collect()
    }

    /// Adds the rest of the changes of a server in [`Self::behind`]. `size` returns the dtype and
    /// the number of elements of a slice.
    ///
    /// # Errors
    /// A slice whose change is malformed.
    pub fn add(
        &mut self,
        at: usize,
        rest: Known,
        size: impl Fn(u32) -> (DType, usize),
    ) -> Result<(), (u32, Malformed)> {
        let answer = &mut self.answers[at];
        let (had, first) = (answer.version, answer.slices.take().unwrap_or_default());
        answer.version = self.version;
        let Some(rest) = rest.slices.filter(|_| rest.version == self.version) else {
            return Ok(());
        };
        if had <= self.from {
            answer.slices = Some(rest);
            return Ok(());
        }
        let mut merged = BTreeMap::new();
        for (slice, SliceChange { change, hash }) in rest {
            let Some(first) = first.get(&slice) else { return Ok(()) };
            let (dtype, numel) = size(slice);
            let sum = merge(dtype, numel, &[&first.change, &change]);
            let change = sum.map_err(|error| (slice, error))?.into();
            merged.insert(slice, SliceChange { change, hash });
        }
        answer.slices = Some(merged);
        Ok(())
    }

    /// Returns the changes of all slices, or `None` if a server does not know them.
    pub fn finish(self) -> Option<BTreeMap<u32, SliceChange>> {
        let mut slices = BTreeMap::new();
        for answer in self.answers {
            slices.extend(answer.slices.filter(|_| answer.version == self.version)?);
        }
        Some(slices)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use zeroshard_loops::Level;

    use super::*;
    use crate::Recorder;

    /// The change of a slice of one f32 element.
    fn change(slice: u32, before: f32, after: f32) -> (u32, SliceChange) {
        let mut recorder = Recorder::new(Level::best(), DType::F32, 0, 1);
        recorder.compare(&before.to_le_bytes(), &after.to_le_bytes());
        let recorded = recorder.finish().unwrap();
        (slice, SliceChange { change: recorded.change.into(), hash: u64::from(after.to_bits()) })
    }

    fn known(version: u64, slices: impl IntoIterator<Item = (u32, SliceChange)>) -> Known {
        Known { version, slices: Some(slices.into_iter().collect()) }
    }

    fn bytes(slices: &BTreeMap<u32, SliceChange>) -> Vec<(u32, Bytes, u64)> {
        slices.iter().map(|(&slice, of)| (slice, of.change.clone(), of.hash)).collect()
    }

    #[test]
    fn the_rest_of_the_servers_that_are_behind_is_added() {
        let answers = vec![
            known(7, [change(0, 1.0, 3.0)]),
            known(6, [change(1, 1.0, 2.0)]),
            // It has not even the version of the reader.
            known(4, []),
        ];
        let mut gathering = Gathering::new(5, Some(5), answers).unwrap();
        assert_eq!((gathering.version(), gathering.behind()), (7, vec![(1, 6), (2, 5)]));
        let size = |_| (DType::F32, 1);
        gathering.add(1, known(7, [change(1, 2.0, 3.0)]), size).unwrap();
        gathering.add(2, known(7, [change(2, 1.0, 3.0)]), size).unwrap();
        let expected = (0..3).map(|slice| change(slice, 1.0, 3.0)).collect();
        assert_eq!(bytes(&gathering.finish().unwrap()), bytes(&expected));
    }

    #[test]
    fn a_version_that_was_shown_is_not_gathered_again() {
        let answers = || vec![known(6, []), known(7, [])];
        assert!(Gathering::new(5, Some(7), answers()).is_none());
        assert!(Gathering::new(7, None, answers()).is_none());
        assert!(Gathering::new(5, Some(6), answers()).is_some());
    }

    #[test]
    fn the_changes_are_unknown_if_one_server_does_not_know_them() {
        let unknown = |version| Known { version, slices: None };
        let gathering = Gathering::new(5, None, vec![known(6, []), unknown(7)]).unwrap();
        assert_eq!(gathering.behind(), []);
        assert!(gathering.finish().is_none());

        let size = |_| (DType::F32, 1);
        let answers = || vec![known(7, []), known(6, [change(1, 1.0, 2.0)])];
        for rest in [unknown(7), known(6, [change(1, 2.0, 3.0)])] {
            let mut gathering = Gathering::new(5, None, answers()).unwrap();
            gathering.add(1, rest, size).unwrap();
            assert!(gathering.finish().is_none());
        }
        // Nobody has asked for the rest.
        assert!(Gathering::new(5, None, answers()).unwrap().finish().is_none());
    }
}
