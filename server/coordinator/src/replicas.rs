//! Which servers have the content of which slices of an open job.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::{JobSpec, Placement, Server};

use crate::{
    held::Held,
    ids::{Now, ServerId},
};

/// The backups of an open job.
#[derive(Debug, Default)]
pub struct Replicas {
    /// By server: the slices that it is to hold as a backup, and has not begun to copy.
    pub(crate) empty: BTreeMap<ServerId, BTreeSet<u32>>,
    /// By server: the number of trained slices that it holds as a backup, or is copying.
    pub(crate) active: BTreeMap<ServerId, usize>,
    /// The servers that were told to open the job as backups and have not done so yet, with the
    /// epochs in which they open it.
    pub(crate) opening: BTreeMap<ServerId, u64>,
    /// The copy in progress.
    pub(crate) copying: Option<Copying>,
    /// By server: the number of the last copy that it was told to make in this placement.
    pub(crate) told: BTreeMap<ServerId, u64>,
    /// The number of the last copy in any placement.
    pub(crate) last_copy: u64,
    /// The servers that could not hold the job, or that its ranks could not reach, with their
    /// incarnations.
    pub(crate) refused: BTreeSet<(ServerId, u64)>,
    /// The servers that have no memory for further slices.
    pub(crate) full: BTreeSet<ServerId>,
    /// Since when there have been slices with too few replicas.
    pub(crate) degraded: Option<Now>,
    /// `true` if the placement has fewer replicas of slices than the job asks for.
    pub(crate) is_short: bool,
    /// The servers from which the job moves away (`drains`), also if they hold no slices any more.
    pub(crate) leaving: BTreeSet<ServerId>,
}

/// Slices that a server is copying.
#[derive(Debug)]
pub(crate) struct Copying {
    pub(crate) number: u64,
    pub(crate) server: ServerId,
    pub(crate) slices: Vec<u32>,
}

impl Replicas {
    /// The backups of a job whose servers have all their slices.
    pub(crate) fn new(spec: &JobSpec, placement: &Placement) -> Self {
        let is_short = is_short(spec, placement);
        Self { active: active(spec, placement, &BTreeMap::new()), is_short, ..Self::default() }
    }

    /// Returns whether further servers could hold replicas of slices.
    pub(crate) fn are_wanted(&self) -> bool {
        self.is_short || !self.full.is_empty() || !self.leaving.is_empty()
    }

    /// A server is not cordoned any more: the job does not move off it, and does not refuse it.
    pub(crate) fn uncordoned(&mut self, server: ServerId) {
        self.leaving.remove(&server);
        self.refused.retain(|(refused, _)| *refused != server);
    }

    /// Returns whether slices are being copied, for which the open step waits.
    pub(crate) fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// Returns whether a report was sent after the server had received the last command to copy
    /// slices.
    pub(crate) fn is_current(&self, server: ServerId, copies: u64) -> bool {
        self.told.get(&server).copied().unwrap_or(0) == copies
    }

    /// The backups according to the descriptions by the servers of `placement`.
    pub(crate) fn learn(
        spec: &JobSpec,
        placement: &Placement,
        held: &BTreeMap<ServerId, Held>,
        now: Now,
    ) -> Self {
        let full: BTreeMap<ServerId, BTreeSet<u32>> =
            held.iter().map(|(&server, held)| (server, held.full_slices(server))).collect();
        let empty = empty(placement, |server, slice| {
            // What has become of a server without a description is not known here.
            full.get(&server.id).is_none_or(|full| full.contains(&slice))
        });
        let current = held.iter().filter(|(_, held)| *held.plan.placement == *placement);
        let degraded = (!empty.is_empty()).then_some(now);
        Self {
            active: active(spec, placement, &empty),
            empty,
            told: current.map(|(&server, held)| (server, held.copies)).collect(),
            last_copy: held.values().map(|held| held.copies).max().unwrap_or(0),
            degraded,
            is_short: is_short(spec, placement),
            ..Self::default()
        }
    }

    /// The epoch in which a server opens the job as a backup, if it has not done so yet.
    pub(crate) fn opens_in(&self, server: ServerId) -> Option<u64> {
        self.opening.get(&server).copied()
    }

    /// The slices that a server has not begun to copy.
    #[cfg(test)]
    pub(crate) fn empty_on(&self, server: ServerId) -> BTreeSet<u32> {
        self.empty.get(&server).cloned().unwrap_or_default()
    }

    /// Returns whether a server has refused the job, or further slices of it.
    pub(crate) fn cannot_hold(&self, server: &Server) -> bool {
        self.refused.contains(&(server.id, server.incarnation)) || self.full.contains(&server.id)
    }

    /// Returns whether one of the servers of a slice has its content.
    pub(crate) fn has(&self, server: ServerId, slice: u32) -> bool {
        let lacks = |slices: &BTreeSet<u32>| slices.contains(&slice);
        let copies = |copy: &Copying| copy.server == server && copy.slices.contains(&slice);
        !self.empty.get(&server).is_some_and(lacks) && !self.copying.as_ref().is_some_and(copies)
    }
}

/// Returns whether a placement has fewer replicas of slices than the job asks for.
pub(crate) fn is_short(spec: &JobSpec, placement: &Placement) -> bool {
    placement.replicas() < spec.replicas as usize || placement.is_uneven()
}

/// The slices that a server holds, or is to hold.
pub(crate) fn slices_on(placement: &Placement, server: ServerId) -> BTreeSet<u32> {
    placement.slices_of(server).map(|(slice, _)| slice as u32).collect()
}

/// By server: its slices that it does not have according to `has`.
pub(crate) fn empty(
    placement: &Placement,
    has: impl Fn(&Server, u32) -> bool,
) -> BTreeMap<ServerId, BTreeSet<u32>> {
    let empty = |server: &Server| {
        let mut slices = slices_on(placement, server.id);
        slices.retain(|&slice| !has(server, slice));
        (server.id, slices)
    };
    let empty = placement.servers().iter().map(empty);
    empty.filter(|(_, slices)| !slices.is_empty()).collect()
}

/// By server: the number of trained slices that it holds as a backup.
pub(crate) fn active(
    spec: &JobSpec,
    placement: &Placement,
    empty: &BTreeMap<ServerId, BTreeSet<u32>>,
) -> BTreeMap<ServerId, usize> {
    let mut active = BTreeMap::new();
    for slice in (0..placement.slices()).filter(|&slice| spec.manifest.trains(slice)) {
        for &backup in &placement.owners(slice)[1..] {
            let server = placement.servers()[backup as usize].id;
            if !empty.get(&server).is_some_and(|slices| slices.contains(&(slice as u32))) {
                *active.entry(server).or_default() += 1;
            }
        }
    }
    active
}
