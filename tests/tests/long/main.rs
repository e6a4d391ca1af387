//! Tests that take minutes: `tests/run long` runs them, `tests/run` does not.

mod absence;
mod epochs;
