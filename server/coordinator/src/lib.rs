//! Membership, placement and the decision about each step.
//!
//! [`cluster::Cluster`] takes events and returns actions: it is a pure function of state, event and
//! time, without networking, tasks or a clock. There is one file for each subject. Jobs: `jobs`,
//! `admission`, `placement`, `disposal`. Checkpoints: `save`, `restore`. Servers: `servers`,
//! `absence`, `departures`, `replicas`, `recovery`, `rebuild`, `catch_up`. Workers: `leases`,
//! `members`, `resting`, `feed`. Steps: `commit`, `confirm`, `terms`, `reduce`, `attempts`,
//! `decisions`. Metrics and the status page: `figures`, `overview`, `history`. Operators:
//! `operators`, `progress`, `advice`.
//!
//! The coordinator stores nothing on disk: the durable state is on the servers.

#![allow(missing_docs, reason = "only the server and the simulation use this crate")]

pub mod absence;
pub mod admission;
pub mod advice;
pub mod attempts;
pub mod catch_up;
pub mod cluster;
pub mod commit;
pub mod compare;
pub mod confirm;
pub mod context;
pub mod creators;
pub mod decisions;
pub mod disposal;
pub mod drains;
pub mod endings;
pub mod epochs;
pub mod events;
pub mod feed;
pub mod figures;
pub mod held;
pub mod history;
pub mod index;
pub mod jobs;
pub mod learning;
pub mod leases;
pub mod links;
pub mod members;
pub mod numbers;
pub mod operators;
pub mod overview;
pub mod placement;
pub mod plan;
pub mod progress;
pub mod rebuild;
pub mod recovery;
pub mod reduce;
pub mod replicas;
pub mod reports;
pub mod resting;
pub mod restore;
pub mod save;
pub mod servers;
pub mod state;
pub mod succession;
pub mod terms;
pub mod user_data;

#[cfg(test)]
mod tests;
