//! The shard server: holds slices, adds gradients, applies steps, and serves parameters.
//!
//! `data` and `service` implement the protocol, and `store` finds the job. The crate
//! `zeroshard_shard` has the state of jobs, which `job` connects with messages, metrics, traces and
//! deadlines. `control` receives the commands of the coordinator, and `commands` carries them out
//! for a job. Only `fork` and `replicate` know the other servers.

mod background;
mod capture;
mod captured;
mod captures;
pub(crate) mod changes;
pub(crate) mod commands;
pub(crate) mod content;
mod contributions;
pub(crate) mod control;
mod data;
pub(crate) mod events;
mod fork;
pub(crate) mod job;
mod lasting;
mod measure;
pub(crate) mod overview;
mod pin;
mod pins;
mod pull;
mod push;
mod replicate;
mod restore;
mod save;
mod service;
mod stall;
mod state_selector;
mod store;
#[cfg(test)]
mod transfer_tests;
mod window;
mod windows;

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use zeroshard_model::{Error, Result, memory::Capacity};
use zeroshard_net::transport::{Credentials, MAX_CONTROL_MESSAGE};
use zeroshard_proto::pb::shard_service_server::ShardServiceServer;

use crate::{
    config::{self, Size},
    health::Health,
    memory::{self, Budgets},
    serve::Context,
    shutdown::Shutdown,
};
use overview::Overview;
use store::{Limits, Store};
use zeroshard_kernels::{Backend, DeviceName};
use zeroshard_shard::{device::Device, tier::Tiers};

/// The interval at which a lost coordinator is dialled again.
const RECONNECT: Duration = Duration::from_millis(500);

/// The role `shard`, on one or more devices.
pub struct Shard<B: Backend> {
    store: Arc<Store<B>>,
    health: Health,
    credentials: Credentials,
    /// The name that the operator gave this server.
    id: Option<String>,
    /// The zone of this server, if the operator gave it one.
    zone: Option<String>,
    /// The room for the arrays of slices; `None` if there is no limit.
    capacity: Option<Capacity>,
    /// The incarnation of this process.
    incarnation: u64,
}

impl<B: Backend> Shard<B> {
    /// Creates a server without jobs.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Internal`] if the system has no random numbers;
    /// [`zeroshard_model::Error::Storage`] if the scratch file cannot be created.
    pub fn new(backends: Vec<B>, config: &config::Shard, context: Context) -> Result<Self> {
        let Context { common, credentials, metrics, health, failure, .. } = context;
        let budgets = Budgets::new(&config.resources, memory::available());
        let limits = Limits { wait: common.wait(), max_message: common.max_message_bytes, budgets };
        let backends: Vec<_> = backends.into_iter().map(Arc::new).collect();
        let is_on_cpu = backends.iter().all(|backend| backend.device() == DeviceName::Cpu);
        let arrays = Some(budgets.arrays).filter(|&bytes| is_on_cpu && bytes < u64::MAX);
        let tiers = memory::tier_limits(&config.resources, arrays);
        let capacity = tiers.as_ref().map(|limits| limits.capacity(backends.len()));
        tell(&budgets, capacity);
        let tiers = match tiers {
            Some(limits) => Tiers::new(&backends, &limits, metrics.shard.tier_traffic())?,
            None => Vec::new(),
        };
        let tiers = tiers.into_iter().map(Some).chain(std::iter::repeat(None));
        let devices = backends.into_iter().zip(tiers).map(|(on, tiers)| Device::new(on, tiers));
        let store = Arc::new(Store::new(devices.collect(), limits, metrics, failure));
        Ok(Self {
            store,
            health,
            credentials,
            id: config.id.clone(),
            zone: config.zone.clone(),
            capacity,
            incarnation: crate::identity::random()?,
        })
    }

    /// Reads the state of the server for the status page; `None` after it has ended.
    pub(crate) fn overviews(&self) -> impl Fn(&()) -> Option<Overview> + use<B> {
        let store = Arc::downgrade(&self.store);
        move |()| Some(store.upgrade()?.overview())
    }

    /// The gRPC services. Streams end when `shutdown` is cancelled.
    pub fn routes(&self, shutdown: &CancellationToken) -> Routes {
        let service =
            ShardServiceServer::new(service::Service::new(self.store.clone(), shutdown.clone()));
        Routes::new(data::Data::new(self.store.clone(), shutdown.clone()))
            .add_service(service.max_decoding_message_size(MAX_CONTROL_MESSAGE))
    }

    /// Registers with the coordinator, and carries out its commands until `shutdown`. If the
    /// coordinator is lost, the server keeps its jobs, and dials the coordinator again. The next
    /// one learns the jobs from their servers, and continues them. When the process is asked
    /// to stop, the server keeps its jobs until the coordinator has saved them.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::ServerIdTaken`] if another server has the id of this one.
    pub async fn run(&self, coordinator: &str, advertised: &str, shutdown: Shutdown) -> Result<()> {
        // After `shutdown`, the drain time of the server limits all calls.
        tokio::select! {
            never = self.store.readers.run(self.store.limits.wait) => match never {},
            never = self.store.windows.run() => match never {},
            followed = self.follow(coordinator, advertised, shutdown) => followed,
        }
    }

    async fn follow(&self, coordinator: &str, advertised: &str, shutdown: Shutdown) -> Result<()> {
        let leaving = shutdown.leaving();
        let id = self.id.as_deref().unwrap_or(advertised);
        let contact = control::Contact {
            coordinator,
            credentials: &self.credentials,
            advertised,
            name: self.id.as_deref().unwrap_or_default(),
            zone: self.zone.as_deref().unwrap_or_default(),
            capacity: self.capacity,
            server_id: zeroshard_model::name::server_id(id),
            incarnation: self.incarnation,
            term: &AtomicU64::new(0),
        };
        let mut tasks = control::Tasks::default();
        loop {
            let session =
                control::session(&self.store, &self.health, contact, &mut tasks, &shutdown);
            let ended = tokio::select! {
                biased;
                () = shutdown.stop().cancelled() => break,
                ended = session => ended,
            };
            self.disconnected().await;
            if matches!(ended, Error::ServerIdTaken { .. }) {
                return Err(ended);
            }
            if shutdown.is_asked() {
                tracing::info!(%ended, "this server has left its jobs");
                break;
            }
            tracing::warn!(coordinator, error = %ended, "no connection to the coordinator; \
                                                         dialling again");
            tokio::select! {
                () = shutdown.asked() => break,
                () = tokio::time::sleep(RECONNECT) => {}
            }
        }
        drop(leaving);
        // Open calls may still finish.
        shutdown.stop().cancelled().await;
        self.disconnected().await;
        self.store.close_all();
        Ok(())
    }

    async fn disconnected(&self) {
        self.health.set_ready(false).await;
        self.store.metrics.shard.show_connected(false);
    }
}

/// Reports the memory of the server in the log.
fn tell(budgets: &Budgets, capacity: Option<Capacity>) {
    let size = |bytes: u64| match bytes {
        u64::MAX => "no limit".to_owned(),
        bytes => Size(bytes).to_string(),
    };
    tracing::info!(
        memory = size(budgets.memory),
        slices = capacity.map_or("no limit".to_owned(), |room| size(room.bytes)),
        pinned = size(budgets.pinned),
        snapshots = size(budgets.snapshots),
        parked = size(budgets.parked),
        "memory of this server, in bytes"
    );
}
