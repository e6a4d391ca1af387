//! Membership messages: what has changed for a member since the last one that it read.
//!
//! Nothing is queued for a member. The state remembers what each member was told, and computes the
//! difference when the member's stream is polled, so a member that reads slowly costs no memory and
//! receives the latest state.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Bound,
    sync::Arc,
};

use zeroshard_proto::{JobSpec, Placement, pb};

use super::{
    cluster::Cluster,
    events::Lease,
    state::{Job, Open, Phase},
};

/// The addresses of a job's peers, with the order of their changes. INVARIANT: one entry per rank
/// that ever had an address, in both maps.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// Revision of the last change, and the address; none for a peer that has gone.
    ranks: BTreeMap<u32, (u64, Option<String>)>,
    /// The rank that changed last in each revision.
    changes: BTreeMap<u64, u32>,
    revision: u64,
}

impl Peers {
    /// A peer came, or went (no address).
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

    /// Peers that are there, by rank.
    fn present(&self) -> Vec<pb::Peer> {
        let peer = |(&rank, (_, address)): (&u32, &(u64, Option<String>))| pb::Peer {
            rank,
            address: address.clone(),
        };
        self.ranks.iter().map(peer).filter(|peer| peer.address.is_some()).collect()
    }

    /// Peers that have come or gone after `revision`, by rank; those that have gone without an
    /// address.
    fn since(&self, revision: u64) -> Vec<pb::Peer> {
        let later = self.changes.range((Bound::Excluded(revision), Bound::Unbounded));
        let peer = |(_, &rank): (&u64, &u32)| {
            let address = self.ranks.get(&rank).and_then(|(_, address)| address.clone());
            pb::Peer { rank, address }
        };
        let mut peers: Vec<pb::Peer> = later.map(peer).collect();
        peers.sort_unstable_by_key(|peer| peer.rank);
        peers
    }

    /// The number of ranks that are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.ranks.len(), self.changes.len());
        self.ranks.len()
    }
}

/// What a member has been told.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    epoch: u64,
    initialised: bool,
    placement: Arc<Placement>,
    peers: u64,
}

/// A membership message, which the service converts outside of the driver's lock.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) lease: Lease,
    pub(crate) job_id: u64,
    pub(crate) epoch: u64,
    pub(crate) world: u32,
    pub(crate) version: Option<u64>,
    /// In the first message only.
    pub(crate) spec: Option<Arc<JobSpec>>,
    /// In the first message, and when it has changed.
    pub(crate) placement: Option<Arc<Placement>>,
    /// In the first message all, then those that came or went.
    pub(crate) peers: Vec<pb::Peer>,
}

impl From<Change> for pb::JoinResponse {
    fn from(change: Change) -> Self {
        Self {
            lease: change.lease.0,
            epoch: change.epoch,
            world: change.world,
            version: change.version,
            spec: change.spec.map(|spec| spec.as_ref().into()),
            placement: change.placement.map(|placement| placement.as_ref().into()),
            peers: change.peers,
            job_id: change.job_id,
        }
    }
}

impl Cluster {
    /// The next message for the member that holds `lease`: none if it knows everything, or has not
    /// joined yet.
    pub(crate) fn next_membership(&mut self, name: &str, lease: Lease) -> Option<Change> {
        let Job { spec, id, epoch, phase: Phase::Open(open), .. } = self.jobs.get_mut(name)? else {
            return None;
        };
        let now = open.news(*epoch);
        let (version, revision) = (open.version, now.peers);
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
    /// What a member that has read everything has been told.
    fn news(&self, epoch: u64) -> Told {
        let (initialised, placement) = (self.version.is_some(), self.placement.clone());
        Told { epoch, initialised, placement, peers: self.peers.revision }
    }
}
