//! The servers that hold each slice. The coordinator chooses a placement.

use crate::{Error, Result};

/// A shard server with the address at which its peers dial it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Server {
    /// The id, which survives restarts of the server.
    pub id: u64,
    /// The incarnation, which is different after each start of the server process.
    pub incarnation: u64,
    /// `host:port`.
    pub address: String,
}

/// The entry of a slice that has fewer servers than others.
const NONE: u32 = u32::MAX;

/// Maps each slice to an ordered list of servers, primary first. Slices may have different numbers
/// of servers, for example while one of them is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    servers: Vec<Server>,
    replicas: usize,
    /// INVARIANT: positions in `servers`; `replicas` for each slice, distinct within a slice, the
    /// last of which may be [`NONE`], but not the first.
    owners: Vec<u32>,
    /// `true` if an entry is [`NONE`].
    is_uneven: bool,
}

impl Placement {
    /// Creates a placement. `owners` are positions in `servers`, `replicas` of them for each slice.
    /// A slice with fewer servers ends with entries of [`u32::MAX`].
    ///
    /// # Errors
    /// [`Error::Refused`] unless every slice has 1 to `replicas` distinct servers.
    pub fn new(servers: Vec<Server>, replicas: usize, owners: Vec<u32>) -> Result<Self> {
        if replicas == 0 || !owners.len().is_multiple_of(replicas) {
            return Err(Error::refused(format!(
                "the placement has {} owners, which is not a multiple of {replicas} replicas",
                owners.len()
            )));
        }
        // For each server, the last slice (counted from 1) that listed it.
        let mut last = vec![0; servers.len()];
        for (slice, owners) in (1..).zip(owners.chunks(replicas)) {
            let distinct = listed(owners).iter().all(|&owner| {
                last.get_mut(owner as usize)
                    .is_some_and(|last| std::mem::replace(last, slice) != slice)
            });
            let is_padded = owners[listed(owners).len()..].iter().all(|&owner| owner == NONE);
            if !distinct || !is_padded || owners[0] == NONE {
                return Err(Error::refused(format!(
                    "the owners of slice {}, {owners:?}, are not distinct positions in the list \
                     of {} servers",
                    slice - 1,
                    servers.len()
                )));
            }
        }
        let is_uneven = owners.contains(&NONE);
        Ok(Self { servers, replicas, owners, is_uneven })
    }

    /// Creates a placement from the list of servers of each slice, primary first.
    ///
    /// # Errors
    /// [`Error::Refused`] unless every slice has distinct servers, at least one.
    pub fn of_lists(servers: Vec<Server>, lists: &[Vec<u32>]) -> Result<Self> {
        let replicas = lists.iter().map(Vec::len).max().unwrap_or(1);
        let padded = lists.iter().flat_map(|owners| {
            owners.iter().copied().chain(std::iter::repeat(NONE)).take(replicas)
        });
        Self::new(servers, replicas, padded.collect())
    }

    /// All servers that hold slices.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The largest number of servers of a slice.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns whether slices have different numbers of servers.
    pub fn is_uneven(&self) -> bool {
        self.is_uneven
    }

    /// The number of slices.
    pub fn slices(&self) -> usize {
        self.owners.len() / self.replicas
    }

    /// The positions in [`Self::servers`] of the servers of `slice`, primary first.
    pub fn owners(&self, slice: usize) -> &[u32] {
        listed(&self.owners[slice * self.replicas..][..self.replicas])
    }

    /// The owners of all slices as [`Self::new`] takes them.
    pub fn all_owners(&self) -> &[u32] {
        &self.owners
    }

    /// The position in [`Self::servers`] of the primary of `slice`.
    pub fn primary(&self, slice: usize) -> usize {
        self.owners(slice)[0] as usize
    }

    /// The slices that server `id` holds, ascending, and whether it is the primary.
    pub fn slices_of(&self, id: u64) -> impl Iterator<Item = (usize, bool)> + '_ {
        let owner = move |&owner: &u32| self.servers[owner as usize].id == id;
        (0..self.slices()).filter_map(move |slice| {
            self.owners(slice).iter().position(owner).map(|place| (slice, place == 0))
        })
    }

    /// The slices whose primary is server `id`, ascending.
    pub fn primary_slices(&self, id: u64) -> impl Iterator<Item = usize> + '_ {
        (0..self.slices()).filter(move |&slice| self.servers[self.primary(slice)].id == id)
    }
}

/// The entries before the first [`NONE`].
fn listed(owners: &[u32]) -> &[u32] {
    let end = owners.iter().position(|&owner| owner == NONE);
    &owners[..end.unwrap_or(owners.len())]
}
