//! A running operation: creates the keys of its messages, and checks the messages of its peers.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use zeroshard_proto::pb;

use super::error::{Error, Place, Result};
use super::mailbox::{Channel, Key, Mailbox, Missing};
use super::nccl::Nccl;
use super::options::LEAVE_TIMEOUT;

/// Messages with at least this many elements (64 KiB) go over NCCL. For smaller ones, starting NCCL
/// would take longer than the transfer over gRPC.
const NCCL_FROM: usize = 16 << 10;

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

    pub(super) fn elements(&self) -> usize {
        self.0.len()
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
    /// Carries the large messages of collectives. `None`: all messages go over gRPC.
    pub(super) nccl: Option<&'a Nccl>,
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

    /// Sends a message to each place in `sent`, and receives one of the same round from each place
    /// in `taken`, which also has the numbers of elements. The result is in the order of `taken`.
    ///
    /// # Errors
    /// Those of [`Self::take`]; [`Error::Nccl`].
    pub(super) fn exchange(
        &self,
        round: u32,
        sent: Vec<(usize, Numbers)>,
        taken: &[(usize, usize)],
    ) -> Result<Vec<Vec<f32>>> {
        let (mut over_nccl, mut announced) = (Vec::new(), Vec::new());
        for (to, values) in sent {
            let (elements, values) = (values.elements(), values.into_bytes());
            if self.goes_over_nccl(elements) {
                self.post(to, round, elements, None);
                over_nccl.push((self.channel.group[to], values));
            } else {
                self.send(to, round, values);
            }
        }
        let mut received = Vec::new();
        for &(from, elements) in taken {
            let is_announced = self.goes_over_nccl(elements);
            received.push(self.take_mail(from, round, elements, is_announced)?);
            if is_announced {
                announced.push((self.channel.group[from], elements));
            }
        }
        let mut announced = match self.nccl {
            Some(nccl) if !over_nccl.is_empty() || !announced.is_empty() => {
                self.exchange_over_nccl(nccl, &over_nccl, &announced)?
            }
            _ => Vec::new(),
        }
        .into_iter();
        let received = received.into_iter().map(|data| data.or_else(|| announced.next()));
        Ok(received.flatten().collect())
    }

    /// Returns whether a message of [`Self::exchange`] with this many elements goes over NCCL. The
    /// sender and the receiver come to the same result.
    fn goes_over_nccl(&self, elements: usize) -> bool {
        self.nccl.is_some() && elements >= NCCL_FROM
    }

    /// Exchanges messages that have been announced.
    fn exchange_over_nccl(
        &self,
        nccl: &Nccl,
        sent: &[(u32, Bytes)],
        taken: &[(u32, usize)],
    ) -> Result<Vec<Vec<f32>>> {
        let peers: Vec<u32> =
            sent.iter().map(|(to, _)| *to).chain(taken.iter().map(|(from, _)| *from)).collect();
        let wait = self.waiting_for(peers);
        let failed = |cause| Error::Nccl { rank: self.rank, operation: self.text.clone(), cause };
        nccl.exchange(sent, taken, &wait).map_err(|stopped| stopped.into_error(failed))
    }

    /// Returns a function that fails when it is useless to wait any longer for these peers.
    pub(super) fn waiting_for(&self, peers: Vec<u32>) -> impl Fn() -> Result<()> {
        let began = Instant::now();
        let lost = Cell::new(None);
        move || {
            for &peer in &peers {
                if let Err(missing) = self.mailbox.check(peer) {
                    // What a peer has sent before it left still arrives.
                    let since = lost.get().unwrap_or_else(Instant::now);
                    lost.set(Some(since));
                    if since.elapsed() >= LEAVE_TIMEOUT {
                        return Err(self.missing(peer, missing));
                    }
                }
            }
            if began.elapsed() >= self.timeout {
                let peer = peers.first().copied().unwrap_or(self.rank);
                return Err(self.missing(peer, Missing::Late(None)));
            }
            Ok(())
        }
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
        self.post(to, round, data.len() / size_of::<f32>(), Some(data));
    }

    /// Sends a message, or announces one that is sent over NCCL.
    fn post(&self, to: usize, round: u32, elements: usize, data: Option<Bytes>) {
        let header = pb::DeliverHeader {
            from: self.rank,
            group: self.channel.group.clone(),
            pair: self.channel.pair,
            communicator: self.channel.communicator,
            sequence: self.sequence,
            round,
            operation: self.text.clone(),
            elements: elements as u64,
            over_nccl: data.is_none(),
        };
        self.post.post(self.channel.group[to], header, data.unwrap_or_default());
    }

    /// Takes the message of the rank at place `from`.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Lost`], and [`Error::Disagreement`] if the message belongs to a
    /// different operation, has a different size, or is sent in another way.
    pub(super) fn take(&self, from: usize, round: u32, elements: usize) -> Result<Vec<f32>> {
        Ok(self.take_mail(from, round, elements, false)?.unwrap_or_default())
    }

    /// Takes a message; `None` if it comes over NCCL, as it does if `is_announced`.
    fn take_mail(
        &self,
        from: usize,
        round: u32,
        elements: usize,
        is_announced: bool,
    ) -> Result<Option<Vec<f32>>> {
        let peer = self.channel.group[from];
        let key = Key { from: peer, channel: self.channel.clone(), sequence: self.sequence, round };
        let mail = self.mailbox.take(&key, Instant::now() + self.timeout);
        let mail = mail.map_err(|missing| self.missing(peer, missing))?;
        if mail.operation != self.text {
            return Err(self.disagreement(from, mail.operation));
        }
        if mail.elements != elements {
            let theirs = format!(
                "{} with a message of {} f32 instead of {elements}",
                self.text, mail.elements
            );
            return Err(self.disagreement(from, theirs));
        }
        if mail.data.is_none() != is_announced {
            let how = if is_announced { "not over" } else { "over" };
            return Err(self.disagreement(from, format!("{} {how} NCCL", self.text)));
        }
        Ok(mail.data)
    }

    fn at(&self, peer: u32) -> Place {
        let (group, operation) = (self.channel.group.clone(), self.text.clone());
        Place { rank: self.rank, peer, group, operation }
    }

    fn missing(&self, peer: u32, missing: Missing) -> Error {
        let (at, waited_ms) = (self.at(peer), self.timeout.as_millis() as u64);
        match missing {
            Missing::Late(instead) => Error::Timeout { at, waited_ms, instead },
            Missing::Lost(cause) => Error::Lost { at, cause },
        }
    }

    fn disagreement(&self, from: usize, theirs: String) -> Error {
        Error::Disagreement { at: self.at(self.channel.group[from]), theirs }
    }
}
