//! A running operation: creates the keys of its messages, and checks the messages of its peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use zeroshard_proto::pb;

use super::error::{Error, Place, Result};
use super::mailbox::{Channel, Key, Mailbox, Missing};

/// Shared f32 values that can be sent to several peers without a copy.
#[derive(Debug, Clone)]
pub(super) struct Numbers(Arc<Vec<f32>>);

struct Owner(Arc<Vec<f32>>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        bytemuck::must_cast_slice(&self.0)
    }
}

impl Numbers {
    pub(super) fn new(values: Vec<f32>) -> Self {
        Self(Arc::new(values))
    }

    /// The values in the wire format.
    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(Owner(self.0))
    }

    /// The values. They are copied only if a message still refers to them.
    pub(super) fn into_values(self) -> Vec<f32> {
        Arc::try_unwrap(self.0).unwrap_or_else(|shared| shared.to_vec())
    }
}

/// The interface for sending messages.
pub(super) trait Post {
    /// Sends a message to rank `to`, without waiting. If it fails, the peer is recorded as lost in
    /// the mailbox.
    fn post(&self, to: u32, header: pb::DeliverHeader, data: Bytes);
}

/// A running operation of this rank. Peers are identified by their places in the group.
pub(super) struct Operation<'a> {
    pub(super) post: &'a dyn Post,
    pub(super) mailbox: &'a Mailbox,
    pub(super) rank: u32,
    pub(super) channel: Channel,
    pub(super) sequence: u64,
    /// The name of the operation with its sizes, which must be the same on every rank.
    pub(super) text: String,
    /// The time to wait for each message.
    pub(super) timeout: Duration,
}

impl Operation<'_> {
    /// The number of ranks in the group.
    pub(super) fn size(&self) -> usize {
        self.channel.group.len()
    }

    /// The place of this rank.
    pub(super) fn me(&self) -> usize {
        let position = self.channel.group.iter().position(|&rank| rank == self.rank);
        position.expect("this rank was found in the group before the operation began")
    }

    /// The places of all other ranks, cyclically from the next place. The order differs between
    /// ranks, so they do not all send to the same rank at once.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me(), self.size());
        (1..size).map(move |distance| (me + distance) % size)
    }

    /// Sends messages to some places, and takes those of the same round from others, with their
    /// numbers of elements. The order of what is taken is that of the messages.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub(super) fn exchange(
        &self,
        round: u32,
        sent: Vec<(usize, Numbers)>,
        taken: &[(usize, usize)],
    ) -> Result<Vec<Vec<f32>>> {
        for (to, values) in sent {
            self.send(to, round, values.into_bytes());
        }
        taken.iter().map(|&(from, elements)| self.take(from, round, elements)).collect()
    }

    /// [`Self::exchange`] of one message in each direction.
    pub(super) fn pass_on(
        &self,
        round: u32,
        sent: (usize, Numbers),
        taken: (usize, usize),
    ) -> Result<Vec<f32>> {
        Ok(self.exchange(round, vec![sent], &[taken])?.remove(0))
    }

    /// Sends a message to the rank at place `to`.
    pub(super) fn send(&self, to: usize, round: u32, data: Bytes) {
        let header = pb::DeliverHeader {
            from: self.rank,
            group: self.channel.group.clone(),
            pair: self.channel.pair,
            sequence: self.sequence,
            round,
            operation: self.text.clone(),
            elements: (data.len() / size_of::<f32>()) as u64,
        };
        self.post.post(self.channel.group[to], header, data);
    }

    /// Takes the message of the rank at place `from`.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Lost`], and [`Error::Disagreement`] if the message belongs to a
    /// different operation or has a different size.
    pub(super) fn take(&self, from: usize, round: u32, elements: usize) -> Result<Vec<f32>> {
        let peer = self.channel.group[from];
        let key = Key { from: peer, channel: self.channel.clone(), sequence: self.sequence, round };
        let at = || Place {
            rank: self.rank,
            peer,
            group: self.channel.group.clone(),
            operation: self.text.clone(),
        };
        let mail =
            self.mailbox.take(&key, Instant::now() + self.timeout).map_err(
                |missing| match missing {
                    Missing::Late(instead) => Error::Timeout {
                        at: at(),
                        waited_ms: self.timeout.as_millis() as u64,
                        instead,
                    },
                    Missing::Lost(cause) => Error::Lost { at: at(), cause },
                },
            )?;
        if mail.operation != self.text {
            return Err(Error::Disagreement { at: at(), theirs: mail.operation });
        }
        if mail.data.len() != elements {
            let theirs = format!(
                "{} with a message of {} f32 instead of {elements}",
                self.text,
                mail.data.len()
            );
            return Err(Error::Disagreement { at: at(), theirs });
        }
        Ok(mail.data)
    }
}
