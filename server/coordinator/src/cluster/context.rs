//! What a job can use while it handles an event, beside its own state.

use std::{collections::BTreeSet, time::Duration};

use zeroshard_model::{Error, Result, limits::MAX_JOBS};

use crate::{
    cluster::{
        acknowledgements::Acknowledgements,
        index::Index,
        numbers::{Epochs, SaveNumbers},
        servers::Servers,
        startup::Startup,
    },
    operators::history::Severity,
    vocabulary::{
        calls::Reply,
        commands::Command,
        events::Action,
        ids::{Link, Now, ServerId, Waiter},
    },
};

/// What the jobs of a cluster have in common.
#[derive(Debug, Default)]
pub struct Common {
    pub servers: Servers,
    pub startup: Startup,
    pub index: Index,
    pub(crate) epochs: Epochs,
    pub saves: SaveNumbers,
    pub(crate) acknowledgements: Acknowledgements,
    pub(crate) limits: JobLimits,
}

/// The operator's limits on jobs.
#[derive(Debug, Clone, Copy)]
pub struct JobLimits {
    /// The idle timeout of jobs that have none of their own; `None`: they are kept.
    pub timeout: Option<Duration>,
    /// The maximum number of jobs.
    pub number: usize,
}

impl Default for JobLimits {
    fn default() -> Self {
        Self { timeout: None, number: MAX_JOBS }
    }
}

/// What an event causes outside its job. The cluster carries it out after the job has handled the
/// event.
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

/// An event as its job sees it: its time and its actions so far. What the job causes elsewhere is
/// carried out after its visit.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) now: Now,
    pub(crate) common: &'a mut Common,
    pub(crate) out: &'a mut Vec<Action>,
    pub(crate) consequences: Vec<Consequence>,
}

impl Context<'_> {
    /// The name of a server, for messages.
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
        waiters: Vec<Waiter>,
        waiting_for: impl FnOnce(&Common) -> String,
    ) {
        if waiters.is_empty() {
            return;
        }
        let waiting_for = waiting_for(self.common);
        for waiter in waiters {
            self.answer(waiter, Err(waiter.timeout(self.now, waiting_for.clone())));
        }
    }
}
