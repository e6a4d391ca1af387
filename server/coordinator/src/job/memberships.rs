//! The next membership message for a member.

use std::sync::Arc;

use crate::{
    job::{Job, Open, Phase},
    state::memberships::{Change, Told},
    vocabulary::ids::Lease,
};

impl Job {
    /// The next message for the member with `lease`: `None` if nothing has changed, or if it has
    /// not joined yet.
    pub(crate) fn next_membership(&mut self, lease: Lease) -> Option<Change> {
        let Self { spec, id, epoch, line, phase: Phase::Open(open), .. } = self else {
            return None;
        };
        let now = open.news(*epoch);
        let (version, restored, revision) =
            (open.version.current(), open.version.rolled_back(), now.peers);
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
            line: line.clone(),
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

impl Open {
    /// The state of a member that has read everything.
    fn news(&self, epoch: u64) -> Told {
        let (initialised, placement) = (self.version.is_published(), self.plan.placement.clone());
        Told { epoch, initialised, placement, peers: self.peers.revision() }
    }
}
