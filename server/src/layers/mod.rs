//! Middleware, one layer per file.

pub mod audit;
pub mod panic;
pub mod request_limits;
pub mod request_metrics;
pub mod token;

/// Returns whether `path` is that of a probe, which needs no token and is always answered. `Watch`
/// is not one, because its answer never ends.
fn is_probe(path: &str) -> bool {
    path.strip_suffix("/Check").and_then(|service| service.strip_prefix('/'))
        == Some(tonic_health::pb::health_server::SERVICE_NAME)
}
