//! The hosts of a simulated cluster.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context as TaskContext, Poll},
    time::{Duration, Instant},
};

use futures_util::stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;
use tonic::{
    service::Routes,
    transport::{Server, server::Connected},
};
use turmoil::{
    Builder, Sim,
    net::{TcpListener, TcpStream},
};
use zeroshard_coordinator::cluster::context::JobLimits;
use zeroshard_kernels::Cpu;
use zeroshard_model::{
    DType,
    limits::{MAX_CONNECTIONS, MAX_JOBS},
};
use zeroshard_net::transport::network::{self, Connecting, Stream};
use zeroshard_server::{
    config::{self, Common},
    coordinator::{Coordinator, Place, leadership::Leadership},
    failure::Failure,
    layers::token::accept_everyone,
    serve::Context,
    shard::Shard,
    shutdown::Shutdown,
};

use crate::{LIMIT, faults, reader, worker};

/// The port of all servers.
const PORT: u16 = 7400;
/// The address of the coordinator.
pub(crate) const COORDINATOR: &str = "coordinator:7400";

/// The size of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) servers: usize,
    pub(crate) replicas: u32,
    pub(crate) world: u32,
}

/// What has happened, with the virtual time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(crate) fn add(&self, at: Duration, event: &str) {
        self.0.lock().unwrap().push(format!("{at:>14.6?} {event}\n"));
    }

    pub(crate) fn text(&self) -> String {
        self.0.lock().unwrap().concat()
    }
}

/// What the workers and the reader have seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// The reports, by step and rank.
    pub(crate) reports: BTreeMap<(u64, u32), String>,
    /// The hash of the final state.
    pub(crate) hash: Option<String>,
    /// The hash of the values of each version that the reader has applied.
    pub(crate) versions: BTreeMap<u64, u64>,
    /// The number of those that came as changes.
    pub(crate) changed: u64,
}

/// A cluster, and the faults that it will have.
pub(crate) struct World {
    sim: Sim<'static>,
    size: Size,
    seed: u64,
    disturbed: bool,
    log: Log,
    seen: Arc<Mutex<Seen>>,
}

/// An accepted connection.
struct Accepted(TcpStream);

impl Connected for Accepted {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

fn connect(address: String) -> Connecting {
    Box::pin(async move {
        let stream = TcpStream::connect(address).await?;
        Ok(Box::new(stream) as Box<dyn Stream>)
    })
}

async fn context() -> Context {
    Context::new(Common::default(), MAX_CONNECTIONS, Failure::inline()).await.unwrap()
}

/// Serves calls as `serve` does, without the layers that need a real connection.
async fn serve(routes: Routes, common: &Common) -> Result<(), tonic::transport::Error> {
    let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), PORT)).await;
    let incoming = stream::unfold(listener.unwrap(), |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Accepted(stream));
        Some((accepted, listener))
    });
    let (interval, timeout) = common.keepalive();
    Server::builder()
        .max_frame_size(common.frame_bytes)
        .http2_keepalive_interval(Some(interval))
        .http2_keepalive_timeout(Some(timeout))
        .add_routes(accept_everyone(routes))
        .serve_with_incoming(incoming)
        .await
}

async fn coordinator(term: u64) -> turmoil::Result {
    let context = context().await;
    let leadership = Leadership::elected(term, Instant::now() + Duration::from_secs(3600));
    let common = context.common.clone();
    let jobs = JobLimits { timeout: None, number: MAX_JOBS };
    let place = Place { address: ([0, 0, 0, 0], 7400).into(), is_new: false };
    let coordinator = Coordinator::new(context, leadership, place, jobs);
    let routes = coordinator.routes();
    tokio::select! {
        served = serve(routes, &common) => served?,
        () = coordinator.run(Shutdown::at_once(CancellationToken::new())) => {}
    }
    Ok(())
}

async fn shard(index: usize) -> turmoil::Result {
    let context = context().await;
    let common = context.common.clone();
    let shard = Shard::new(vec![Cpu::new()], &config::Shard::default(), context)?;
    let shutdown = CancellationToken::new();
    let routes = shard.routes(&shutdown);
    let advertised = format!("{}:{PORT}", name(index));
    tokio::select! {
        served = serve(routes, &common) => served?,
        ended = shard.run(COORDINATOR, &advertised, Shutdown::at_once(shutdown)) => ended?,
    }
    Ok(())
}

/// The host of a shard server.
pub(crate) fn name(index: usize) -> String {
    format!("shard-{index}")
}

impl World {
    pub(crate) fn new(size: Size, seed: u64, disturbed: bool) -> Self {
        network::simulate(connect);
        fastrand::seed(seed);
        let mut sim = Builder::new()
            .simulation_duration(LIMIT)
            .tick_duration(Duration::from_millis(1))
            .min_message_latency(Duration::from_micros(100))
            .max_message_latency(Duration::from_millis(if disturbed { 20 } else { 1 }))
            .tcp_capacity(4096)
            .rng_seed(seed)
            .build();
        let terms = Arc::new(AtomicU64::new(1));
        sim.host("coordinator", move || coordinator(terms.fetch_add(1, Relaxed)));
        for index in 0..size.servers {
            sim.host(name(index), move || shard(index));
        }
        let log = Log::default();
        let seen = Arc::<Mutex<Seen>>::default();
        for rank in 0..size.world {
            let (log, seen) = (log.clone(), seen.clone());
            sim.client(format!("worker-{rank}"), async move {
                worker::train(size, rank, &log, &seen).await?;
                Ok(())
            });
        }
        // A reader makes a run a quarter longer.
        if seed.is_multiple_of(2) {
            let (log, seen) = (log.clone(), seen.clone());
            sim.client("reader", async move {
                reader::follow(DType::ALL[seed as usize % 3], &log, &seen).await?;
                Ok(())
            });
        }
        Self { sim, size, seed, disturbed, log, seen }
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> (Seen, Log) {
        let mut faults = match self.disturbed {
            true => faults::plan(self.size, self.seed),
            false => Vec::new(),
        };
        loop {
            let now = self.sim.elapsed();
            while let Some((_, fault)) = faults.pop_if(|(at, _)| *at <= now) {
                self.log.add(now, &format!("{fault:?}"));
                fault.strike(&mut self.sim);
            }
            match self.sim.step() {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    let text = self.log.text();
                    panic!("{text}{error}\nSIMULATION_SEED={}", self.seed);
                }
            }
        }
        let seen = self.seen.lock().unwrap().clone();
        (seen, self.log)
    }
}
