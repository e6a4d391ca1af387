//! Membership, placement and the decision about each step.
//!
//! [`cluster::Cluster`] takes events and returns actions: it is a pure function of state, event and
//! time, without networking, tasks or a clock. Imports go downwards only:
//!
//! - [`operators`] reads everything else: the state of jobs and servers, and advice.
//! - [`cluster`] knows servers and names, and passes an event to the jobs that it is about. In its
//!   folder, `jobs` visits them, `connections` and `drains` handle changes of servers, and other
//!   files have what jobs share: the servers, the index of jobs, numbers of saves and epochs.
//! - [`job`] handles the events of one job, in a file for each subject: `opening` and `endings`;
//!   `leases`, `epochs` and `uneven_inputs` of ranks; `commit`, `reduce`, `attempts` and
//!   `step_decision` of a step; `server_disconnects`, `replicas`, `copies`, `drains` and
//!   `broken_links` of servers; `save` and `restore`; `recovery`, `rebuild` and `resync` after the
//!   loss of a coordinator.
//! - [`state`] has the parts of a job's state. Their fields are private, and none knows the job.
//! - [`placement`] chooses the servers of slices.
//! - [`vocabulary`] has calls, commands, events and what they contain.
//!
//! The coordinator stores nothing on disk: the durable state is on the servers.

#![allow(missing_docs, reason = "only the server and the simulation use this crate")]

pub mod cluster;
pub mod job;
pub mod operators;
pub mod placement;
pub mod state;
pub mod vocabulary;

#[cfg(test)]
mod tests;
