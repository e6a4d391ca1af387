//! The liveness and readiness of this process, for the gRPC health service and the admin server.

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

/// The health services under the names that Kubernetes' gRPC probes use.
pub(crate) const LIVENESS: &str = "liveness";
pub(crate) const READINESS: &str = "readiness";

/// The readiness of a role, which the role sets and the probes read. Clones share the state.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
    ready: watch::Sender<bool>,
    /// Cancelled when the process is about to stop, and is no longer ready.
    stopping: CancellationToken,
}

impl Health {
    /// Creates the state of a process that is alive and not ready yet.
    pub async fn new() -> Self {
        let reporter = HealthReporter::new();
        reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
        let health =
            Self { reporter, ready: watch::Sender::new(false), stopping: CancellationToken::new() };
        health.set_ready(false).await;
        health
    }

    /// Makes the process unready, because it is about to stop.
    pub(crate) async fn stop(&self) {
        self.stopping.cancel();
        self.set_ready(false).await;
    }

    /// Sets whether the process can answer calls. A process that is about to stop is never ready.
    pub async fn set_ready(&self, ready: bool) {
        let ready = ready && !self.stopping.is_cancelled();
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        // "" stands for the server as a whole.
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

    /// Returns whether calls can be answered now.
    pub fn ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Waits until calls can be answered.
    pub async fn until_ready(&self) {
        // `self` holds the sender, so this does not end early.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    /// The standard gRPC health service.
    pub(crate) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
