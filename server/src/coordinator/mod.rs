//! The coordinator role. `zeroshard_coordinator` decides; here are the clock and the network.
//!
//! `driver` is the clock; `actions` and `probe` carry out the actions. `leadership` limits the time
//! for which the coordinator decides. `service`, `requests`, `responses` and `control` implement
//! the protocol, and only they know its messages. `storage` reads and writes checkpoints.

mod actions;
mod beats;
pub(crate) mod control;
mod driver;
mod incumbent;
pub mod leadership;
mod probe;
mod requests;
pub(crate) mod responses;
mod service;
mod storage;
mod traces;
mod urls;

use std::{net::SocketAddr, sync::Arc};

use tokio_util::task::AbortOnDropHandle;
use tonic::service::Routes;
use zeroshard_coordinator::{
    cluster::{Cluster, context::JobLimits, startup::RECOVERY},
    operators::overview::{Overview, View},
};
use zeroshard_proto::pb::coordinator_service_server::CoordinatorServiceServer;

use crate::{serve::Context, shutdown::Shutdown};
use driver::{Driver, Host};
use leadership::Leadership;
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
