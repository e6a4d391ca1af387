//! The last decided step, until every server has stored the decision.

use std::collections::BTreeSet;

use crate::{
    calls::Reply,
    decision::{Decision, Report},
    events::Action,
    ids::{ServerId, Waiter},
};

/// The last decided step.
#[derive(Debug)]
pub struct Decided {
    /// For servers that have not received it.
    pub(crate) decision: Decision,
    pub(crate) report: Report,
    /// Servers that have not stored the decision yet.
    pub(crate) pending: BTreeSet<ServerId>,
    /// Commits that wait for these servers.
    pub(crate) waiters: Vec<Waiter>,
}

impl Decided {
    /// A decision that the servers `pending` have not stored yet.
    pub(crate) fn new(decision: Decision, report: Report, pending: BTreeSet<ServerId>) -> Self {
        Self { decision, report, pending, waiters: Vec::new() }
    }

    /// Returns the report if every server has stored the decision; otherwise the call waits for it.
    pub(crate) fn report_to(&mut self, waiter: Waiter) -> Option<Report> {
        if self.pending.is_empty() {
            return Some(self.report.clone());
        }
        self.waiters.push(waiter);
        None
    }

    /// The decision does not wait for a server that is lost.
    pub(crate) fn without(&mut self, server: ServerId, epoch: u64, out: &mut Vec<Action>) {
        if self.pending.remove(&server) {
            self.answer(epoch, out);
        }
    }

    /// Answers the waiting calls when every server has stored the decision. `epoch` is that of the
    /// next step.
    pub(crate) fn answer(&mut self, epoch: u64, out: &mut Vec<Action>) {
        if self.pending.is_empty() {
            let report =
                |w: Waiter| Action::Answer(w.caller, Ok(Reply::Report(self.report.clone(), epoch)));
            out.extend(self.waiters.drain(..).map(report));
        }
    }
}
