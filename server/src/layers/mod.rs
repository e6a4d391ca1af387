//! Middleware, one layer per file.

pub mod panic;
pub mod request_limits;
pub mod request_metrics;
pub mod token;
