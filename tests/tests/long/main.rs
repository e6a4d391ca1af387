//! Tests that take minutes: `tests/run long` runs them, `tests/run` does not.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod absence;
mod chaos;
mod disturbed;
mod drains;
mod epochs;
mod followers;
mod namesakes;
mod soak;
