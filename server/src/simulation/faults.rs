//! What goes wrong in a run, and when.

use std::time::Duration;

use fastrand::Rng;
use zeroshard_coordinator::vocabulary::ids::Now;

use super::{
    worker::Worker,
    world::{Happening, Size, World},
};

/// The interval at which a fault that has to wait is tried again.
const WAIT: Duration = Duration::from_millis(20);
/// A server that stands still for longer may be lost.
const LONG: Duration = Duration::from_secs(6);

/// Something that goes wrong. A process that ends is started again after `down`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    /// The process of the coordinator ends.
    Coordinator { down: Duration },
    /// The process of a server ends, when it may be lost.
    Server { server: usize, down: Duration },
    /// Both end at the same time.
    Both { server: usize, down: Duration },
    /// A control stream breaks.
    Stream { server: usize },
    /// The process of a worker ends.
    Worker { rank: u32, down: Duration },
    /// A worker pushes wrong gradients from now on, and its process ends before it commits them.
    Doom { rank: u32, down: Duration },
    /// A server stands still; for a long time only if it may be lost.
    Still { server: usize, duration: Duration },
    /// An operator rewinds the job, to the last checkpoint or to an earlier one.
    Rewind { back: usize, skips: bool },
    /// The gradients of a rank are far too large for a later batch.
    Spike { rank: u32 },
    /// There are two coordinators, and the network between them and the rest changes so many times.
    Pair { left: u32 },
}

/// What goes wrong in a run.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults {
    /// Of 1000 requests and answers on the data plane, these are lost.
    lost: u32,
    /// Of 1000 requests on the data plane, these arrive twice.
    repeated: u32,
    /// Of 1000 answers of a mirror, these are wrong.
    lies: u32,
    plan: Vec<(Now, Fault)>,
}

impl Faults {
    /// Faults that follow from a seed.
    pub(super) fn of(size: Size, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0xFA01);
        let lost = [0, 0, 10, 100][rng.usize(..4)];
        let repeated = [0, 50, 300][rng.usize(..3)];
        let mut at = Now::ZERO;
        let plan = (0..rng.usize(..7)).map(|_| {
            let scale = [5_000, 50_000, 500_000][rng.usize(..3)];
            at += Duration::from_micros(rng.u64(..scale));
            (at, Fault::any(size, &mut rng))
        });
        let lies = [0, 50, 300][Rng::with_seed(seed ^ 0x11E5).usize(..3)];
        Self { plan: plan.collect(), lost, repeated, lies }
    }

    /// The same, with two coordinators. Servers are lost only if there are checkpoints: a
    /// coordinator may be wrong about what the others have.
    pub(super) fn of_pair(size: Size, seed: u64) -> Self {
        let mut faults = Self::of(size, seed);
        let can_lose = size.save_every.is_some();
        let can_happen = |fault: &Fault| match fault {
            Fault::Server { .. } | Fault::Both { .. } => can_lose,
            Fault::Still { duration, .. } => can_lose || *duration < LONG / 2,
            _ => true,
        };
        faults.plan.retain(|(_, fault)| can_happen(fault));
        let mut rng = Rng::with_seed(seed ^ 0x2C00);
        let at = Duration::from_micros(rng.u64(..50_000));
        faults.plan.push((at, Fault::Pair { left: rng.u32(2..10) }));
        faults
    }

    /// How often a request arrives.
    pub(super) fn copies(&self, rng: &mut Rng) -> usize {
        if self.loses(rng) {
            return 0;
        }
        1 + usize::from(rng.u32(..1000) < self.repeated)
    }

    /// Returns whether an answer of a mirror is wrong.
    pub(super) fn lies(&self, rng: &mut Rng) -> bool {
        self.lies > 0 && rng.u32(..1000) < self.lies
    }

    /// Returns whether a message is lost.
    pub(super) fn loses(&self, rng: &mut Rng) -> bool {
        rng.u32(..1000) < self.lost
    }
}

impl Fault {
    fn any(size: Size, rng: &mut Rng) -> Self {
        let server = rng.usize(..size.servers);
        let rank = rng.u32(..size.world);
        let scale = [1_000, 100_000, 2_000_000][rng.usize(..3)];
        let down = Duration::from_micros(rng.u64(..scale));
        let can_lose = size.replicas > 1 || size.save_every.is_some();
        let can_rewind = size.save_every.is_some();
        match rng.u32(..9) {
            0 => Self::Coordinator { down },
            1 if can_lose => Self::Server { server, down },
            2 if can_lose => Self::Both { server, down },
            3 => Self::Worker { rank, down },
            4 => Self::Doom { rank, down },
            5 if can_lose => Self::Still { server, duration: down * 12 },
            5 => Self::Still { server, duration: down * 3 },
            6 if can_rewind => Self::Rewind { back: rng.usize(..3), skips: rng.bool() },
            7 if can_rewind => Self::Spike { rank },
            _ => Self::Stream { server },
        }
    }

    /// The server that is lost, or may be.
    fn may_lose(self, world: &World) -> Option<usize> {
        match self {
            Self::Server { server, .. } | Self::Both { server, .. } => Some(server),
            Self::Still { server, duration }
                if duration > LONG || world.stands_still_for(server, Duration::ZERO) =>
            {
                Some(server)
            }
            Self::Stream { server } if world.stands_still_for(server, LONG) => Some(server),
            _ => None,
        }
    }
}

impl World {
    /// The process of a coordinator ends, and is started again.
    pub(super) fn end_coordinator(&mut self, down: Duration) {
        let index = self.any_coordinator();
        self.kill_coordinator(index);
        self.after(down, Happening::CoordinatorStarts { index });
    }

    /// Returns whether a server may be lost: there are checkpoints, or all slices have their
    /// replicas, also without the servers that stand still.
    fn can_lose(&self, server: usize) -> bool {
        if self.size.save_every.is_some() {
            return true;
        }
        // A server that stands still and was replaced has no slices.
        let placed = self.placed();
        let mut others = placed.iter().copied().filter(|&other| other != server);
        let any_stands = others.any(|other| self.stands_still_for(other, LONG));
        self.size.replicas > 1 && self.is_redundant() && !any_stands
    }

    /// Returns whether a server will stand still for longer than `duration`.
    fn stands_still_for(&self, server: usize, duration: Duration) -> bool {
        self.servers[server].still_until > self.now + duration
    }

    pub(super) fn schedule_faults(&mut self) {
        for (at, fault) in self.faults.plan.clone() {
            self.at(at, Happening::Fault(fault));
        }
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        // A job that is still being created fails with its servers.
        // Before the first checkpoint, a job fails with its servers.
        let is_saved = self.size.save_every.is_none() || self.store.latest().is_some();
        self.has_begun |= is_saved && self.workers.iter().all(Worker::trains);
        match fault {
            fault if !self.has_begun => self.after(WAIT, Happening::Fault(fault)),
            // Only readers have not ended yet.
            Fault::Pair { .. } if self.has_trained() => self.end_pair(),
            _ if self.has_trained() => {}
            Fault::Pair { left } => self.disturb_pair(left),
            Fault::Rewind { back, skips } => self.rewind(back, skips),
            Fault::Spike { rank } => self.spike(rank),
            Fault::Coordinator { down } => self.end_coordinator(down),
            fault if fault.may_lose(self).is_some_and(|server| !self.can_lose(server)) => {
                self.after(WAIT, Happening::Fault(fault));
            }
            Fault::Server { server, down } => {
                self.kill_server(server);
                self.after(down, Happening::ServerStarts { server });
            }
            Fault::Both { server, down } => {
                self.end_coordinator(down);
                self.kill_server(server);
                self.after(down / 2, Happening::ServerStarts { server });
            }
            Fault::Stream { server } => self.break_stream(server),
            Fault::Still { server, duration } => {
                let until = &mut self.servers[server].still_until;
                *until = (*until).max(self.now + duration);
            }
            Fault::Worker { rank, down } => {
                if self.workers[rank as usize].step < self.size.steps {
                    self.kill_worker(rank);
                    self.after(down, Happening::WorkerStarts { rank });
                } else {
                    // It has made its last step, and makes it again after a return to a
                    // checkpoint.
                    self.workers[rank as usize].spare();
                }
            }
            Fault::Doom { rank, down } => {
                if self.workers[rank as usize].step < self.size.steps {
                    self.workers[rank as usize].doom();
                    self.after(down / 20, Happening::Fault(Fault::Worker { rank, down }));
                }
            }
        }
    }
}
