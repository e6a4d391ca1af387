//! The hashes of slices that their servers have sent for scrub.

use std::collections::{BTreeMap, btree_map::Entry};

use crate::vocabulary::ids::ServerId;

/// The hashes of slices at one version.
#[derive(Debug, Default)]
pub struct Scrub {
    version: u64,
    /// By slice: its hash, and the first server that has sent it.
    hashes: BTreeMap<u32, (u64, ServerId)>,
}

impl Scrub {
    /// Adds hashes of a server. Returns the first slice whose hash differs, and the other server.
    pub(crate) fn add(
        &mut self,
        server: ServerId,
        version: u64,
        slices: &[(u32, u64)],
    ) -> Option<(u32, ServerId)> {
        if version < self.version {
            return None; // other servers are further
        }
        if version > self.version {
            *self = Self { version, hashes: BTreeMap::new() };
        }
        slices.iter().find_map(|&(slice, hash)| match self.hashes.entry(slice) {
            Entry::Vacant(entry) => {
                entry.insert((hash, server));
                None
            }
            Entry::Occupied(entry) => {
                let &(known, other) = entry.get();
                (known != hash).then_some((slice, other))
            }
        })
    }
}
