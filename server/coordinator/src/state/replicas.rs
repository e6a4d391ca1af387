//! The copies of slices on the servers of an open job, complete and pending.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::{JobSpec, Placement, Server};

use crate::{
    placement::Unfit,
    vocabulary::{
        ids::{Now, ServerId},
        job_report::JobReport,
    },
};

/// The backups of an open job.
#[derive(Debug, Default)]
pub struct Replicas {
    /// By server: the slices that it is to hold as a backup, and has not begun to copy.
    empty: BTreeMap<ServerId, BTreeSet<u32>>,
    /// By server: the number of trained slices that it holds as a backup, or is copying.
    active: BTreeMap<ServerId, usize>,
    /// The servers that were told to open the job as backups and have not done so yet, with the
    /// epochs in which they open it.
    opening: BTreeMap<ServerId, u64>,
    /// The copy in progress.
    copying: Option<Copying>,
    /// By server: the number of the last copy that it was told to make in this placement.
    told: BTreeMap<ServerId, u64>,
    /// The number of the last copy in any placement.
    last_copy: u64,
    /// The servers that could not hold the job, or that its ranks could not reach, with their
    /// incarnations.
    refused: BTreeSet<(ServerId, u64)>,
    /// The servers that have no memory for further slices.
    full: BTreeSet<ServerId>,
    /// Since when there have been slices with too few replicas.
    degraded: Option<Now>,
    /// `true` if the placement has fewer replicas of slices than the job asks for.
    is_short: bool,
    /// The servers that are being drained (`drains`), even if they hold no slices any more.
    leaving: BTreeSet<ServerId>,
}

/// Slices that a server is copying.
#[derive(Debug)]
struct Copying {
    number: u64,
    server: ServerId,
    slices: Vec<u32>,
}

impl Replicas {
    /// The replicas of a job that has just been placed: no server has anything to copy.
    pub(crate) fn new(spec: &JobSpec, placement: &Placement) -> Self {
        let is_short = is_short(spec, placement);
        Self { active: active(spec, placement, &BTreeMap::new()), is_short, ..Self::default() }
    }

    /// Returns whether further servers could hold replicas of slices.
    pub(crate) fn are_wanted(&self) -> bool {
        self.is_short || !self.full.is_empty() || !self.leaving.is_empty()
    }

    /// Returns the replicas after a change of placement. `empty`: the slices that each server
    /// lacks.
    pub(crate) fn moved(
        &mut self,
        spec: &JobSpec,
        placement: &Placement,
        empty: BTreeMap<ServerId, BTreeSet<u32>>,
    ) -> Self {
        Self {
            active: active(spec, placement, &empty),
            empty,
            last_copy: self.last_copy,
            refused: std::mem::take(&mut self.refused),
            full: std::mem::take(&mut self.full),
            degraded: self.degraded,
            is_short: is_short(spec, placement),
            leaving: std::mem::take(&mut self.leaving),
            ..Self::default()
        }
    }

    /// Records that a server is being drained.
    pub(crate) fn leave(&mut self, server: ServerId) {
        self.leaving.insert(server);
    }

    /// Records that a drained server has no slices any more.
    pub(crate) fn left(&mut self, server: ServerId) {
        self.leaving.remove(&server);
    }

    /// Returns the servers that are being drained.
    pub(crate) fn leaving(&self) -> &BTreeSet<ServerId> {
        &self.leaving
    }

    /// Returns `true` if the job no longer uses this process of a server.
    pub(crate) fn has_refused(&self, server: &Server) -> bool {
        self.refused.contains(&(server.id, server.incarnation))
    }

    /// Stops using this process of a server. It is used again after a restart.
    pub(crate) fn refuse(&mut self, server: ServerId, incarnation: u64) {
        self.refused.insert((server, incarnation));
    }

    /// Returns `true` if a server has no memory for further slices.
    pub(crate) fn is_full(&self, server: ServerId) -> bool {
        self.full.contains(&server)
    }

    /// Asks full servers again: their memory may be free by now.
    pub(crate) fn ask_full_again(&mut self) {
        self.full.clear();
    }

    /// Returns the slices for which their backups have no memory.
    pub(crate) fn without_memory(&self) -> impl Iterator<Item = usize> + '_ {
        let slices = self.full.iter().filter_map(|server| self.empty.get(server));
        slices.flatten().map(|&slice| slice as usize)
    }

    /// Returns the servers that get no further slices.
    pub(crate) fn unfit(&self) -> Unfit<'_> {
        Unfit { full: &self.full, leaving: &self.leaving }
    }

    /// Returns `true` if a server is a backup of trained slices, or is copying some.
    pub(crate) fn is_active(&self, server: ServerId) -> bool {
        self.active.get(&server).is_some_and(|&slices| slices > 0)
    }

    /// Returns `true` if every backup has all of its slices.
    pub(crate) fn are_whole(&self) -> bool {
        self.empty.is_empty() && !self.is_copying()
    }

    /// Records since when slices have too few replicas.
    pub(crate) fn degrade(&mut self, now: Now) {
        self.degraded.get_or_insert(now);
    }

    /// Records that all slices have their replicas again. Returns since when they did not.
    pub(crate) fn recovered(&mut self) -> Option<Now> {
        self.degraded.take()
    }

    /// Records that a server was told to open the job as a backup, in this epoch.
    pub(crate) fn open(&mut self, server: ServerId, epoch: u64) {
        self.opening.insert(server, epoch);
    }

    /// Records that a server has opened the job. Returns `true` if it opened it as a backup.
    pub(crate) fn opened(&mut self, server: ServerId) -> bool {
        self.opening.remove(&server).is_some()
    }

    /// Chooses a server and the next slices for it to copy: at most `limit` bytes in total, but at
    /// least one slice. `bytes` returns the size of a slice.
    pub(crate) fn next_copy(
        &mut self,
        limit: u64,
        bytes: impl Fn(u32) -> u64,
        is_away: impl Fn(&ServerId) -> bool,
    ) -> Option<(ServerId, Vec<u32>)> {
        let Self { empty, opening, full, .. } = self;
        let can = |server: &ServerId| {
            !opening.contains_key(server) && !full.contains(server) && !is_away(server)
        };
        let (&server, slices) = empty.iter_mut().find(|(server, _)| can(server))?;
        let mut sum = 0;
        let fits = |slice: &u32| {
            let is_first = sum == 0;
            sum += bytes(*slice).max(1);
            is_first || sum <= limit
        };
        let part: Vec<u32> = slices.iter().copied().take_while(fits).collect();
        match slices.iter().nth(part.len()) {
            Some(&next) => *slices = slices.split_off(&next),
            None => _ = empty.remove(&server),
        }
        Some((server, part))
    }

    /// Records that a server was told to copy slices, `trained` of which are trained. Returns the
    /// number of the copy.
    pub(crate) fn begin_copy(&mut self, server: ServerId, slices: Vec<u32>, trained: usize) -> u64 {
        self.last_copy += 1;
        let number = self.last_copy;
        *self.active.entry(server).or_default() += trained;
        self.told.insert(server, number);
        self.copying = Some(Copying { number, server, slices });
        number
    }

    /// Returns the number and the slices of the copy that the server is making, if any.
    pub(crate) fn copying_on(&self, server: ServerId) -> Option<(u64, Vec<u32>)> {
        let copying = self.copying.as_ref().filter(|copying| copying.server == server)?;
        Some((copying.number, copying.slices.clone()))
    }

    /// Ends the copy with this number on this server. Returns its slices.
    pub(crate) fn end_copy(&mut self, server: ServerId, number: u64) -> Option<Vec<u32>> {
        let is_it = |of: &mut Copying| (of.server, of.number) == (server, number);
        Some(self.copying.take_if(is_it)?.slices)
    }

    /// Records that a server has no memory for slices, `trained` of which are trained.
    pub(crate) fn cannot_copy(&mut self, server: ServerId, slices: Vec<u32>, trained: usize) {
        if let Some(active) = self.active.get_mut(&server) {
            *active -= trained;
        }
        self.full.insert(server);
        self.empty.entry(server).or_default().extend(slices);
    }

    /// A server is not cordoned any more: the job does not move off it, and does not refuse it.
    pub(crate) fn uncordoned(&mut self, server: ServerId) {
        self.leaving.remove(&server);
        self.refused.retain(|(refused, _)| *refused != server);
    }

    /// Returns whether slices are being copied. The open step waits for that.
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
        reports: &BTreeMap<ServerId, JobReport>,
        now: Now,
    ) -> Self {
        let full: BTreeMap<ServerId, BTreeSet<u32>> =
            reports.iter().map(|(&server, report)| (server, report.full_slices(server))).collect();
        let empty = empty(placement, |server, slice| {
            // What has become of a server without a description is not known here.
            full.get(&server.id).is_none_or(|full| full.contains(&slice))
        });
        let current = reports.iter().filter(|(_, report)| *report.plan.placement == *placement);
        let degraded = (!empty.is_empty()).then_some(now);
        Self {
            active: active(spec, placement, &empty),
            empty,
            told: current.map(|(&server, report)| (server, report.copies)).collect(),
            last_copy: reports.values().map(|report| report.copies).max().unwrap_or(0),
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
        self.has_refused(server) || self.is_full(server.id)
    }

    /// Returns whether one of the servers of a slice has its content.
    pub(crate) fn has(&self, server: ServerId, slice: u32) -> bool {
        let lacks = |slices: &BTreeSet<u32>| slices.contains(&slice);
        let copies = |copy: &Copying| copy.server == server && copy.slices.contains(&slice);
        !self.empty.get(&server).is_some_and(lacks) && !self.copying.as_ref().is_some_and(copies)
    }
}

/// Returns whether a placement has fewer replicas of slices than the job asks for.
fn is_short(spec: &JobSpec, placement: &Placement) -> bool {
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
fn active(
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
