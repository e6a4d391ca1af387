//! Hashes that a reader of a mirror takes from the servers. With them, the reader refuses wrong
//! values that the mirror sends.

use std::collections::BTreeMap;

use crate::SliceChange;

/// Replaces the hashes of changes that a mirror has sent by those of the servers.
///
/// # Errors
/// A slice whose hash is missing. The changes must not be applied.
pub fn vouch(
    slices: &mut BTreeMap<u32, SliceChange>,
    hashes: &BTreeMap<u32, u64>,
) -> Result<(), u32> {
    slices.iter_mut().try_for_each(|(slice, of)| {
        of.hash = *hashes.get(slice).ok_or(*slice)?;
        Ok(())
    })
}

/// The versions of the slices of a full copy. A mirror sends each slice at the version that it has
/// at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorCopy {
    versions: BTreeMap<u32, u64>,
    version: u64,
}

impl MirrorCopy {
    /// A copy whose slices have these versions. `least`: the version that the mirror has promised,
    /// which it may not have applied to its own values yet.
    pub fn new(versions: BTreeMap<u32, u64>, least: u64) -> Self {
        let version = versions.values().copied().max().unwrap_or_default().max(least);
        Self { versions, version }
    }

    /// Returns the version that all slices get.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the slices that lack changes, by their version.
    pub fn behind(&self) -> BTreeMap<u64, Vec<u32>> {
        let mut behind = BTreeMap::<u64, Vec<u32>>::new();
        for (&slice, &from) in self.versions.iter().filter(|(_, from)| **from < self.version) {
            behind.entry(from).or_default().push(slice);
        }
        behind
    }

    /// Returns a slice whose hash is not that of the servers, or whose hash they have not sent.
    /// `hashes` are those of the reader's values.
    pub fn differs(
        &self,
        hashes: &BTreeMap<u32, u64>,
        of_servers: &BTreeMap<u32, u64>,
    ) -> Option<u32> {
        let is_equal =
            |slice: &u32| hashes.contains_key(slice) && hashes.get(slice) == of_servers.get(slice);
        self.versions.keys().copied().find(|slice| !is_equal(slice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_get_the_hashes_of_servers_and_none_may_be_missing() {
        let change = |hash| SliceChange { change: vec![1].into(), hash };
        let mut slices = [(0, change(10)), (1, change(11))].into();
        assert_eq!(vouch(&mut slices, &[(0, 20), (1, 11), (2, 0)].into()), Ok(()));
        let hashes: Vec<u64> = slices.values().map(|of| of.hash).collect();
        assert_eq!(hashes, [20, 11]);
        assert_eq!(vouch(&mut slices, &[(0, 20)].into()), Err(1));
    }

    #[test]
    fn slices_of_a_copy_get_the_newest_of_their_versions() {
        let copy = MirrorCopy::new([(0, 4), (1, 6), (2, 4), (3, 5)].into(), 5);
        assert_eq!(copy.version(), 6);
        assert_eq!(copy.behind(), [(4, vec![0, 2]), (5, vec![3])].into());
        let versions = BTreeMap::from([(0, 6), (1, 6)]);
        assert!(MirrorCopy::new(versions.clone(), 6).behind().is_empty());
        // The mirror sends changes on before it applies them.
        let copy = MirrorCopy::new(versions, 7);
        assert_eq!((copy.version(), copy.behind()), (7, [(6, vec![0, 1])].into()));
    }

    #[test]
    fn a_copy_needs_the_hash_of_each_slice_from_the_servers() {
        let copy = MirrorCopy::new([(0, 6), (1, 6)].into(), 6);
        let own = [(0, 10), (1, 11)].into();
        assert_eq!(copy.differs(&own, &[(0, 10), (1, 11), (2, 9)].into()), None);
        assert_eq!(copy.differs(&own, &[(0, 10), (1, 12)].into()), Some(1));
        assert_eq!(copy.differs(&own, &[(1, 11)].into()), Some(0));
        assert_eq!(copy.differs(&BTreeMap::new(), &BTreeMap::new()), Some(0));
    }
}
