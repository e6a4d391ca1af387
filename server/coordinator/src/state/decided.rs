//! The last decided step, until every server has stored the decision.

use std::collections::BTreeSet;

use crate::vocabulary::{
    calls::Reply,
    decision::{Decision, Report},
    events::Action,
    ids::{Caller, Now, ServerId, Waiter, expire},
};

/// The last decided step.
#[derive(Debug)]
pub struct Decided {
    decision: Decision,
    report: Report,
    /// The servers that have not stored the decision yet.
    pending: BTreeSet<ServerId>,
    /// The commits that wait for these servers.
    waiters: Vec<Waiter>,
}

impl Decided {
    /// Creates the record of a decision. The servers `pending` have not stored it yet, and the
    /// commits `waiters` wait for them.
    pub(crate) fn new(
        decision: Decision,
        report: Report,
        pending: BTreeSet<ServerId>,
        waiters: Vec<Waiter>,
    ) -> Self {
        Self { decision, report, pending, waiters }
    }

    /// Returns the decision, for servers that have not received it.
    pub(crate) fn decision(&self) -> &Decision {
        &self.decision
    }

    pub(crate) fn report(&self) -> &Report {
        &self.report
    }

    /// Returns whether every server has stored the decision.
    pub(crate) fn is_stored(&self) -> bool {
        self.pending.is_empty()
    }

    /// Returns the servers that have not stored it.
    pub(crate) fn pending(&self) -> &BTreeSet<ServerId> {
        &self.pending
    }

    /// Records that a server has stored the decision. Returns `true` if it was the last one.
    pub(crate) fn stored_by(&mut self, server: ServerId) -> bool {
        self.pending.remove(&server) && self.pending.is_empty()
    }

    /// Drops the calls of a caller that has disconnected.
    pub(crate) fn forget_caller(&mut self, caller: Caller) {
        self.waiters.retain(|waiter| waiter.caller != caller);
    }

    /// Removes the commits whose deadline has come.
    pub(crate) fn expire(&mut self, now: Now) -> Vec<Waiter> {
        expire([&mut self.waiters], now)
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.waiters.iter().map(|waiter| waiter.deadline).min()
    }

    /// Returns the commits that wait.
    pub(crate) fn into_waiters(self) -> Vec<Waiter> {
        self.waiters
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
