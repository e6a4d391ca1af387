//! The admin HTTP server: metrics, probes, and a status page that needs no other tool and no
//! internet access.
//!
//! `zeroshard-admin` accepts connections and answers probes, and `credential` says who may see the
//! pages. `page` renders the status page: `cluster`, `jobs` and `events` draw its sections on a
//! coordinator, and `server` draws those on a shard server. They read the state of the roles from
//! `sources`; `view` is the part that the address selects. `charts` and `table` draw figures and
//! tables, and `html` formats text and numbers.

mod charts;
mod cluster;
mod credential;
mod events;
mod html;
mod jobs;
mod page;
mod server;
pub(crate) mod sources;
mod table;
mod view;

use std::{io, net::SocketAddr, sync::Arc, time::Instant};

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{HeaderName, StatusCode, header},
    response::{Html, IntoResponse},
    routing::get,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use zeroshard_admin::Port;
use zeroshard_net::transport::tls::Acceptor;

use crate::{access::Accepted, health::Health, metrics::Metrics};
use sources::Sources;

const CSS: &str = include_str!("status.css");
const SCRIPT: &str = include_str!("status.js");

/// The headers of the status page. Even if the name of a job were not escaped, they would keep the
/// browser from running scripts in it and from loading anything from another host.
const SECURITY: [(HeaderName, &str); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The data that the admin server shows.
#[derive(Clone, Debug)]
pub struct Admin {
    /// `coordinator`, `shard` or `all`.
    pub role: &'static str,
    /// The address of the gRPC server.
    pub address: SocketAddr,
    /// The start time of the process.
    pub started: Instant,
    /// The metrics of `/metrics`.
    pub metrics: Arc<Metrics>,
    /// The state that the probes report.
    pub health: Health,
    /// The state of the roles.
    pub(crate) sources: Sources,
    /// The credentials that all pages require, except the probes.
    pub(crate) accepted: Accepted,
    /// Accepts connections with TLS, if the server has a certificate.
    pub(crate) acceptor: Acceptor,
}

/// Serves `admin` until `shutdown`. It does not wait for open requests, because they are short.
///
/// # Errors
/// Those of the listener.
pub async fn serve(
    listener: TcpListener,
    admin: Admin,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let (acceptor, access) = (admin.acceptor.clone(), admin.accepted.clone());
    let port = Port { listener, acceptor, access };
    let health = admin.health.clone();
    let pages = Router::new()
        .route("/metrics", get(metrics))
        .route("/", get(status))
        .route("/status.css", get(async || file("text/css; charset=utf-8", CSS)))
        .route("/status.js", get(async || file("text/javascript; charset=utf-8", SCRIPT)))
        .with_state(admin);
    tokio::select! {
        result = port.serve(pages, move || health.ready()) => result,
        () = shutdown.cancelled() => Ok(()),
    }
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    // The files of the certificate may have been replaced since the last scrape.
    admin.metrics.show_expiry(admin.acceptor.expiry());
    ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], admin.metrics.text())
}

fn file(content_type: &'static str, content: &'static str) -> impl IntoResponse {
    (SECURITY, [(header::CONTENT_TYPE, content_type)], content)
}

/// The status page. It is rendered on a thread that may block, because large jobs take
/// milliseconds.
async fn status(
    State(admin): State<Admin>,
    RawQuery(query): RawQuery,
) -> Result<impl IntoResponse, StatusCode> {
    let view = view::parse(&query.unwrap_or_default());
    let page = tokio::task::spawn_blocking(move || page::render(&admin, &view)).await;
    let page = page.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok((SECURITY, Html(page)))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn fetch(address: SocketAddr, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn probes_and_metrics_report_the_current_state() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Health::new().await;
        let metrics = Metrics::new();
        metrics.shard.show_job("<b>", 1, Some(3));
        let admin = Admin {
            role: "shard",
            address,
            started: Instant::now(),
            metrics,
            health: health.clone(),
            sources: Sources::default(),
            accepted: Accepted::everyone(),
            acceptor: Acceptor::new(None).unwrap(),
        };
        let shutdown = CancellationToken::new();
        let server = tokio::spawn(serve(listener, admin, shutdown.clone()));

        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(fetch(address, "/readyz").await.starts_with("HTTP/1.1 503"));
        health.set_ready(true).await;
        assert!(fetch(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(
            fetch(address, "/metrics")
                .await
                .contains("zeroshard_job_version{job=\"<b>\",role=\"shard\"} 3")
        );
        let page = fetch(address, "/").await;
        assert!(page.contains("ZeroShard") && page.contains("default-src 'none'"), "{page}");

        shutdown.cancel();
        server.await.unwrap().unwrap();
    }
}
