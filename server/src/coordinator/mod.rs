//! Membership, placement and the decision about each step.
//!
//! `state` says what there is, `cluster` takes events in and gives actions out, with `jobs`,
//! `membership` and `commit` for their parts and `placement` for the choice of servers: pure functions
//! of state, event and time. `driver` is the only clock and does what they say; `service` is the wire.
//!
//! Nothing is kept on disk: what must survive is on the servers.

mod cluster;
mod commit;
mod driver;
mod jobs;
mod membership;
pub mod placement;
mod reduce;
mod service;
mod state;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use zeroshard_proto::pb::coordinator_server::CoordinatorServer;

use crate::serve::Context;
use driver::Driver;
use service::Service;

/// The coordinator role: [`Self::routes`] to serve, [`Self::run`] beside them.
#[derive(Debug)]
pub struct Coordinator {
    context: Context,
    driver: Arc<Driver>,
}

impl Coordinator {
    /// A coordinator of a cluster that has nothing yet.
    pub fn new(context: Context) -> Self {
        let driver = Driver::new(context.metrics.clone());
        Self { context, driver }
    }

    /// Its services.
    pub fn routes(&self) -> Routes {
        let common = &self.context.common;
        let service = Service { driver: self.driver.clone(), default_wait: common.wait() };
        let limit = common.max_message_bytes;
        Routes::new(CoordinatorServer::new(service).max_decoding_message_size(limit))
    }

    /// Keeps deadlines until `shutdown`; then ends every call and stream with a typed error.
    pub async fn run(&self, shutdown: CancellationToken) {
        self.context.health.set_ready(true).await;
        self.driver.run(shutdown).await;
        self.context.health.set_ready(false).await;
    }
}

#[cfg(test)]
mod tests;
