//! Middleware, one layer a file.

pub mod request_metrics;
pub mod token;
