//! Middleware, one layer a file.

pub mod panic;
pub mod request_metrics;
pub mod token;
