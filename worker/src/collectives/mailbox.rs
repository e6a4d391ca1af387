//! Messages of the peers that no operation has taken yet, and the state of the peers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A sequence of operations.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Channel {
    /// The ranks that take part; of a pair: sender, receiver.
    pub(super) group: Vec<u32>,
    /// Messages from one rank to another, not collectives.
    pub(super) pair: bool,
}

/// Identity of a message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) from: u32,
    pub(super) channel: Channel,
    pub(super) sequence: u64,
    pub(super) round: u32,
}

/// A message.
#[derive(Debug, PartialEq)]
pub(super) struct Mail {
    /// The sender's operation, with its sizes.
    pub(super) operation: String,
    pub(super) data: Vec<f32>,
}

/// The reason why a message is missing.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// It did not come in time. Another operation for which the peer has sent a message, if any.
    Late(Option<String>),
    /// It will not come, because the peer is lost or has failed.
    Lost(String),
}

#[derive(Debug, Default)]
struct State {
    mail: HashMap<Key, Mail>,
    /// Peers that are lost, with the cause.
    lost: BTreeMap<u32, String>,
    /// Peers that have failed, with the cause.
    failed: BTreeMap<u32, String>,
}

/// Messages by key, and the state of the peers.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

impl Mailbox {
    /// Keeps a message until it is asked for. Returns whether it was the first with this key.
    pub(super) fn put(&self, key: Key, mail: Mail) -> bool {
        let first = self.lock().mail.insert(key, mail).is_none();
        self.changed.notify_all();
        first
    }

    /// The message with this key; waits for it.
    pub(super) fn take(&self, key: &Key, deadline: Instant) -> Result<Mail, Missing> {
        let mut state = self.lock();
        loop {
            // First, because messages that were sent before a peer left count.
            if let Some(mail) = state.mail.remove(key) {
                return Ok(mail);
            }
            if let Some(cause) = state.lost.get(&key.from) {
                return Err(Missing::Lost(cause.clone()));
            }
            if let Some(cause) = state.failed.get(&key.from) {
                return Err(Missing::Lost(format!("it failed: {cause}")));
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(Missing::Late(state.other(key)));
            };
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that a peer is lost. The first cause is kept.
    pub(super) fn lose(&self, peer: u32, cause: String) {
        self.lock().lost.entry(peer).or_insert(cause);
        self.changed.notify_all();
    }

    /// Records that a peer has failed.
    pub(super) fn fail(&self, peer: u32, cause: String) {
        self.lock().failed.insert(peer, cause);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Something else from the same peer, as a text.
    fn other(&self, key: &Key) -> Option<String> {
        let mut from_peer: Vec<_> =
            self.mail.iter().filter(|(other, _)| other.from == key.from).collect();
        from_peer.sort_by_key(|(other, _)| (other.sequence, other.round));
        let (other, mail) = from_peer.first()?;
        Some(format!(
            "{} among ranks {:?}, as number {}",
            mail.operation, other.channel.group, other.sequence
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(from: u32, sequence: u64) -> Key {
        Key { from, channel: Channel { group: vec![0, 1], pair: false }, sequence, round: 0 }
    }

    fn mail(operation: &str) -> Mail {
        Mail { operation: operation.to_owned(), data: vec![1.0] }
    }

    #[test]
    fn mail_waits_for_who_asks_for_it() {
        let mailbox = Mailbox::default();
        assert!(mailbox.put(key(1, 1), mail("b")));
        assert!(mailbox.put(key(1, 0), mail("a")));
        assert_eq!(mailbox.take(&key(1, 0), Instant::now()), Ok(mail("a")));
        assert_eq!(mailbox.take(&key(1, 1), Instant::now()), Ok(mail("b")));
    }

    #[test]
    fn a_second_message_with_the_same_key_is_noticed() {
        let mailbox = Mailbox::default();
        assert!(mailbox.put(key(1, 0), mail("a")));
        assert!(!mailbox.put(key(1, 0), mail("a")));
    }

    #[test]
    fn who_waits_in_vain_hears_what_came_instead() {
        let mailbox = Mailbox::default();
        mailbox.put(key(1, 3), mail("all_gather"));
        let Err(Missing::Late(Some(other))) = mailbox.take(&key(1, 0), Instant::now()) else {
            panic!("there is no such mail");
        };
        assert!(other.contains("all_gather") && other.contains('3'), "{other}");
        assert_eq!(mailbox.take(&key(2, 0), Instant::now()), Err(Missing::Late(None)));
    }

    #[test]
    fn what_was_sent_before_a_peer_left_counts() {
        let mailbox = Mailbox::default();
        mailbox.put(key(1, 0), mail("a"));
        mailbox.lose(1, "it has left".to_owned());
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(mailbox.take(&key(1, 0), deadline), Ok(mail("a")));
        assert_eq!(
            mailbox.take(&key(1, 1), deadline),
            Err(Missing::Lost("it has left".to_owned()))
        );
    }

    #[test]
    fn whoever_waits_for_a_peer_that_gave_up_hears_its_cause() {
        let mailbox = Mailbox::default();
        mailbox.put(key(1, 0), mail("a"));
        mailbox.fail(1, "no".to_owned());
        assert_eq!(mailbox.take(&key(1, 0), Instant::now()), Ok(mail("a")), "sent before");
        let gave_up = Missing::Lost("it failed: no".to_owned());
        assert_eq!(mailbox.take(&key(1, 1), Instant::now()), Err(gave_up));
    }
}
