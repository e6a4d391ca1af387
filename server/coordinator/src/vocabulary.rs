//! The words in which callers, jobs and shard servers speak to each other: calls, commands, events
//! and what they contain.

pub mod calls;
pub mod commands;
pub mod decision;
pub mod events;
pub mod gradient;
pub mod ids;
pub mod job_report;
pub mod reports;
