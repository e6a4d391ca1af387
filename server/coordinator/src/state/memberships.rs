//! Membership messages: the changes for a member since the last message that it read.
//!
//! Messages are not queued. The state remembers the last message to each member, and computes the
//! difference when the member's stream is polled. A member that reads slowly therefore costs no
//! memory and receives the latest state.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Bound,
    sync::Arc,
};

use zeroshard_model::{JobSpec, Line, Placement};

use crate::vocabulary::ids::Lease;

/// The addresses of a job's peers, with the order of their changes. INVARIANT: one entry per rank
/// that ever had an address, in both maps.
#[derive(Debug, Default)]
pub struct Peers {
    /// The revision of the last change, and the address; `None` for a peer that has left.
    ranks: BTreeMap<u32, (u64, Option<String>)>,
    /// The rank that changed last in each revision.
    changes: BTreeMap<u64, u32>,
    revision: u64,
}

impl Peers {
    /// Records the address of a peer, or its departure (no address).
    pub(crate) fn set(&mut self, rank: u32, address: Option<String>) {
        self.revision += 1;
        match self.ranks.entry(rank) {
            Entry::Occupied(mut known) => {
                self.changes.remove(&known.get().0);
                known.insert((self.revision, address));
            }
            Entry::Vacant(unknown) => {
                unknown.insert((self.revision, address));
            }
        }
        self.changes.insert(self.revision, rank);
    }

    /// Returns the number of changes so far.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// The current peers, by rank.
    pub(crate) fn present(&self) -> Vec<Peer> {
        let peer = |(&rank, (_, address)): (&u32, &(u64, Option<String>))| Peer {
            rank,
            address: address.clone(),
        };
        self.ranks.iter().map(peer).filter(|peer| peer.address.is_some()).collect()
    }

    /// The peers that have joined or left after `revision`, by rank; peers that have left have no
    /// address.
    pub(crate) fn since(&self, revision: u64) -> Vec<Peer> {
        let later = self.changes.range((Bound::Excluded(revision), Bound::Unbounded));
        let peer = |(_, &rank): (&u64, &u32)| {
            let address = self.ranks.get(&rank).and_then(|(_, address)| address.clone());
            Peer { rank, address }
        };
        let mut peers: Vec<Peer> = later.map(peer).collect();
        peers.sort_unstable_by_key(|peer| peer.rank);
        peers
    }

    /// The number of ranks in the maps.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        assert_eq!(self.ranks.len(), self.changes.len());
        self.ranks.len()
    }
}

/// The state that a member has been sent.
#[derive(Debug, Clone)]
pub struct Told {
    pub(crate) epoch: u64,
    pub(crate) initialised: bool,
    pub(crate) placement: Arc<Placement>,
    pub(crate) peers: u64,
}

/// A membership message. The service converts it without holding the driver's lock.
#[derive(Debug)]
pub struct Change {
    pub lease: Lease,
    pub job_id: u64,
    pub epoch: u64,
    pub world: u32,
    pub version: Option<u64>,
    pub line: Arc<Line>,
    /// Only in the first message.
    pub spec: Option<Arc<JobSpec>>,
    /// In the first message, and when the placement has changed.
    pub placement: Option<Arc<Placement>>,
    /// All peers in the first message; later those that joined or left.
    pub peers: Vec<Peer>,
    /// The first epoch and the version after the last restoration while ranks were waiting.
    pub restored: Option<(u64, u64)>,
}

/// A worker that other workers of its job can reach.
#[derive(Debug, PartialEq, Eq)]
pub struct Peer {
    pub rank: u32,
    /// `None` for a peer that has left.
    pub address: Option<String>,
}

impl Told {
    pub(crate) fn is(&self, other: &Self) -> bool {
        let plain = |told: &Self| (told.epoch, told.initialised, told.peers);
        plain(self) == plain(other) && Arc::ptr_eq(&self.placement, &other.placement)
    }
}
