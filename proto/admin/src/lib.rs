//! The admin port of servers and mirrors: HTTP pages, access control, and probes. It uses TLS if
//! the process has a certificate.
//!
//! `/healthz` is answered by any process that is alive, and `/readyz` says whether it is ready.
//! Probes need no credential.

mod access;
mod listener;

use std::io;

use axum::{Router, http::StatusCode, middleware::from_fn_with_state, routing::get};
use tokio::net::TcpListener;
use zeroshard_net::transport::tls::Acceptor;

pub use access::Access;
use access::Guard;
use listener::{AdminListener, Origin};

/// Where the port is, and what protects it.
#[derive(Debug)]
pub struct Port<A> {
    /// The listener.
    pub listener: TcpListener,
    /// Accepts connections with TLS, if the process has a certificate.
    pub acceptor: Acceptor,
    /// Who may see the pages.
    pub access: A,
}

impl<A: Access> Port<A> {
    /// Serves `pages` and the probes until an error. `is_ready` is the answer of `/readyz`.
    ///
    /// # Errors
    /// Those of the listener.
    pub async fn serve(
        self,
        pages: Router,
        is_ready: impl Fn() -> bool + Clone + Send + Sync + 'static,
    ) -> io::Result<()> {
        let Self { listener, acceptor, access } = self;
        let is_local = listener.local_addr()?.ip().is_loopback();
        let listener = AdminListener { listener, acceptor: acceptor.for_admin() };
        let readiness = move || async move {
            match is_ready() {
                true => (StatusCode::OK, "ready\n"),
                false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
            }
        };
        let pages = pages
            .route_layer(from_fn_with_state(Guard { access, is_local }, access::check::<A>))
            .route("/healthz", get(async || "ok\n"))
            .route("/readyz", get(readiness));
        axum::serve(listener, pages.into_make_service_with_connect_info::<Origin>()).await
    }
}
