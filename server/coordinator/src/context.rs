//! What an event finds beside the state of its job, and what it causes.

use std::{collections::BTreeSet, time::Duration};

use zeroshard_model::{Error, Result};

use crate::{
    acknowledgements::Acknowledgements,
    calls::Reply,
    commands::Command,
    events::Action,
    history::Severity,
    ids::{Link, Now, ServerId, Waiter},
    index::Index,
    learning::Learning,
    numbers::{Epochs, SaveNumbers},
    servers::Servers,
};

/// What the jobs of a cluster have in common.
#[derive(Debug, Default)]
pub struct Common {
    pub servers: Servers,
    pub learning: Learning,
    pub index: Index,
    pub(crate) epochs: Epochs,
    pub(crate) saves: SaveNumbers,
    pub(crate) acknowledgements: Acknowledgements,
    /// The idle timeout of jobs that have none of their own; `None`: they are kept.
    pub(crate) job_timeout: Option<Duration>,
}

/// A consequence of an event for other jobs or for the whole cluster, which the cluster carries
/// out after the job has handled its event.
#[derive(Debug)]
pub(crate) enum Consequence {
    /// A job has ended: those that are being created from it cannot be.
    Ended { job_id: u64, error: Error },
    /// A control stream is of no use.
    Dismiss { link: Link, cause: String },
    /// A call is answered when servers have received all commands, including those that follow from
    /// the consequences before: see [`Acknowledgements::answer_when_received`].
    Answer { waiter: Waiter, reply: Reply, servers: BTreeSet<ServerId>, what: String },
}

impl Common {
    /// Answers the calls when the connected ones of `servers` have received all commands that were
    /// sent before: see [`Acknowledgements::answer_when_received`].
    pub(crate) fn answer_when_received(
        &mut self,
        waiters: Vec<Waiter>,
        reply: Reply,
        servers: impl IntoIterator<Item = ServerId>,
        what: String,
        out: &mut Vec<Action>,
    ) {
        let connected: BTreeSet<ServerId> =
            servers.into_iter().filter(|&server| self.servers.is_connected(server)).collect();
        self.acknowledgements.answer_when_received(waiters, reply, connected, what, out);
    }
}

/// What a job has at hand while it handles an event.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) now: Now,
    pub(crate) common: &'a mut Common,
    pub(crate) out: &'a mut Vec<Action>,
    pub(crate) consequences: &'a mut Vec<Consequence>,
}

impl Context<'_> {
    pub(crate) fn name(&self, server: ServerId) -> String {
        self.common.servers.name(server)
    }

    pub(crate) fn push(&mut self, action: Action) {
        self.out.push(action);
    }

    /// Logs an event of normal operation.
    pub(crate) fn note(&mut self, text: String) {
        self.out.push(Action::Note(text));
    }

    /// Logs an event of higher severity.
    pub(crate) fn alarm(&mut self, severity: Severity, text: String) {
        self.out.push(Action::Alarm(severity, text));
    }

    pub(crate) fn command(&mut self, server: ServerId, command: Command) {
        self.out.push(Action::Command(server, command));
    }

    pub(crate) fn answer(&mut self, waiter: Waiter, answer: Result<Reply>) {
        self.out.push(Action::Answer(waiter.caller, answer));
    }

    /// Ends calls with an error.
    pub(crate) fn refuse(&mut self, waiters: impl IntoIterator<Item = Waiter>, error: &Error) {
        for waiter in waiters {
            self.answer(waiter, Err(error.clone()));
        }
    }

    /// Ends calls whose deadline has passed.
    pub(crate) fn time_out(
        &mut self,
        waiters: impl IntoIterator<Item = Waiter>,
        waiting_for: &str,
    ) {
        for waiter in waiters {
            self.answer(waiter, Err(waiter.timeout(self.now, waiting_for.to_owned())));
        }
    }

    /// The same as [`Common::answer_when_received`].
    pub(crate) fn answer_when_received(
        &mut self,
        waiters: Vec<Waiter>,
        reply: Reply,
        servers: impl IntoIterator<Item = ServerId>,
        what: String,
    ) {
        self.common.answer_when_received(waiters, reply, servers, what, self.out);
    }
}
