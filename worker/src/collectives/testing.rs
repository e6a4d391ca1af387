//! Test helper: ranks that are threads of one process and communicate over loopback.

use std::env;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Listening, Options, Peers, Result};

const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Connects to all ranks, whose addresses are known.
pub(crate) fn connect(listening: Listening, rank: u32, addresses: &[String]) -> Result<Peers> {
    let world = addresses.len() as u32;
    listening.connect(rank, world, 0..world, async |to| Ok(addresses[to as usize].clone()))
}

/// The results of `run` on `world` ranks.
pub(crate) fn together<T: Send>(world: usize, run: impl Fn(&Arc<Peers>) -> T + Sync) -> Vec<T> {
    with_deadline(world, DEADLINE, run)
}

/// If this variable is set, large messages go over NCCL, from a GPU for each rank.
pub(crate) const OVER_NCCL: &str = "ZEROSHARD_TEST_NCCL";

/// The results of `run` on `world` ranks whose messages have the given deadline.
pub(crate) fn with_deadline<T: Send>(
    world: usize,
    deadline: Duration,
    run: impl Fn(&Arc<Peers>) -> T + Sync,
) -> Vec<T> {
    connected(world, deadline, |peers| {
        if env::var_os(OVER_NCCL).is_some() {
            peers.use_nccl(peers.rank() as usize).unwrap();
        }
        run(peers)
    })
}

/// The results of `run` on `world` ranks whose messages all go over gRPC.
pub(crate) fn together_over_grpc<T: Send>(
    world: usize,
    run: impl Fn(&Arc<Peers>) -> T + Sync,
) -> Vec<T> {
    connected(world, DEADLINE, run)
}

fn connected<T: Send>(
    world: usize,
    deadline: Duration,
    run: impl Fn(&Arc<Peers>) -> T + Sync,
) -> Vec<T> {
    let runtime = runtime();
    let bind =
        |_| Listening::bind(runtime.handle(), Options { deadline, ..Options::default() }).unwrap();
    let listening: Vec<_> = (0..world).map(bind).collect();
    let addresses: Vec<String> = listening.iter().map(|one| one.address().to_string()).collect();
    thread::scope(|scope| {
        let (addresses, run) = (&addresses, &run);
        let start = |(one, rank): (Listening, u32)| {
            scope.spawn(move || {
                let peers = Arc::new(connect(one, rank, addresses).unwrap());
                let result = run(&peers);
                peers.leave().unwrap();
                result
            })
        };
        let ranks: Vec<_> = listening.into_iter().zip(0..).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
