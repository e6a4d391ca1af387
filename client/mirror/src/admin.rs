//! The admin port of a mirror: `/metrics`, and probes. A mirror is ready when it has a version.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    http::{HeaderMap, header::CONTENT_TYPE},
    routing::get,
};
use tokio::{net::TcpListener, time::sleep};
use zeroshard_admin::Port;
use zeroshard_client::Cluster;
use zeroshard_model::{Error, Result};
use zeroshard_net::transport::tls::{Acceptor, Security};

use crate::{access::Access, metrics::Metrics, store::Store};

/// The pause between two questions to the coordinator about the version of the job.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// The type of Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4";

impl zeroshard_admin::Access for Access {
    async fn check(&self, headers: &HeaderMap, security: Security) -> Result<()> {
        self.check_caller(headers, security).await
    }
}

/// Serves the port until an error. Whoever may read the job may see the metrics.
///
/// # Errors
/// [`Error::Internal`] for an error of the listener.
pub(crate) async fn serve(
    listener: TcpListener,
    acceptor: Acceptor,
    access: Access,
    (store, metrics): (Arc<Store>, Arc<Metrics>),
) -> Result<()> {
    let certificate = acceptor.clone();
    let ready = store.clone();
    let show = move || {
        let version = store.known(|known| known.state.version());
        // The files of the certificate may have been replaced since the last request.
        let text = metrics.text(version, certificate.expiry());
        async move { ([(CONTENT_TYPE, TEXT)], text) }
    };
    let pages = Router::new().route("/metrics", get(show));
    let is_ready = move || ready.known(|known| known.state.version().is_some());
    let served = Port { listener, acceptor, access }.serve(pages, is_ready).await;
    let cause = served.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
    Err(Error::Internal { cause: format!("the admin port of the mirror failed: {cause}") })
}

/// Compares the mirror's version with the coordinator's again and again.
pub(crate) async fn watch_lag(cluster: &Cluster, job: &str, store: &Store, metrics: &Metrics) {
    loop {
        // The mirror itself reports an error that lasts.
        if let Ok(of) = cluster.describe_job(job).await {
            let version = of.version.unwrap_or_default();
            let own = store.known(|known| {
                let has_line = known.state.has((of.id, of.line));
                known.state.version().filter(|_| has_line).unwrap_or_default()
            });
            metrics.show_lag(version.saturating_sub(own));
        }
        sleep(ASK_EVERY).await;
    }
}
