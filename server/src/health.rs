//! Whether this process lives and is ready: one truth for the gRPC health service and the admin
//! server.

use tokio::sync::watch;
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

/// Health services as Kubernetes' gRPC probes name them.
const LIVENESS: &str = "liveness";
const READINESS: &str = "readiness";

/// A role says here when it is ready; probes read it. Clones share.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
    ready: watch::Sender<bool>,
}

impl Health {
    /// Alive, and not ready yet.
    pub async fn new() -> Self {
        let reporter = HealthReporter::new();
        reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
        let health = Self { reporter, ready: watch::Sender::new(false) };
        health.set_ready(false).await;
        health
    }

    /// Says whether calls can be answered now.
    pub async fn set_ready(&self, ready: bool) {
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        // "" is the server as a whole.
        for service in [
            "",
            READINESS,
            "zeroshard.v1.CoordinatorService",
            "zeroshard.v1.DataService",
            "zeroshard.v1.ShardService",
        ] {
            self.reporter.set_service_status(service, status).await;
        }
        self.ready.send_replace(ready);
    }

    /// Whether calls can be answered now.
    pub fn ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Returns once calls can be answered.
    pub async fn until_ready(&self) {
        // The sender is in `self`, so this does not end early.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    /// The standard gRPC health service.
    pub(crate) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
