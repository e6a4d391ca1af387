//! Two coordinators of one cluster: the second was started by mistake, or elsewhere while the first
//! could not be reached. Both run, each reaches some of the servers and workers, and this changes,
//! until one of them is given up. In some runs they are elected, and at most one of them leads.

use std::time::{Duration, Instant};

use fastrand::Rng;
use zeroshard_coordinator::{cluster::Cluster, vocabulary::ids::Now};

use super::{
    coordinator::{Coordinator, HungUp},
    faults::Fault,
    worker::Told,
    world::{Connection, Happening, Size, World},
};
use crate::coordinator::leadership::Leadership;

/// How long a job without checkpoints is disturbed. With replicas it fails after 10 s without all
/// servers of a slice.
const OUTAGE: Duration = Duration::from_secs(5);

/// Which of the two coordinators a process reaches.
type Reach = [bool; 2];

/// The network between two coordinators and the rest.
#[derive(Debug)]
pub(super) struct Pair {
    servers: Vec<Reach>,
    ranks: Vec<Reach>,
    seed: u64,
    /// `true` if the coordinators are elected.
    is_elected: bool,
    /// The one that was not given up.
    pub(super) kept: Option<usize>,
    /// When the network must not change any more if the job has no checkpoints.
    until: Option<Now>,
    /// `true` if the other one was stopped. Otherwise it runs, and nobody reaches it.
    is_other_stopped: bool,
}

impl Pair {
    pub(super) fn new(size: Size, seed: u64) -> Self {
        Self {
            servers: vec![[true; 2]; size.servers],
            ranks: vec![[true; 2]; size.world as usize],
            seed,
            is_elected: seed.is_multiple_of(8),
            kept: None,
            until: None,
            is_other_stopped: false,
        }
    }

    /// Returns whether a coordinator was stopped for ever.
    pub(super) fn is_stopped(&self, index: usize) -> bool {
        self.is_other_stopped && self.kept.is_some_and(|kept| kept != index)
    }
}

impl World {
    /// The right to decide of a coordinator that starts.
    pub(super) fn leadership(&self, life: u64) -> Leadership {
        if self.pair.is_elected {
            return Leadership::elected(life, Instant::now() + Duration::from_secs(1 << 20));
        }
        Leadership::alone_with(Rng::with_seed(self.pair.seed ^ life << 40).u64(..))
    }

    /// One of the coordinators.
    pub(super) fn any_coordinator(&mut self) -> usize {
        match self.coordinators.len() {
            1 => 0,
            number => self.rng.usize(..number),
        }
    }

    /// The cluster of the only coordinator.
    pub(super) fn only_cluster(&self) -> Option<&Cluster> {
        let [only] = &self.coordinators[..] else { return None };
        only.cluster.as_ref()
    }

    /// One of the running coordinators that a process reaches.
    fn reached(&mut self, reach: Reach) -> Option<usize> {
        let running = self.coordinators.iter().map(Coordinator::runs).enumerate();
        let reached: Vec<usize> = running
            .filter(|(index, runs)| *runs && reach[*index])
            .map(|(index, _)| index)
            .collect();
        match reached[..] {
            [] => None,
            [one] => Some(one),
            _ => Some(reached[self.rng.usize(..reached.len())]),
        }
    }

    pub(super) fn reached_by_server(&mut self, server: usize) -> Option<usize> {
        self.reached(self.pair.servers[server])
    }

    pub(super) fn reaches_server(&self, index: usize, server: usize) -> bool {
        self.pair.servers[server][index]
    }

    /// The coordinator that a worker calls: the same one while it has a stream.
    pub(super) fn coordinator_of(&mut self, rank: u32) -> Option<usize> {
        let reach = self.pair.ranks[rank as usize];
        let worker = &self.workers[rank as usize];
        let is_reached = |index: &usize| reach[*index] && self.coordinators[*index].runs();
        let same = worker.at.filter(is_reached);
        if same.is_some() || worker.at.is_some() && worker.has_stream {
            return same;
        }
        let other = self.reached(reach);
        self.workers[rank as usize].at = other;
        other
    }

    /// Changes the network, and goes on after a while, `left` times. Then it gives up one of the
    /// coordinators.
    pub(super) fn disturb_pair(&mut self, left: u32) {
        if self.coordinators.len() == 1 {
            self.coordinators.push(Coordinator::default());
            self.start_second();
        }
        if left == 0 {
            return self.give_up_one();
        }
        match self.rng.u32(..8) {
            0 if self.pair.is_elected => self.elect(),
            0 => {
                let down = self.while_of(&[1_000, 100_000, 2_000_000]);
                self.end_coordinator(down);
            }
            _ => self.change_network(),
        }
        let wait = self.while_of(&[2_000, 50_000, 500_000, 3_000_000, 12_000_000]);
        let until = *self.pair.until.get_or_insert(self.now + OUTAGE);
        let wait = match self.size.save_every {
            Some(_) => wait,
            None => wait.min(until.saturating_sub(self.now)),
        };
        self.after(wait, Happening::Fault(Fault::Pair { left: left - 1 }));
    }

    /// A time of a random scale in microseconds.
    fn while_of(&mut self, scales: &[u64]) -> Duration {
        let scale = scales[self.rng.usize(..scales.len())];
        Duration::from_micros(self.rng.u64(..scale))
    }

    fn start_second(&mut self) {
        if self.pair.is_elected { self.elect() } else { self.coordinator_starts(1) }
    }

    /// The lease of the leader ends, and the other one is elected.
    fn elect(&mut self) {
        let leads = usize::from(!self.coordinators[0].runs());
        self.kill_coordinator(leads);
        let wait = self.while_of(&[100, 1_000_000]);
        self.after(wait, Happening::CoordinatorStarts { index: 1 - leads });
    }

    /// A coordinator is elected when the lease of the other one has ended, which decides nothing
    /// any more even if it has not learned of the election.
    pub(super) fn end_other_leadership(&mut self, elected: usize) {
        if self.pair.is_elected && self.coordinators.len() > 1 {
            self.kill_coordinator(1 - elected);
        }
    }

    /// Changes who reaches whom.
    fn change_network(&mut self) {
        let (kind, side) = (self.rng.u32(..7), self.rng.usize(..2));
        let only = |index: usize| [index == 0, index == 1];
        let any = |rng: &mut Rng| match kind {
            0 | 1 => only(side),
            2 | 3 => only(rng.usize(..2)),
            4 => [rng.bool(), rng.bool()],
            _ => [true; 2],
        };
        let [mut servers, mut ranks] = [self.pair.servers.clone(), self.pair.ranks.clone()];
        servers.fill_with(|| any(&mut self.rng));
        ranks.fill_with(|| any(&mut self.rng));
        if kind == 5 {
            servers.fill(only(side));
            ranks.fill(only(1 - side));
        }
        self.connect(servers, ranks);
    }

    /// The network is as given from now on. The ends of a connection that breaks notice it at
    /// different times.
    fn connect(&mut self, servers: Vec<Reach>, ranks: Vec<Reach>) {
        for index in 0..self.coordinators.len() {
            for server in (0..servers.len()).filter(|&server| !servers[server][index]) {
                let notice = [self.notice(), self.notice()];
                self.cut_stream(index, server, notice);
            }
            for rank in (0..ranks.len()).filter(|&rank| !ranks[rank][index]) {
                self.cut_worker(index, rank as u32);
            }
        }
        (self.pair.servers, self.pair.ranks) = (servers, ranks);
    }

    /// When a process notices that a connection has broken.
    fn notice(&mut self) -> Duration {
        self.while_of(&[1_000, 50_000, 1_000_000, 4_000_000])
    }

    fn cut_worker(&mut self, index: usize, rank: u32) {
        let (coordinator, life) = (self.coordinators[index].life, self.workers[rank as usize].life);
        let HungUp { calls, members, events } = self.hang_up(index, rank, life);
        let [ours, theirs] = [self.notice(), self.notice()];
        for event in events {
            let event = Box::new(event);
            self.after(theirs, Happening::Event { life: coordinator, stream: None, event });
        }
        for caller in calls {
            self.after(ours, Happening::Told { rank, life, told: Told::CallBroken(caller) });
        }
        for lease in members {
            let broken = Happening::Told { rank, life, told: Told::StreamBroken };
            self.send_after(ours, Connection::Member(lease), broken);
        }
    }

    /// Gives up one of the coordinators, if there are two.
    pub(super) fn end_pair(&mut self) {
        if self.coordinators.len() > 1 {
            self.give_up_one();
        }
    }

    /// The mistake is found: one of the coordinators is stopped, or nobody reaches it any more.
    fn give_up_one(&mut self) {
        let kept = self.rng.usize(..2);
        self.pair.kept = Some(kept);
        self.pair.is_other_stopped = self.pair.is_elected || self.rng.bool();
        let reach = [kept == 0, kept == 1];
        self.connect(vec![reach; self.servers.len()], vec![reach; self.workers.len()]);
        if self.pair.is_other_stopped {
            self.kill_coordinator(1 - kept);
        }
        self.coordinator_starts(kept);
    }
}
