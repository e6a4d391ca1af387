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

use zeroshard_model::{JobSpec, Placement};

use super::{
    events::Lease,
    state::{Job, Open, Phase},
};

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
    pub(super) fn set(&mut self, rank: u32, address: Option<String>) {
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

    /// The current peers, by rank.
    fn present(&self) -> Vec<Peer> {
        let peer = |(&rank, (_, address)): (&u32, &(u64, Option<String>))| Peer {
            rank,
            address: address.clone(),
        };
        self.ranks.iter().map(peer).filter(|peer| peer.address.is_some()).collect()
    }

    /// The peers that have joined or left after `revision`, by rank; peers that have left have no
    /// address.
    fn since(&self, revision: u64) -> Vec<Peer> {
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
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.ranks.len(), self.changes.len());
        self.ranks.len()
    }
}

/// The state that a member has been sent.
#[derive(Debug, Clone)]
pub struct Told {
    epoch: u64,
    initialised: bool,
    placement: Arc<Placement>,
    peers: u64,
}

/// A membership message, which the service converts outside of the driver's lock.
#[derive(Debug)]
pub struct Change {
    pub lease: Lease,
    pub job_id: u64,
    pub epoch: u64,
    pub world: u32,
    pub version: Option<u64>,
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

impl Job {
    /// The next message for the member with `lease`: `None` if nothing has changed, or if it has
    /// not joined yet.
    pub(super) fn next_membership(&mut self, lease: Lease) -> Option<Change> {
        let Self { spec, id, epoch, phase: Phase::Open(open), .. } = self else { return None };
        let now = open.news(*epoch);
        let (version, restored, revision) = (open.version, open.rolled_back, now.peers);
        let Open { members, peers, .. } = open.as_mut();
        let member = members.of(lease).filter(|member| member.joining.is_none())?;
        let told = member.told.replace(now.clone());
        if told.as_ref().is_some_and(|told| told.is(&now)) {
            return None;
        }
        let same_placement =
            told.as_ref().is_some_and(|told| Arc::ptr_eq(&told.placement, &now.placement));
        Some(Change {
            lease,
            job_id: *id,
            epoch: *epoch,
            world: spec.world,
            version,
            restored,
            spec: told.is_none().then(|| spec.clone()),
            placement: (!same_placement).then_some(now.placement),
            peers: match told {
                None => peers.present(),
                Some(told) if told.peers == revision => Vec::new(),
                Some(told) => peers.since(told.peers),
            },
        })
    }
}

impl Told {
    fn is(&self, other: &Self) -> bool {
        let plain = |told: &Self| (told.epoch, told.initialised, told.peers);
        plain(self) == plain(other) && Arc::ptr_eq(&self.placement, &other.placement)
    }
}

impl Open {
    /// The state of a member that has read everything.
    fn news(&self, epoch: u64) -> Told {
        let (initialised, placement) = (self.version.is_some(), self.placement.clone());
        Told { epoch, initialised, placement, peers: self.peers.revision }
    }
}
