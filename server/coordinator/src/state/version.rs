//! The version of a job's parameters: how the job has got it, and what it is called afterwards.

use std::collections::BTreeSet;

use crate::{
    state::decided::Decided,
    vocabulary::ids::{Now, ServerId, Waiter},
};

/// The version of the parameters that the servers of a job have.
#[derive(Debug, Default)]
pub struct Version {
    /// `None` until every server has its initial parameters.
    current: Option<u64>,
    /// The servers that do not have all of their initial parameters. INVARIANT: not empty while
    /// `current` is `None`, except between two events.
    uninitialised: BTreeSet<ServerId>,
    /// The decision that produced `current`.
    last: Option<Box<Decided>>,
    /// The first epoch and the version after the last restoration, if ranks were waiting.
    rolled_back: Option<(u64, u64)>,
}

impl Version {
    /// The version of a new job: its servers receive their initial parameters.
    pub(crate) fn awaited(servers: BTreeSet<ServerId>) -> Self {
        let current = servers.is_empty().then_some(0);
        Self { current, uninitialised: servers, ..Self::default() }
    }

    /// The version that the servers of a job describe.
    pub(crate) fn learned(
        current: Option<u64>,
        uninitialised: BTreeSet<ServerId>,
        last: Option<Decided>,
        rolled_back: Option<(u64, u64)>,
    ) -> Self {
        Self { current, uninitialised, last: last.map(Box::new), rolled_back }
    }

    /// The version, once every server has had its initial parameters.
    pub fn current(&self) -> Option<u64> {
        self.current
    }

    /// Returns whether there is a version.
    pub(crate) fn is_published(&self) -> bool {
        self.current.is_some()
    }

    /// The servers that do not have all of their initial parameters.
    pub fn uninitialised(&self) -> &BTreeSet<ServerId> {
        &self.uninitialised
    }

    /// A server has all of its initial parameters, or is lost. Returns `false` if it had them.
    pub(crate) fn initialised(&mut self, server: ServerId) -> bool {
        self.uninitialised.remove(&server)
    }

    /// The ranks upload the initial parameters again, unless there is a version.
    pub(crate) fn upload_again(&mut self, servers: BTreeSet<ServerId>) {
        if self.current.is_none() {
            self.uninitialised = servers;
        }
    }

    /// Publishes version 0 if every server has its initial parameters. Returns `false` if one lacks
    /// some, or if there is a version.
    pub(crate) fn publish(&mut self) -> bool {
        let is_complete = self.current.is_none() && self.uninitialised.is_empty();
        if is_complete {
            self.current = Some(0);
        }
        is_complete
    }

    /// A step was decided.
    pub(crate) fn decided(&mut self, decided: Box<Decided>) {
        self.current = Some(decided.report().version);
        self.last = Some(decided);
    }

    /// The last decision.
    pub(crate) fn last(&self) -> Option<&Decided> {
        self.last.as_deref()
    }

    /// The last decision, for what servers and ranks do about it.
    pub(crate) fn last_mut(&mut self) -> Option<&mut Decided> {
        self.last.as_deref_mut()
    }

    /// The servers have read a checkpoint of this version.
    pub(crate) fn restored(&mut self, version: u64) {
        self.current = Some(version);
        self.uninitialised.clear();
    }

    /// The ranks that wait continue from the restored version, in this epoch.
    pub(crate) fn roll_back(&mut self, epoch: u64) {
        self.rolled_back = Some((epoch, self.current.unwrap_or(0)));
    }

    /// The first epoch and the version after the last restoration, if ranks were waiting.
    pub(crate) fn rolled_back(&self) -> Option<(u64, u64)> {
        self.rolled_back
    }

    /// When the next commit that waits for servers is due.
    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.last.as_ref().and_then(|last| last.next_deadline())
    }

    /// The commits that wait for servers to store the last decision.
    pub(crate) fn into_waiters(self) -> impl Iterator<Item = Waiter> {
        self.last.into_iter().flat_map(|last| last.into_waiters())
    }
}
