//! The functions of the driver, with the names, arguments and results that CUDA documents.
//!
//! SAFETY of all of them: pointers are as CUDA demands, to memory for the results, or null.

pub(crate) mod contexts;
pub(crate) mod memory;
pub(crate) mod modules;
pub(crate) mod streams;

#[cfg(test)]
mod tests;
