//! Chooses the servers of each slice. The choice is deterministic, balanced by bytes, and moves few
//! slices.
//!
//! The loads of any two servers differ by at most the largest slice, unless the zones of the
//! servers prevent it. The algorithm ensures this as follows:
//! 1. Slices stay on their server, unless the server is gone.
//! 2. Slices without a server go, largest first, to the least loaded servers (Graham's LPT rule).
//! 3. While two servers differ by more than the largest slice (because a server has joined), the
//!    fullest server passes its largest slice to the emptiest.
//!
//! With one server per slice, steps 1 and 2 are sufficient when a server is lost: then only its
//! slices move.

pub mod fork;
pub mod free_memory;
pub mod plan;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use zeroshard_model::{
    Error, Placement, Result, Server,
    memory::{Capacity, Required},
};

/// The zones of servers, by id: what fails together, such as a rack. A server that is not listed is
/// a zone of its own.
pub type Zones = BTreeMap<u64, String>;

/// Places slices with `weights` (bytes each) on the `live` servers, `replicas` distinct servers for
/// each slice, as close to `previous` as the balance allows. The servers of a slice are in
/// different zones, where there are enough. The placement lists only servers that hold slices, by
/// id.
///
/// # Errors
/// [`Error::Invalid`] if there are fewer servers than replicas, or if `previous` has a different
/// number of slices.
pub fn place(
    previous: Option<&Placement>,
    live: &[Server],
    zones: &Zones,
    weights: &[u64],
    replicas: usize,
) -> Result<Placement> {
    if replicas == 0 || replicas > live.len() {
        return Err(Error::invalid(
            "replicas",
            replicas,
            format!("1 to the number of servers, {}", live.len()),
        ));
    }
    if let Some(previous) = previous.filter(|p| p.slices() != weights.len()) {
        let expected = format!("the number of slices of the job, {}", weights.len());
        return Err(Error::invalid(
            "number of slices of the previous placement",
            previous.slices(),
            expected,
        ));
    }
    let mut servers = live.to_vec();
    servers.sort_by_key(|server| server.id);
    servers.dedup_by_key(|server| server.id);
    let mut plan = Plan::new(&servers, zones, weights, replicas);
    if let Some(previous) = previous {
        plan.keep(&servers, previous);
    }
    plan.fill();
    plan.balance();
    plan.finish(&servers)
}

/// Places slices like [`place`], each on servers where `free` has room for it, which balances them
/// less. The room of a server for which `free` returns `None` is not limited.
///
/// # Errors
/// The number of a slice for which too few servers have room.
pub fn place_within(
    live: &[Server],
    zones: &Zones,
    free: impl Fn(u64) -> Option<Capacity>,
    slices: &[Required],
    replicas: usize,
) -> std::result::Result<Result<Placement>, usize> {
    let mut servers = live.to_vec();
    servers.sort_by_key(|server| server.id);
    servers.dedup_by_key(|server| server.id);
    let weights: Vec<u64> = slices.iter().map(|required| required.bytes).collect();
    let mut plan = Plan::new(&servers, zones, &weights, replicas);
    let unlimited = Capacity { bytes: u64::MAX, memory: u64::MAX };
    let rooms = servers.iter().map(|server| free(server.id).unwrap_or(unlimited)).collect();
    plan.within = Some((rooms, slices));
    plan.fill();
    match plan.owners.iter().position(|owners| owners.len() < replicas) {
        Some(slice) => Err(slice),
        None => Ok(plan.finish(&servers)),
    }
}

/// Keeps each slice on the servers `kept`, the first of which is the primary, and adds servers
/// where these are fewer than `replicas`, as far as there are any: none of those in `full` if there
/// is a choice, and of other zones first. No slice moves. Servers in `leaving` get no slices, and
/// do not count.
///
/// # Errors
/// [`Error::Invalid`] if there is no server.
pub fn replace_lost(
    kept: &[Vec<Server>],
    live: &[Server],
    zones: &Zones,
    Unfit { full, leaving }: Unfit<'_>,
    weights: &[u64],
    replicas: usize,
) -> Result<Placement> {
    let mut servers: Vec<Server> = kept.iter().flatten().chain(live).cloned().collect();
    servers.sort_by_key(|server| server.id);
    servers.dedup();
    let replicas = replicas.min(servers.len());
    if replicas == 0 {
        return Err(Error::invalid("number of shard servers", 0, "at least 1"));
    }
    let mut plan = Plan::new(&servers, zones, weights, replicas);
    plan.full = servers.iter().map(|server| full.contains(&server.id)).collect();
    plan.leaving = servers.iter().map(|server| leaving.contains(&server.id)).collect();
    let position = |server: &Server| servers.iter().position(|other| other == server);
    for (slice, kept) in kept.iter().enumerate() {
        let owners = kept.iter().filter_map(position).map(|owner| owner as u32);
        plan.owners[slice] = owners.collect();
    }
    plan.count();
    plan.fill();
    plan.finish(&servers)
}

/// The servers that should get no slices.
#[derive(Clone, Copy)]
pub struct Unfit<'a> {
    /// Those without memory for further slices, which get slices only if there is no other server.
    pub full: &'a BTreeSet<u64>,
    /// Those that are being drained.
    pub leaving: &'a BTreeSet<u64>,
}

struct Plan<'a> {
    weights: &'a [u64],
    replicas: usize,
    /// The zone of each live server; `None`: a zone of its own.
    zones: Vec<Option<&'a str>>,
    /// Whether each live server has no memory for further slices.
    full: Vec<bool>,
    /// Whether each live server is being drained: it gets no slices, and those that it has do not
    /// count.
    leaving: Vec<bool>,
    /// What is left on each live server, and what each slice needs; `None` if that does not matter.
    within: Option<(Vec<Capacity>, &'a [Required])>,
    /// Positions in the list of live servers, primary first, of each slice.
    owners: Vec<Vec<u32>>,
    loads: Vec<u64>,
    /// INVARIANT: (load, server) of every server; the first is the least loaded.
    order: BTreeSet<(u64, u32)>,
}

impl<'a> Plan<'a> {
    fn new(servers: &[Server], zones: &'a Zones, weights: &'a [u64], replicas: usize) -> Self {
        let zone = |server: &Server| zones.get(&server.id).map(String::as_str);
        Self {
            weights,
            replicas,
            zones: servers.iter().map(zone).collect(),
            full: vec![false; servers.len()],
            leaving: vec![false; servers.len()],
            within: None,
            owners: vec![Vec::with_capacity(replicas); weights.len()],
            loads: vec![0; servers.len()],
            order: (0..servers.len() as u32).map(|server| (0, server)).collect(),
        }
    }

    /// Returns whether one of `owners` is in the zone of `server`.
    fn shares_zone(&self, owners: &[u32], server: u32) -> bool {
        let zone = self.zones[server as usize];
        zone.is_some() && owners.iter().any(|&owner| self.zones[owner as usize] == zone)
    }

    fn add(&mut self, server: u32, bytes: u64) {
        let load = &mut self.loads[server as usize];
        self.order.remove(&(*load, server));
        *load += bytes;
        self.order.insert((*load, server));
    }

    fn take(&mut self, server: u32, bytes: u64) {
        let load = &mut self.loads[server as usize];
        self.order.remove(&(*load, server));
        *load -= bytes;
        self.order.insert((*load, server));
    }

    /// Keeps slices on their servers.
    fn keep(&mut self, servers: &[Server], previous: &Placement) {
        let position: HashMap<u64, u32> = servers
            .iter()
            .enumerate()
            .map(|(position, server)| (server.id, position as u32))
            .collect();
        let survivors: Vec<Option<u32>> =
            previous.servers().iter().map(|server| position.get(&server.id).copied()).collect();
        for slice in 0..self.weights.len() {
            let kept = previous.owners(slice).iter().filter_map(|&owner| survivors[owner as usize]);
            self.owners[slice] = kept.take(self.replicas).collect();
        }
        self.count();
    }

    /// Adds up the loads of slices that have servers.
    fn count(&mut self) {
        for (slice, owners) in self.owners.iter().enumerate() {
            for &owner in owners {
                self.loads[owner as usize] += self.weights[slice];
            }
        }
        self.order = self.loads.iter().enumerate().map(|(s, &load)| (load, s as u32)).collect();
    }

    /// The least loaded server that does not hold the slice: one with memory, and of another zone,
    /// if there is one.
    fn free(&self, slice: usize) -> Option<u32> {
        let owners = &self.owners[slice];
        let has_room = |&server: &u32| {
            let within = self.within.as_ref();
            within.is_none_or(|(rooms, needs)| needs[slice].fits(rooms[server as usize]))
        };
        let free = || {
            let servers = self.order.iter().map(|&(_, server)| server);
            let stays = |server: &u32| !self.leaving[*server as usize];
            servers.filter(|server| !owners.contains(server)).filter(stays).filter(has_room)
        };
        let with_memory = || free().filter(|&server| !self.full[server as usize]);
        let elsewhere = with_memory().find(|&server| !self.shares_zone(owners, server));
        elsewhere.or_else(|| with_memory().next()).or_else(|| free().next())
    }

    /// The number of servers of a slice that are not being drained.
    fn staying(&self, slice: usize) -> usize {
        self.owners[slice].iter().filter(|&&owner| !self.leaving[owner as usize]).count()
    }

    /// Finds servers for slices that have too few, largest first.
    fn fill(&mut self) {
        let mut lacking: Vec<usize> =
            (0..self.weights.len()).filter(|&slice| self.staying(slice) < self.replicas).collect();
        lacking.sort_by_key(|&slice| (std::cmp::Reverse(self.weights[slice]), slice));
        for slice in lacking {
            while self.staying(slice) < self.replicas {
                let Some(server) = self.free(slice) else { break };
                self.owners[slice].push(server);
                self.add(server, self.weights[slice]);
                if let Some((rooms, needs)) = &mut self.within {
                    let room = &mut rooms[server as usize];
                    *room = room.without(needs[slice]);
                }
            }
        }
    }

    /// Moves slices from the fullest to the emptiest server until they differ by at most the
    /// largest slice, or until another move would put two servers of a slice into one zone.
    fn balance(&mut self) {
        let largest = self.weights.iter().copied().max().unwrap_or(0);
        let mut held: Option<Vec<Vec<usize>>> = None;
        loop {
            let (&(least, to), &(most, from)) = match (self.order.first(), self.order.last()) {
                (Some(first), Some(last)) => (first, last),
                _ => return,
            };
            if most - least <= largest {
                return;
            }
            let held = held.get_or_insert_with(|| self.held());
            // The fullest server holds more than the emptiest, so it has a slice that the other
            // server does not hold. (It may be in the zone of another server of the slice.)
            let list = &mut held[from as usize];
            let may_move = |&slice: &usize| {
                let owners = &self.owners[slice];
                let others: Vec<u32> = owners.iter().copied().filter(|&one| one != from).collect();
                !owners.contains(&to)
                    && (!self.shares_zone(&others, to) || self.shares_zone(&others, from))
            };
            let Some(index) = list.iter().rposition(may_move) else { return };
            let slice = list.remove(index);
            let place = self.owners[slice].iter_mut().find(|owner| **owner == from);
            *place.expect("`held` lists what the server owns") = to;
            // The list is ascending by weight, as in `held`.
            let list = &mut held[to as usize];
            let key = |&other: &usize| (self.weights[other], other) < (self.weights[slice], slice);
            list.insert(list.partition_point(key), slice);
            self.take(from, self.weights[slice]);
            self.add(to, self.weights[slice]);
        }
    }

    /// The slices of each server, smallest first.
    fn held(&self) -> Vec<Vec<usize>> {
        let mut held = vec![Vec::new(); self.loads.len()];
        let mut slices: Vec<usize> = (0..self.weights.len()).collect();
        slices.sort_by_key(|&slice| (self.weights[slice], slice));
        for slice in slices {
            for &owner in &self.owners[slice] {
                held[owner as usize].push(slice);
            }
        }
        held
    }

    /// Creates the placement, which lists only servers that hold slices.
    fn finish(self, servers: &[Server]) -> Result<Placement> {
        let mut used = vec![false; servers.len()];
        self.owners.iter().flatten().for_each(|&owner| used[owner as usize] = true);
        let mut next = 0;
        let position: Vec<u32> = used
            .iter()
            .map(|&used| {
                let position = next;
                next += u32::from(used);
                position
            })
            .collect();
        let listed =
            servers.iter().zip(&used).filter(|(_, used)| **used).map(|(server, _)| server.clone());
        let list = |owners: &Vec<u32>| owners.iter().map(|&at| position[at as usize]).collect();
        let lists: Vec<Vec<u32>> = self.owners.iter().map(list).collect();
        Placement::of_lists(listed.collect(), &lists)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{place as place_in, *};

    /// Places without zones.
    fn place(
        previous: Option<&Placement>,
        live: &[Server],
        weights: &[u64],
        replicas: usize,
    ) -> Result<Placement> {
        place_in(previous, live, &Zones::new(), weights, replicas)
    }

    /// The zone of each server of a slice, in a cluster whose zones are the ids modulo `zones`.
    fn zones_of(placement: &Placement, slice: usize, zones: u64) -> Vec<u64> {
        ids(placement, slice).into_iter().map(|id| id % zones).collect()
    }

    #[test]
    fn a_lost_server_is_replaced_by_one_of_another_zone_if_there_is_one() {
        let zones: Zones = (0..4).map(|id| (id, format!("zone {}", id % 2))).collect();
        let weights = [10, 20, 30];
        let kept = vec![servers([0]), servers([1]), servers([0])];
        let none = BTreeSet::new();
        let unfit = Unfit { full: &none, leaving: &none };
        let placed = replace_lost(&kept, &servers(0..4), &zones, unfit, &weights, 2).unwrap();
        for slice in 0..3 {
            assert_eq!(zones_of(&placed, slice, 2).iter().sum::<u64>(), 1, "{placed:?}");
        }
        let placed =
            replace_lost(&kept[..1], &servers([0, 2]), &zones, unfit, &weights[..1], 2).unwrap();
        assert_eq!(ids(&placed, 0), [0, 2], "better than none");
    }

    #[test]
    fn a_server_that_is_drained_keeps_its_slices_beside_their_new_servers_and_gets_none() {
        let kept = vec![servers([0, 1]), servers([1, 2]), servers([2, 0])];
        let (none, leaving) = (BTreeSet::new(), BTreeSet::from([0]));
        let unfit = Unfit { full: &none, leaving: &leaving };
        let placed =
            replace_lost(&kept, &servers([1, 2]), &Zones::new(), unfit, &[1, 1, 1], 2).unwrap();
        let lists: Vec<_> = (0..3).map(|slice| ids(&placed, slice)).collect();
        assert_eq!(lists, [vec![0, 1, 2], vec![1, 2], vec![2, 0, 1]]);
        let (servers, owners) = (placed.servers().to_vec(), placed.all_owners().to_vec());
        assert_eq!(Placement::new(servers, placed.replicas(), owners).unwrap(), placed);
    }

    fn servers(ids: impl IntoIterator<Item = u64>) -> Vec<Server> {
        ids.into_iter()
            .map(|id| Server { id, incarnation: 1, address: format!("s{id}:1") })
            .collect()
    }

    /// The bytes on each of `live`.
    fn loads(placement: &Placement, live: &[Server], weights: &[u64]) -> Vec<u64> {
        let mut loads: HashMap<u64, u64> = live.iter().map(|server| (server.id, 0)).collect();
        for (slice, weight) in weights.iter().enumerate() {
            for &owner in placement.owners(slice) {
                *loads.get_mut(&placement.servers()[owner as usize].id).expect("live") += weight;
            }
        }
        loads.into_values().collect()
    }

    fn spread(placement: &Placement, live: &[Server], weights: &[u64]) -> u64 {
        let loads = loads(placement, live, weights);
        loads.iter().max().unwrap() - loads.iter().min().unwrap()
    }

    fn ids(placement: &Placement, slice: usize) -> Vec<u64> {
        placement
            .owners(slice)
            .iter()
            .map(|&owner| placement.servers()[owner as usize].id)
            .collect()
    }

    fn moved(before: &Placement, after: &Placement) -> Vec<usize> {
        (0..before.slices()).filter(|&slice| ids(before, slice) != ids(after, slice)).collect()
    }

    #[test]
    fn fewer_servers_than_replicas_are_refused() {
        assert!(matches!(place(None, &servers(0..2), &[1], 3), Err(Error::Invalid { .. })));
        assert!(matches!(place(None, &[], &[1], 1), Err(Error::Invalid { .. })));
        let other = place(None, &servers(0..2), &[1], 1).unwrap();
        assert!(matches!(
            place(Some(&other), &servers(0..2), &[1, 2], 1),
            Err(Error::Invalid { .. })
        ));
    }

    #[test]
    fn only_servers_with_slices_are_listed() {
        let placement = place(None, &servers([9, 4, 7]), &[10, 20], 1).unwrap();
        assert_eq!(placement.servers(), servers([4, 7]));
        assert_eq!(place(None, &servers(0..3), &[], 1).unwrap().servers(), []);
    }

    #[test]
    fn a_new_server_receives_only_its_share() {
        let weights = [10; 90];
        let before = place(None, &servers(0..2), &weights, 1).unwrap();
        let after = place(Some(&before), &servers(0..3), &weights, 1).unwrap();
        let moved = moved(&before, &after);
        assert!((29..=30).contains(&moved.len()), "{}", moved.len());
        assert!(moved.iter().all(|&slice| ids(&after, slice) == [2]));
    }

    #[test]
    fn a_hundred_thousand_slices_are_placed_evenly() {
        let weights: Vec<u64> = (0..100_000).map(|i| 1 + (i * 7919) % 16_777_216).collect();
        let before = place(None, &servers(0..100), &weights, 2).unwrap();
        let after = place(Some(&before), &servers(1..101), &weights, 2).unwrap();
        assert!(spread(&after, &servers(1..101), &weights) <= 16_777_216);
    }

    proptest! {
        #[test]
        fn a_placement_is_balanced_deterministic_and_on_distinct_servers(
            weights in prop::collection::vec(0u64..1000, 0..200), count in 1u64..9, replicas in 1usize..4,
        ) {
            let live = servers(0..count);
            let replicas = replicas.min(live.len());
            // `Placement::new` refuses slices whose servers are not distinct.
            let placement = place(None, &live, &weights, replicas).unwrap();
            prop_assert!(spread(&placement, &live, &weights) <= weights.iter().copied().max().unwrap_or(0));
            let reversed: Vec<_> = live.iter().rev().cloned().collect();
            prop_assert_eq!(&place(None, &reversed, &weights, replicas).unwrap(), &placement);
            prop_assert_eq!(&place(Some(&placement), &live, &weights, replicas).unwrap(), &placement);
        }

        #[test]
        fn the_servers_of_a_slice_are_in_as_many_zones_as_possible(
            weights in prop::collection::vec(0u64..1000, 1..100), count in 1u64..9, zones in 1u64..5,
            replicas in 1usize..4,
        ) {
            let live = servers(0..count);
            let replicas = replicas.min(live.len());
            let of: Zones = (0..count).map(|id| (id, format!("zone {}", id % zones))).collect();
            let mut placement = place_in(None, &live, &of, &weights, replicas).unwrap();
            for _ in 0..2 {
                for slice in 0..weights.len() {
                    let mut found = zones_of(&placement, slice, zones);
                    found.sort_unstable();
                    found.dedup();
                    prop_assert_eq!(found.len(), replicas.min(zones.min(count) as usize));
                }
                let next = place_in(Some(&placement), &live, &of, &weights, replicas);
                placement = next.unwrap();
            }
        }

        #[test]
        fn only_the_slices_of_a_lost_server_move(
            weights in prop::collection::vec(1u64..1000, 1..200), count in 2u64..9, lost in 0u64..9,
        ) {
            let lost = lost % count;
            let before = place(None, &servers(0..count), &weights, 1).unwrap();
            let live = servers((0..count).filter(|&id| id != lost));
            let after = place(Some(&before), &live, &weights, 1).unwrap();
            prop_assert!(moved(&before, &after).iter().all(|&slice| ids(&before, slice) == [lost]));
            prop_assert!(spread(&after, &live, &weights) <= weights.iter().copied().max().unwrap_or(0));
        }

        #[test]
        fn the_balance_holds_after_any_history(
            weights in prop::collection::vec(0u64..1000, 1..60),
            replicas in 1usize..3,
            history in prop::collection::vec(prop::collection::btree_set(0u64..8, 3..8), 1..6),
        ) {
            let mut previous: Option<Placement> = None;
            for ids in history {
                let live = servers(ids);
                let next = place(previous.as_ref(), &live, &weights, replicas).unwrap();
                prop_assert!(spread(&next, &live, &weights) <= weights.iter().copied().max().unwrap_or(0));
                previous = Some(next);
            }
        }
    }
}
