//! Membership, placement and the decision about each step.
//!
//! `cluster` takes events and returns actions, with one file for each subject. It is a pure
//! function of state, event and time (`state`, `events`). Jobs: `jobs`, `admission`, `placement`,
//! `disposal`.
//! Checkpoints: `save`, `restore`, `storage`. Servers: `servers`, `absence`, `departures`,
//! `replicas`, `recovery`, `rebuild`, `catch_up`. Workers: `leases`, `members`, `resting`, `feed`.
//! Steps: `commit`, `confirm`, `terms`, `reduce`, `attempts`, `decisions`. Metrics and the status
//! page: `figures`, `overview`, `history`. Operators: `operators`, `progress`.
//!
//! `driver` is the clock; `actions` and `probe` carry out the actions. `leadership` limits the time
//! for which the coordinator decides. `service`, `requests`,
//! `responses` and `control` implement the protocol, and only they know its messages.
//!
//! The coordinator stores nothing on disk: the durable state is on the servers.

mod absence;
mod actions;
mod admission;
pub(crate) mod advice;
mod attempts;
mod beats;
mod catch_up;
pub(crate) mod cluster;
mod commit;
mod compare;
mod confirm;
pub(crate) mod control;
mod creators;
pub(crate) mod decisions;
mod departures;
mod disposal;
mod drains;
mod driver;
pub(crate) mod events;
pub(crate) mod feed;
mod figures;
pub(crate) mod held;
pub(crate) mod history;
mod incumbent;
pub(crate) mod jobs;
pub mod leadership;
mod leases;
mod links;
mod members;
pub(crate) mod missing;
mod operators;
pub(crate) mod overview;
pub mod placement;
mod probe;
mod progress;
mod rebuild;
pub(crate) mod recovery;
mod reduce;
mod replicas;
mod requests;
mod responses;
mod resting;
mod restore;
pub(crate) mod save;
mod servers;
mod service;
pub(crate) mod state;
mod storage;
mod succession;
mod terms;
mod traces;
mod urls;
pub(crate) mod user_data;

use std::{net::SocketAddr, sync::Arc};

use tokio_util::task::AbortOnDropHandle;
use tonic::service::Routes;
use zeroshard_proto::pb::coordinator_service_server::CoordinatorServiceServer;

use crate::{config::JobLimits, serve::Context, shutdown::Shutdown};
use cluster::Cluster;
use driver::{Driver, Host};
use leadership::Leadership;
use overview::{Overview, View};
use recovery::RECOVERY;
use requests::Waits;
use service::Service;
use urls::UrlPrefix;

/// Where a coordinator serves.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Its address.
    pub address: SocketAddr,
    /// `true` if no other coordinator has used the address, so that no server has jobs.
    pub is_new: bool,
}

impl Place {
    /// The host and the port.
    pub(crate) fn name(&self) -> String {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (host, port) = (host.trim(), self.address.port());
        if host.is_empty() { self.address.to_string() } else { format!("{host}:{port}") }
    }
}

/// The coordinator role: [`Self::routes`] are its services, and [`Self::run`] runs beside them.
#[derive(Debug)]
pub struct Coordinator {
    context: Context,
    driver: Arc<Driver>,
}

impl Coordinator {
    /// A coordinator without servers and jobs.
    pub fn new(context: Context, leadership: Leadership, place: Place, jobs: JobLimits) -> Self {
        let cluster = if place.is_new { Cluster::default() } else { Cluster::starting() };
        let cluster = cluster.with_limits(jobs);
        let (metrics, failure) = (context.metrics.clone(), context.failure.clone());
        let name = place.name();
        let driver = Driver::new(cluster, Host { metrics, failure, name }, leadership);
        Self { context, driver }
    }

    /// Reads the state of the cluster for the status page; `None` after this coordinator has ended.
    pub(crate) fn overviews(&self) -> impl Fn(&View) -> Option<Overview> + use<> {
        let driver = Arc::downgrade(&self.driver);
        move |view| driver.upgrade()?.overview(view)
    }

    /// The services of the coordinator.
    pub fn routes(&self) -> Routes {
        let common = &self.context.common;
        let (interval, timeout) = common.keepalive();
        let rank = (2 * (interval + timeout)).max(RECOVERY);
        let waits = Waits { default: common.wait(), rank };
        let urls = UrlPrefix(common.checkpoint_urls.clone());
        let service = Service { driver: self.driver.clone(), waits, urls };
        let limit = common.max_message_bytes;
        Routes::new(CoordinatorServiceServer::new(service).max_decoding_message_size(limit))
    }

    /// Enforces deadlines until `shutdown`, then ends every call and stream with a typed error.
    /// When the process is asked to stop, jobs are saved first.
    pub async fn run(&self, shutdown: Shutdown) {
        self.context.health.set_ready(true).await;
        let _beat = AbortOnDropHandle::new(tokio::spawn(beats::run(self.driver.clone())));
        self.driver.run(&shutdown, self.context.common.drain()).await;
        self.context.health.set_ready(false).await;
    }
}

#[cfg(test)]
mod tests;
