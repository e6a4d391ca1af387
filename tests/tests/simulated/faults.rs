//! What goes wrong in a run, and when.

use std::time::Duration;

use turmoil::Sim;

use crate::cluster::{Size, name};

/// Something that happens to the hosts.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// The process on a host ends.
    Crash(String),
    /// A new process starts there.
    Start(String),
    /// Two hosts lose each other's messages.
    Part(String, String),
    /// They find each other again.
    Meet(String, String),
    /// Messages between two hosts are late.
    Hold(String, String),
    /// These messages arrive.
    Release(String, String),
}

impl Fault {
    pub(crate) fn strike(self, sim: &mut Sim<'_>) {
        match self {
            Self::Crash(host) => sim.crash(host),
            Self::Start(host) => sim.bounce(host),
            Self::Part(one, other) => sim.partition(one, other),
            Self::Meet(one, other) => sim.repair(one, other),
            Self::Hold(one, other) => sim.hold(one, other),
            Self::Release(one, other) => sim.release(one, other),
        }
    }
}

/// The faults of a run, the last one first. A server is lost once at most, and only if it has a
/// backup.
pub(crate) fn plan(size: Size, seed: u64) -> Vec<(Duration, Fault)> {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0xFA);
    let mut plan = Vec::new();
    let mut at = Duration::from_secs(2);
    let mut can_lose = size.replicas > 1;
    for _ in 0..rng.usize(1..5) {
        at += Duration::from_millis(rng.u64(..2_000));
        let until = at + Duration::from_millis(rng.u64(..3_000));
        let coordinator = || "coordinator".to_owned();
        let worker = format!("worker-{}", rng.u32(..size.world));
        let server = name(rng.usize(..size.servers));
        let host = if rng.bool() { server.clone() } else { worker.clone() };
        match rng.u32(..4) {
            0 => {
                plan.push((at, Fault::Crash(coordinator())));
                plan.push((until, Fault::Start(coordinator())));
                at = until;
            }
            1 if can_lose => {
                can_lose = false;
                plan.push((at, Fault::Crash(server.clone())));
                plan.push((until, Fault::Start(server)));
            }
            // Not of a server: the simulated network then refuses connections, as a host without
            // a server does.
            2 => {
                plan.push((at, Fault::Part(worker.clone(), coordinator())));
                plan.push((until, Fault::Meet(worker, coordinator())));
                at = until;
            }
            _ => {
                plan.push((at, Fault::Hold(host.clone(), coordinator())));
                plan.push((until, Fault::Release(host, coordinator())));
                at = until;
            }
        }
    }
    plan.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    plan
}
