//! One operation under way: names its messages, and checks those that come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use zeroshard_proto::pb;

use super::error::{Error, Place, Result};
use super::mailbox::{Channel, Key, Mailbox, Missing};

/// f32 values that go to one or more peers without being copied.
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

    pub(super) fn values(&self) -> &[f32] {
        &self.0
    }

    /// A range of them, as they go over the wire.
    pub(super) fn bytes(&self, range: std::ops::Range<usize>) -> Bytes {
        let size = size_of::<f32>();
        Bytes::from_owner(Owner(self.0.clone())).slice(range.start * size..range.end * size)
    }

    /// The values themselves: copied only while a peer still gets them.
    pub(super) fn into_values(self) -> Vec<f32> {
        Arc::try_unwrap(self.0).unwrap_or_else(|shared| shared.to_vec())
    }
}

/// Sends messages.
pub(super) trait Post {
    /// Sends a message to rank `to`, without waiting. Whether it arrived shows in the mailbox.
    fn post(&self, to: u32, header: pb::DeliverHeader, data: Bytes);
}

/// One operation of this rank. Its peers are named by their places in the group.
pub(super) struct Operation<'a> {
    pub(super) post: &'a dyn Post,
    pub(super) mailbox: &'a Mailbox,
    pub(super) rank: u32,
    pub(super) channel: Channel,
    pub(super) sequence: u64,
    /// The operation with its sizes: the same on every rank.
    pub(super) text: String,
    /// Deadline of each message.
    pub(super) patience: Duration,
}

impl Operation<'_> {
    /// Number of ranks that take part.
    pub(super) fn size(&self) -> usize {
        self.channel.group.len()
    }

    /// This rank's place.
    pub(super) fn me(&self) -> usize {
        let position = self.channel.group.iter().position(|&rank| rank == self.rank);
        position.expect("an operation is made with this rank in its group")
    }

    /// The places of all others, those behind this one first: so not all send to the same one at
    /// once.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me(), self.size());
        (1..size).map(move |distance| (me + distance) % size)
    }

    /// Sends to the `to`-th of the group.
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

    /// Takes the message of the `from`-th rank of the group.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Lost`], and [`Error::Disagreement`] if it is another operation
    /// or of another size.
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
            self.mailbox.take(&key, Instant::now() + self.patience).map_err(
                |missing| match missing {
                    Missing::Late(instead) => Error::Timeout {
                        at: at(),
                        waited_ms: self.patience.as_millis() as u64,
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
                "{} with a message of {} f32 and not {elements}",
                self.text,
                mail.data.len()
            );
            return Err(Error::Disagreement { at: at(), theirs });
        }
        Ok(mail.data)
    }
}
