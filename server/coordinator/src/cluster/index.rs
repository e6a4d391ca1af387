//! What the cluster knows of each job without visiting it, so that an event visits only the jobs
//! that it is about.
//!
//! The index is derived from the jobs: after each visit, the cluster replaces the entry of the job.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use zeroshard_model::{Placement, Server, memory::Required};

use crate::{
    placement::plan::Loads,
    vocabulary::ids::{Now, ServerId},
};

/// The name of a job.
pub type Name = Arc<str>;

/// What is known of one job.
#[derive(Debug, Clone, Default)]
pub(crate) struct Entry {
    /// The placement of its slices, once there is one.
    pub(crate) placement: Option<Arc<Placement>>,
    /// The servers that may hold it as it was before it returned to a checkpoint.
    pub(crate) holders: BTreeSet<ServerId>,
    /// When it has to be visited at the latest.
    pub(crate) deadline: Option<Now>,
    /// The id of the job that it is being created from, if it is.
    pub(crate) predecessor: Option<u64>,
    pub(crate) interests: Interests,
}

/// The sets of the index in which a job is listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Interests {
    /// It waits for servers, or for the end of the learning.
    pub(crate) servers: bool,
    /// It waits for the descriptions by its servers.
    pub(crate) descriptions: bool,
    /// Its slices could have more replicas.
    pub(crate) replicas: bool,
    /// It is being saved: departing servers, and the end of the process, wait for that.
    pub(crate) saving: bool,
}

/// The entries of all jobs, with a map or a set for each kind of lookup.
#[derive(Debug, Default)]
pub struct Index {
    entries: BTreeMap<Name, Entry>,
    /// For each server, how many bytes all jobs need there: all of them, and those of
    /// `Required::fixed`. The sums never saturate, so that a job can be subtracted again.
    assigned: BTreeMap<ServerId, (u128, u128)>,
    /// The part of `assigned` that each job has added.
    loads: BTreeMap<Name, Loads>,
    users: BTreeMap<ServerId, BTreeSet<Name>>,
    /// By the addresses of the servers.
    addresses: BTreeMap<String, BTreeSet<Name>>,
    deadlines: BTreeSet<(Now, Name)>,
    successors: BTreeMap<u64, BTreeSet<Name>>,
    waiting: BTreeSet<Name>,
    recovering: BTreeSet<Name>,
    short: BTreeSet<Name>,
    saving: BTreeSet<Name>,
}

impl Index {
    /// Replaces the entry of a job; `None`: the job is gone. `loads`: the bytes that the job needs
    /// on each server. Returns whether its predecessor has changed.
    pub(crate) fn set(&mut self, job: &Name, entry: Option<Entry>, loads: Option<&Loads>) -> bool {
        let is_gone = entry.is_none();
        let (old, new) = (self.entries.remove(job).unwrap_or_default(), entry.unwrap_or_default());
        let is_moved = !same(old.placement.as_ref(), new.placement.as_ref());
        if is_moved {
            self.assign(job, loads);
        }
        if is_moved || old.holders != new.holders {
            self.use_servers(job, &old, &new);
        }
        if old.deadline != new.deadline {
            if let Some(deadline) = old.deadline {
                self.deadlines.remove(&(deadline, job.clone()));
            }
            self.deadlines.extend(new.deadline.map(|deadline| (deadline, job.clone())));
        }
        let has_other_predecessor = old.predecessor != new.predecessor;
        if has_other_predecessor {
            if let Some(id) = old.predecessor {
                remove(&mut self.successors, &id, job);
            }
            if let Some(id) = new.predecessor {
                self.successors.entry(id).or_default().insert(job.clone());
            }
        }
        if old.interests != new.interests {
            self.set_interests(job, new.interests);
        }
        if !is_gone {
            self.entries.insert(job.clone(), new);
        }
        has_other_predecessor
    }

    fn use_servers(&mut self, job: &Name, old: &Entry, new: &Entry) {
        let (before, after) = (servers_of(old), servers_of(new));
        for server in before.difference(&after) {
            remove(&mut self.users, server, job);
        }
        for &server in after.difference(&before) {
            self.users.entry(server).or_default().insert(job.clone());
        }
        for server in old.placement.iter().flat_map(|placement| placement.servers()) {
            remove(&mut self.addresses, &server.address, job);
        }
        for server in new.placement.iter().flat_map(|placement| placement.servers()) {
            self.addresses.entry(server.address.clone()).or_default().insert(job.clone());
        }
    }

    /// Puts a job into the sets of its interests, and takes it out of the others.
    fn set_interests(&mut self, job: &Name, interests: Interests) {
        let Interests { servers, descriptions, replicas, saving } = interests;
        for (set, is_member) in [
            (&mut self.waiting, servers),
            (&mut self.recovering, descriptions),
            (&mut self.short, replicas),
            (&mut self.saving, saving),
        ] {
            match is_member {
                true => set.insert(job.clone()),
                false => set.remove(job),
            };
        }
    }

    /// The entry of a job.
    #[cfg(test)]
    pub(crate) fn entry(&self, job: &str) -> Option<&Entry> {
        self.entries.get(job)
    }

    /// Replaces the part that a job has added to `assigned`.
    fn assign(&mut self, job: &Name, loads: Option<&Loads>) {
        for (server, load) in self.loads.remove(job).unwrap_or_default() {
            let (bytes, fixed) = self.assigned.entry(server).or_default();
            *bytes -= u128::from(load.bytes);
            *fixed -= u128::from(load.fixed);
            if *bytes == 0 {
                self.assigned.remove(&server);
            }
        }
        let Some(loads) = loads else { return };
        for (&server, load) in loads {
            let (bytes, fixed) = self.assigned.entry(server).or_default();
            *bytes += u128::from(load.bytes);
            *fixed += u128::from(load.fixed);
        }
        self.loads.insert(job.clone(), loads.clone());
    }

    /// The bytes that the jobs need of each server.
    pub fn assigned(&self) -> Loads {
        let fits = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
        let load =
            |&(bytes, fixed): &(u128, u128)| Required { bytes: fits(bytes), fixed: fits(fixed) };
        self.assigned.iter().map(|(&server, sum)| (server, load(sum))).collect()
    }

    /// The jobs that have slices on a server, or may hold some there.
    pub(crate) fn users(&self, server: ServerId) -> Vec<Name> {
        self.users.get(&server).into_iter().flatten().cloned().collect()
    }

    /// Returns the jobs that use this server, or another server at its address.
    pub(crate) fn users_of(&self, server: &Server) -> BTreeSet<Name> {
        let users = self.users.get(&server.id).into_iter().flatten();
        users.chain(self.addresses.get(&server.address).into_iter().flatten()).cloned().collect()
    }

    /// The servers that jobs use, with the jobs.
    pub(crate) fn used(&self) -> impl Iterator<Item = (ServerId, &BTreeSet<Name>)> {
        self.users.iter().map(|(&server, jobs)| (server, jobs))
    }

    /// The jobs that have to be visited now.
    pub(crate) fn due(&self, now: Now) -> Vec<Name> {
        let due = self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now);
        let mut due: Vec<Name> = due.map(|(_, job)| job.clone()).collect();
        due.sort_unstable();
        due
    }

    /// When the next job has to be visited.
    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The jobs that are being created from the job with this id.
    pub(crate) fn successors(&self, id: u64) -> Vec<Name> {
        self.successors.get(&id).into_iter().flatten().cloned().collect()
    }

    /// Returns whether jobs are being created from the job with this id.
    pub(crate) fn has_successors(&self, id: u64) -> bool {
        self.successors.contains_key(&id)
    }

    /// The jobs that wait for servers, or for the end of the learning.
    pub(crate) fn waiting(&self) -> Vec<Name> {
        self.waiting.iter().cloned().collect()
    }

    /// The jobs that wait for the descriptions by their servers.
    pub(crate) fn recovering(&self) -> Vec<Name> {
        self.recovering.iter().cloned().collect()
    }

    /// The jobs whose slices could have more replicas.
    pub(crate) fn short(&self) -> Vec<Name> {
        self.short.iter().cloned().collect()
    }

    /// Returns whether a job that uses the server is being saved.
    pub(crate) fn saves_on(&self, server: ServerId) -> bool {
        let mut users = self.users.get(&server).into_iter().flatten();
        users.any(|job| self.saving.contains(job))
    }

    /// Returns whether a job is being saved.
    pub fn is_saving(&self) -> bool {
        !self.saving.is_empty()
    }
}

/// The servers that have slices of a job, or may have.
fn servers_of(entry: &Entry) -> BTreeSet<ServerId> {
    let placed = entry.placement.iter().flat_map(|placement| placement.servers());
    placed.map(|server| server.id).chain(entry.holders.iter().copied()).collect()
}

/// Returns `true` if both are the same allocation, or both are `None`.
fn same(one: Option<&Arc<Placement>>, other: Option<&Arc<Placement>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

/// Removes a job from a set, and the set when it is empty.
fn remove<K: Ord>(sets: &mut BTreeMap<K, BTreeSet<Name>>, key: &K, job: &Name) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(job);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}
