//! The admin HTTP server: metrics, probes, and a status page that needs no other tool.

use std::{fmt::Write as _, io, net::SocketAddr, sync::Arc, time::Instant};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{Html, IntoResponse},
    routing::get,
};
use prometheus::proto::MetricType;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{health::Health, metrics::Metrics};

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
    let routes = Router::new()
        .route("/metrics", get(metrics))
        // A process that answers is alive.
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/", get(page))
        .with_state(admin);
    tokio::select! {
        result = axum::serve(listener, routes) => result,
        () = shutdown.cancelled() => Ok(()),
    }
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], admin.metrics.text())
}

async fn readyz(State(admin): State<Admin>) -> impl IntoResponse {
    if admin.health.ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

async fn page(State(admin): State<Admin>) -> Html<String> {
    let role = admin.role;
    let ready = if admin.health.ready() { "ready" } else { "not ready" };
    let uptime = admin.started.elapsed().as_secs();
    let mut page = format!(
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5>\
         <title>zeroshard {role}</title>\
         <style>body{{font:14px/1.5 system-ui;margin:2em}}td{{padding:0 1em 0 0}}td:last-child{{text-align:right}}</style>\
         <h1>ZeroShard {role} at {address}</h1>\
         <p>{ready}, version {version}, up for {uptime} s · <a href=/metrics>metrics</a> · \
         <a href=/healthz>healthz</a> · <a href=/readyz>readyz</a></p><table>",
        address = admin.address,
        version = env!("CARGO_PKG_VERSION"),
    );
    for (name, labels, value) in numbers(&admin.metrics) {
        // Writing to a String cannot fail.
        let _ = write!(page, "<tr><td>{name}<td>{}<td>{value}", escape(&labels));
    }
    page.push_str("</table>\n");
    Html(page)
}

/// All counters and gauges: name, labels, value.
fn numbers(metrics: &Metrics) -> Vec<(String, String, f64)> {
    let mut rows = Vec::new();
    for family in metrics.gather() {
        for metric in family.get_metric() {
            let value = match family.get_field_type() {
                MetricType::COUNTER => metric.get_counter().get_value(),
                MetricType::GAUGE => metric.get_gauge().get_value(),
                _ => continue,
            };
            let labels = metric.get_label().iter().map(|l| format!("{}={}", l.name(), l.value()));
            rows.push((family.name().to_owned(), labels.collect::<Vec<_>>().join(" "), value));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn fetch(address: SocketAddr, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
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
        assert!(fetch(address, "/").await.contains("job=&lt;b&gt;"));

        shutdown.cancel();
        server.await.unwrap().unwrap();
    }
}
