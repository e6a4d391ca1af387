//! Messages that have arrived from peers and are not yet used by an operation, and the state of the
//! peers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Identifies a sequence of operations.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Channel {
    /// The communicator.
    pub(super) communicator: u32,
    /// The ranks of the group; for point-to-point messages the sender and the receiver.
    pub(super) group: Vec<u32>,
    /// `true` if the operations are point-to-point messages instead of collectives.
    pub(super) pair: bool,
}

/// Identifies a message.
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
    /// The operation that the sender called, with its sizes.
    pub(super) operation: String,
    /// The number of elements.
    pub(super) elements: usize,
    /// The elements; `None` if they come over NCCL.
    pub(super) data: Option<Vec<f32>>,
}

/// The reason why a message is missing.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// The message did not arrive before the deadline. Contains another operation for which the
    /// peer has sent a message, if there is one.
    Late(Option<String>),
    /// The peer is lost or has failed. Contains the cause.
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

/// The messages by key, and the state of the peers.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

impl Mailbox {
    /// Stores a message. Returns false if there was already a message with this key.
    pub(super) fn put(&self, key: Key, mail: Mail) -> bool {
        let first = self.lock().mail.insert(key, mail).is_none();
        self.changed.notify_all();
        first
    }

    /// Takes the message with this key. Waits until it arrives.
    pub(super) fn take(&self, key: &Key, deadline: Instant) -> Result<Mail, Missing> {
        let mut state = self.lock();
        loop {
            // Messages are checked first, because those that a peer sent before it left are valid.
            if let Some(mail) = state.mail.remove(key) {
                return Ok(mail);
            }
            state.check(key.from)?;
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(Missing::Late(state.other(key)));
            };
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns whether a peer can still send something.
    ///
    /// # Errors
    /// [`Missing::Lost`]
    pub(super) fn check(&self, peer: u32) -> Result<(), Missing> {
        self.lock().check(peer)
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
        // The state is consistent after a panic, because each change is a single map operation.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check(&self, peer: u32) -> Result<(), Missing> {
        if let Some(cause) = self.lost.get(&peer) {
            return Err(Missing::Lost(cause.clone()));
        }
        match self.failed.get(&peer) {
            Some(cause) => Err(Missing::Lost(format!("it failed: {cause}"))),
            None => Ok(()),
        }
    }

    /// A description of the earliest other message of the same peer.
    fn other(&self, key: &Key) -> Option<String> {
        let mut from_peer: Vec<_> =
            self.mail.iter().filter(|(other, _)| other.from == key.from).collect();
        from_peer.sort_by_key(|(other, _)| (other.sequence, other.round));
        let (other, mail) = from_peer.first()?;
        Some(format!(
            "{} among ranks {:?} with sequence number {}",
            mail.operation, other.channel.group, other.sequence
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(from: u32, sequence: u64) -> Key {
        Key {
            from,
            channel: Channel { communicator: 0, group: vec![0, 1], pair: false },
            sequence,
            round: 0,
        }
    }

    fn mail(operation: &str) -> Mail {
        Mail { operation: operation.to_owned(), elements: 1, data: Some(vec![1.0]) }
    }

    #[test]
    fn messages_can_be_taken_in_any_order() {
        let mailbox = Mailbox::default();
        assert!(mailbox.put(key(1, 1), mail("b")));
        assert!(mailbox.put(key(1, 0), mail("a")));
        assert_eq!(mailbox.take(&key(1, 0), Instant::now()), Ok(mail("a")));
        assert_eq!(mailbox.take(&key(1, 1), Instant::now()), Ok(mail("b")));
    }

    #[test]
    fn a_second_message_with_the_same_key_is_reported() {
        let mailbox = Mailbox::default();
        assert!(mailbox.put(key(1, 0), mail("a")));
        assert!(!mailbox.put(key(1, 0), mail("a")));
    }

    #[test]
    fn a_timeout_names_another_message_of_the_same_peer() {
        let mailbox = Mailbox::default();
        mailbox.put(key(1, 3), mail("all_gather"));
        let Err(Missing::Late(Some(other))) = mailbox.take(&key(1, 0), Instant::now()) else {
            panic!("expected Missing::Late");
        };
        assert!(other.contains("all_gather") && other.contains('3'), "{other}");
        assert_eq!(mailbox.take(&key(2, 0), Instant::now()), Err(Missing::Late(None)));
    }

    #[test]
    fn a_message_that_was_sent_before_the_peer_left_is_valid() {
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
    fn a_wait_for_a_failed_peer_returns_the_cause() {
        let mailbox = Mailbox::default();
        mailbox.put(key(1, 0), mail("a"));
        mailbox.fail(1, "no".to_owned());
        assert_eq!(mailbox.take(&key(1, 0), Instant::now()), Ok(mail("a")), "sent before");
        let lost = Missing::Lost("it failed: no".to_owned());
        assert_eq!(mailbox.take(&key(1, 1), Instant::now()), Err(lost));
    }
}
