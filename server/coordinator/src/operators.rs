//! What operators see: the state of jobs and servers, advice, and the history of events.

pub mod advice;
pub mod history;
pub mod metrics_view;
pub mod overview;
