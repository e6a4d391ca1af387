//! Runs a process: binds its listeners, announces them, and serves until the shutdown.

mod elected;

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    pin::Pin,
    time::Instant,
};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use zeroshard_coordinator::cluster::context::JobLimits;
use zeroshard_kernels::Backend;
use zeroshard_net::trace;

use crate::{
    admin::{self, Admin, sources::Sources},
    config::{self, Address, Addresses, AdminListen, Common, Config, Listen, Role},
    coordinator::{Coordinator, Place, leadership::Leadership},
    devices::{self, Devices},
    failure::Failure,
    serve::{Context, Error, bind, serve},
    shard::Shard,
    shutdown::Shutdown,
};

/// The parts of a role: its services, and the background work until the shutdown.
pub struct Parts {
    /// The role's own services.
    pub routes: Routes,
    /// The background work, which ends soon after the token is cancelled. Its error ends the
    /// process.
    pub background: Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>,
}

/// A bound listener and its context.
pub(crate) struct Site {
    pub(crate) listener: TcpListener,
    pub(crate) address: SocketAddr,
    /// `true` if the system has chosen the port, which therefore no other process knows.
    pub(crate) has_new_address: bool,
    pub(crate) context: Context,
    /// The state that the status page shows.
    pub(crate) sources: Sources,
}

impl Site {
    pub(crate) async fn bind(
        listen: Listen,
        common: &Common,
        max_connections: usize,
    ) -> Result<Self, Error> {
        let (listener, address) = bind(listen).await?;
        let context = Context::new(common.clone(), max_connections, Failure::default()).await?;
        let (has_new_address, sources) = (listen.0.port() == 0, Sources::default());
        Ok(Self { listener, address, has_new_address, context, sources })
    }

    /// Binds the admin address of the process, if it has one.
    async fn admin(
        &self,
        listen: AdminListen,
        role: &'static str,
    ) -> Result<Option<AdminSite>, Error> {
        AdminSite::bind(listen, role, self.address, &self.context, &self.sources).await
    }

    /// Serves `parts` until `shutdown`. The process becomes unready as soon as it is asked to stop.
    /// After a panic, all calls receive an error until the shutdown.
    pub(crate) async fn run(self, parts: Parts, shutdown: Shutdown) -> Result<(), Error> {
        let Parts { routes, background } = parts;
        let failure = &self.context.failure;
        let serving = serve(self.listener, routes, &self.context, shutdown.clone());
        let unready = async {
            shutdown.asked().await;
            self.context.health.stop().await;
            Ok(())
        };
        // The background work also answers calls that are open when the token is cancelled.
        tokio::try_join!(serving, unready, async {
            tokio::select! {
                // None: it has panicked.
                ended = failure.guard("a background task", background) => ended.unwrap_or(Ok(())),
                () = failure.failed() => Ok(()),
            }
        })?;
        failure.cause().map_or(Ok(()), |cause| Err(Error::Panicked(cause.to_owned())))
    }
}

/// Runs the role of `config` until `asked` is cancelled and its jobs are saved or handed over.
///
/// # Errors
/// [`Error`] if an address cannot be bound or the transport fails.
pub async fn run(config: Config, asked: CancellationToken) -> Result<(), Error> {
    let shutdown = Shutdown::in_order(asked.clone());
    // The first part that ends, with or without an error, stops the others.
    let (_asked, _stop) = (asked.drop_guard_ref(), shutdown.guard());
    let drain = config.common.drain();
    let driven = async {
        shutdown.drive(drain).await;
        Ok(())
    };
    tokio::try_join!(serve_role(config, asked.clone(), shutdown.clone()), driven)?;
    Ok(())
}

async fn serve_role(
    config: Config,
    asked: CancellationToken,
    shutdown: Shutdown,
) -> Result<(), Error> {
    let Config { role, common, json } = config;
    match role {
        Role::Coordinator(config) => {
            if let Some(election) = config.election.clone() {
                return elected::run(config, election, &common, json, asked).await;
            }
            let site = Site::bind(config.listen, &common, config.max_connections).await?;
            let admin = site.admin(config.admin_listen, "coordinator").await?;
            let place = Place { address: site.address, is_new: site.has_new_address };
            start_traces(&common, &place.name())?;
            announce(json, "coordinator", site.address, admin.as_ref());
            let leadership = Leadership::alone()?;
            let parts = coordinator(&site, leadership.clone(), config.jobs.limits(), &shutdown);
            let serving = until_replaced(&leadership, site.run(parts, shutdown));
            with_admin(serving, admin).await?;
        }
        Role::Shard(config) => {
            let site = Site::bind(config.listen, &common, config.max_connections).await?;
            let admin = site.admin(config.admin_listen, "shard").await?;
            let coordinator = config.coordinator.clone().ok_or(Error::NoCoordinator)?;
            start_traces(&common, &advertised(&config, &site).to_string())?;
            let parts = shard(&config, coordinator, &site, &shutdown)?;
            announce(json, "shard", site.address, admin.as_ref());
            with_admin(site.run(parts, shutdown), admin).await?;
        }
        Role::All(config) => {
            let site = Site::bind(config.listen, &common, config.max_connections).await?;
            let mut shard_site =
                Site::bind(config.shard_listen, &common, config.max_connections).await?;
            // One process has one set of metrics, and is ready when its shard server is ready.
            shard_site.context.metrics = site.context.metrics.clone();
            shard_site.context.failure = site.context.failure.clone();
            shard_site.sources = site.sources.clone();
            let admin = shard_site.admin(config.admin_listen, "all").await?;
            let leadership = Leadership::alone()?;
            let parts = coordinator(&site, leadership.clone(), config.jobs.limits(), &shutdown);
            let dial = Address::dialled_from_here(site.address).into();
            start_traces(&common, &advertised(&config.shard(), &shard_site).to_string())?;
            let shard_parts = shard(&config.shard(), dial, &shard_site, &shutdown)?;
            announce(json, "coordinator", site.address, admin.as_ref());
            announce(json, "shard", shard_site.address, admin.as_ref());
            let serving = async {
                tokio::try_join!(
                    site.run(parts, shutdown.clone()),
                    shard_site.run(shard_parts, shutdown)
                )?;
                Ok(())
            };
            with_admin(until_replaced(&leadership, serving), admin).await?;
        }
    }
    Ok(())
}

/// Serves until another coordinator has replaced this one, which has no election.
///
/// # Errors
/// [`Error::Replaced`], and those of `serving`.
async fn until_replaced(
    leadership: &Leadership,
    serving: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    tokio::select! {
        served = serving => served,
        () = leadership.replaced() => Err(Error::Replaced),
    }
}

/// The coordinator's parts.
pub(crate) fn coordinator(
    site: &Site,
    leadership: Leadership,
    jobs: JobLimits,
    shutdown: &Shutdown,
) -> Parts {
    let place = Place { address: site.address, is_new: site.has_new_address };
    let coordinator = Coordinator::new(site.context.clone(), leadership, place, jobs);
    site.sources.cluster.set(coordinator.overviews());
    let (routes, shutdown) = (coordinator.routes(), shutdown.clone());
    let background = async move {
        coordinator.run(shutdown).await;
        Ok(())
    };
    Parts { routes, background: Box::pin(background) }
}

/// The parts of a shard server, which connects to the coordinator at `coordinator` and reports its
/// advertised address.
///
/// # Errors
/// [`Error::Invalid`] if the device cannot be opened, or the system has no random numbers.
pub(crate) fn shard(
    config: &config::Shard,
    coordinator: Addresses,
    site: &Site,
    shutdown: &Shutdown,
) -> Result<Parts, Error> {
    let devices = devices::open(&config.resources.device).map_err(zeroshard_model::Error::from)?;
    match devices {
        Devices::Cpu(cpu) => shard_on(vec![cpu], config, coordinator, site, shutdown),
        Devices::Gpus(gpus) => shard_on(gpus, config, coordinator, site, shutdown),
    }
}

fn shard_on<B: Backend>(
    backends: Vec<B>,
    config: &config::Shard,
    coordinator: Addresses,
    site: &Site,
    shutdown: &Shutdown,
) -> Result<Parts, Error> {
    let advertised = advertised(config, site);
    let shard = Shard::new(backends, config, site.context.clone())?;
    site.sources.shard.set(shard.overviews());
    let (routes, shutdown) = (shard.routes(shutdown.stop()), shutdown.clone());
    let background = async move {
        let ended = shard.run(&coordinator.to_string(), &advertised.to_string(), shutdown).await;
        ended.map_err(Error::from)
    };
    Ok(Parts { routes, background: Box::pin(background) })
}

/// The address at which others reach the shard server of a site.
fn advertised(config: &config::Shard, site: &Site) -> Address {
    match &config.advertise {
        Some(address) => address.or_port(site.address.port()),
        None => Address::from(site.address),
    }
}

/// Starts to export traces, if the configuration names a collector. The spans carry the address.
///
/// # Errors
/// Those of [`trace::start`].
fn start_traces(common: &Common, address: &str) -> Result<(), Error> {
    let Some(collector) = common.collector() else { return Ok(()) };
    trace::start(collector, common.trace_ratio, "zeroshard-server", address)?;
    Ok(())
}

struct AdminSite {
    listener: TcpListener,
    address: SocketAddr,
    admin: Admin,
}

impl AdminSite {
    async fn bind(
        listen: AdminListen,
        role: &'static str,
        serves: SocketAddr,
        context: &Context,
        sources: &Sources,
    ) -> Result<Option<Self>, Error> {
        let AdminListen::On(listen) = listen else { return Ok(None) };
        let (listener, address) = bind(listen).await?;
        let Context { metrics, health, accepted, acceptor, .. } = context.clone();
        metrics.show_role(role);
        let admin = Admin {
            role,
            address: serves,
            started: Instant::now(),
            metrics,
            health,
            sources: sources.clone(),
            accepted,
            acceptor,
        };
        Ok(Some(Self { listener, address, admin }))
    }
}

/// Serves the admin address until `serving` ends, so that probes are answered while open calls
/// finish.
async fn with_admin(
    serving: impl Future<Output = Result<(), Error>>,
    admin: Option<AdminSite>,
) -> Result<(), Error> {
    let end = CancellationToken::new();
    let served = async {
        let _end = end.drop_guard_ref();
        serving.await
    };
    tokio::try_join!(served, serve_admin(admin, end.clone()))?;
    Ok(())
}

async fn serve_admin(site: Option<AdminSite>, shutdown: CancellationToken) -> Result<(), Error> {
    match site {
        Some(site) => admin::serve(site.listener, site.admin, shutdown).await.map_err(Error::Admin),
        None => Ok(()),
    }
}

/// Reports the addresses in the log, and to the program that started this process.
fn announce(json: bool, role: &str, address: SocketAddr, admin: Option<&AdminSite>) {
    let admin = admin.map(|site| site.address);
    tracing::info!(role, %address, admin = admin.map(tracing::field::display), "listening");
    print(json, &json!({"event": "listening", "role": role, "address": address, "admin": admin}));
}

/// Prints an event for the program that started this process.
fn print(json: bool, event: &Value) {
    if json {
        let mut out = io::stdout().lock();
        // If the parent process does not read the output, it does not need the event.
        let _ = writeln!(out, "{event}").and_then(|()| out.flush());
    }
}
