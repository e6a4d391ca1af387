//! Membership, placement and the decision about each step.
//!
//! [`cluster::Cluster`] takes events and returns actions: it is a pure function of state, event and
//! time, without networking, tasks or a clock. Imports go downwards only:
//!
//! - `cluster` knows servers and names, and passes an event to the jobs that it is about (`index`).
//!   `overview` and `advice` read all of it for operators.
//! - `job` handles the events of one job, in a file for each subject: `opening` and `endings`;
//!   `leases`, `epochs` and `resting` of ranks; `commit`, `reduce`, `attempts` and `decisions` of a
//!   step; `disconnects`, `replicas`, `copies`, `drains` and `links` of servers; `save` and
//!   `restore`; `recovery`, `rebuild` and `resync` after the loss of a coordinator.
//! - The parts of a job's state: `members`, `round`, `decided`, `replicas`, `saves`, `interrupted`,
//!   `recovery` and so on. What jobs share: `context`, with `servers`, `learning` and `numbers`.
//! - The vocabulary: `calls`, `commands`, `events`, `ids`, `decision`, `gradient`, `held`.
//!
//! The coordinator stores nothing on disk: the durable state is on the servers.

#![allow(missing_docs, reason = "only the server and the simulation use this crate")]

pub mod acknowledgements;
pub mod admission;
pub mod advice;
pub mod calls;
pub mod cluster;
pub mod commands;
pub mod context;
pub mod decided;
pub mod decision;
pub mod disconnects;
pub mod events;
pub mod figures;
pub mod gradient;
pub mod held;
pub mod history;
pub mod ids;
pub mod index;
pub mod interrupted;
pub mod job;
pub mod learning;
pub mod links;
pub mod members;
pub mod memberships;
pub mod numbers;
pub mod overview;
pub mod placement;
pub mod plan;
pub mod progress;
pub mod recovery;
pub mod replicas;
pub mod reports;
pub mod resting;
pub mod rooms;
pub mod round;
pub mod saves;
pub mod scrub;
pub mod servers;
pub mod step_options;
pub mod succession;
pub mod user_data;

#[cfg(test)]
mod tests;
