//! Calls that are answered when servers have received the commands that follow from them.
//!
//! Without this, a coordinator that dies right after its answer takes the commands with it: a job
//! that was deleted comes back, or a rank is told of an attempt that no server knows.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    cluster::servers::Servers,
    vocabulary::{
        calls::Reply,
        commands::Command,
        events::Action,
        ids::{Now, ServerId, Waiter},
    },
};

/// Calls that wait for servers. The key is the number of the [`Command::Confirm`].
#[derive(Debug, Default)]
pub struct Acknowledgements {
    last: u64,
    open: BTreeMap<u64, Acknowledgement>,
}

#[derive(Debug)]
struct Acknowledgement {
    waiters: Vec<Waiter>,
    reply: Reply,
    pending: BTreeSet<ServerId>,
    /// The commands, for messages.
    what: String,
}

impl Acknowledgements {
    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.open.values().flat_map(|open| &open.waiters).map(|waiter| waiter.deadline).min()
    }

    /// Answers the calls when the connected ones of `servers` have received all commands that were
    /// sent before. A server that is lost counts as one that has received them: when it comes back,
    /// it receives what it lacks. `what` is what the servers are to receive.
    pub(crate) fn answer_when_received(
        &mut self,
        waiters: Vec<Waiter>,
        reply: Reply,
        connected: BTreeSet<ServerId>,
        what: String,
        out: &mut Vec<Action>,
    ) {
        self.last += 1;
        let number = self.last;
        out.extend(connected.iter().map(|&id| Action::Command(id, Command::Confirm { number })));
        self.open.insert(number, Acknowledgement { waiters, reply, pending: connected, what });
        self.answer(out);
    }

    /// A server has received all commands up to [`Command::Confirm`].
    pub(crate) fn confirmed(&mut self, server: ServerId, number: u64, out: &mut Vec<Action>) {
        if let Some(acknowledgement) = self.open.get_mut(&number) {
            acknowledgement.pending.remove(&server);
            self.answer(out);
        }
    }

    /// No call waits for the server any more.
    pub(crate) fn lose(&mut self, server: ServerId, out: &mut Vec<Action>) {
        for acknowledgement in self.open.values_mut() {
            acknowledgement.pending.remove(&server);
        }
        self.answer(out);
    }

    fn answer(&mut self, out: &mut Vec<Action>) {
        let is_complete = |_: &u64, open: &mut Acknowledgement| open.pending.is_empty();
        for (_, Acknowledgement { waiters, reply, .. }) in self.open.extract_if(.., is_complete) {
            let answer = |waiter: Waiter| Action::Answer(waiter.caller, Ok(reply.clone()));
            out.extend(waiters.into_iter().map(answer));
        }
    }

    /// Answers calls at their deadline with the servers that have not confirmed.
    pub(crate) fn expire(&mut self, servers: &Servers, now: Now, out: &mut Vec<Action>) {
        for Acknowledgement { waiters, pending, what, .. } in self.open.values_mut() {
            for waiter in waiters.extract_if(.., |waiter| waiter.deadline <= now) {
                let waiting_for = format!("{} to receive {what}", servers.names_of(pending));
                out.push(Action::Answer(waiter.caller, Err(waiter.timeout(now, waiting_for))));
            }
        }
        self.open.retain(|_, open| !open.waiters.is_empty());
    }
}
