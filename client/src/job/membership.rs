//! The membership of a job according to the coordinator, and what a new coordinator must be told.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use zeroshard_model::{Error, Line, Placement, Result};
use zeroshard_proto::pb;

/// The coordinator announces the end of a job at most this long after the servers have reported it.
pub(super) const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// The contents of all messages so far.
#[derive(Debug, Clone)]
pub(super) struct Membership {
    /// The lease of the rank. It changes when the rank joins again.
    pub(super) lease: u64,
    pub(super) epoch: u64,
    pub(super) version: Option<u64>,
    pub(super) placement: Arc<Placement>,
    /// The addresses of the ranks that have announced one.
    pub(super) peers: BTreeMap<u32, String>,
    /// The last time that the job was restored from a checkpoint while its ranks were waiting.
    pub(super) restored: Option<pb::Restored>,
    /// The current line.
    pub(super) line: Arc<Line>,
    /// The reason for the end of the lease, if it has ended.
    pub(super) ended: Option<Error>,
}

impl Membership {
    /// Creates the membership from the first message of a stream, which is complete.
    pub(super) fn new(message: pb::JoinResponse) -> Result<Self> {
        let placement = Arc::new(message.placement.clone().unwrap_or_default().try_into()?);
        let mut membership = Self {
            lease: message.lease,
            epoch: message.epoch,
            version: None,
            placement,
            peers: BTreeMap::new(),
            restored: None,
            line: Arc::default(),
            ended: None,
        };
        membership.update(pb::JoinResponse { placement: None, ..message })?;
        Ok(membership)
    }

    /// Applies a later message, which contains the changes. An error leaves the membership
    /// unchanged.
    pub(super) fn update(&mut self, message: pb::JoinResponse) -> Result<()> {
        let placement = message.placement.map(Placement::try_from).transpose()?;
        let line = message.line.map(Line::try_from).transpose()?;
        self.placement = placement.map_or_else(|| self.placement.clone(), Arc::new);
        if let Some(line) = line.filter(|line| *line != *self.line) {
            self.line = Arc::new(line);
        }
        (self.lease, self.epoch) = (message.lease, message.epoch);
        self.restored = message.restored.or(self.restored);
        // A published version remains published.
        self.version = message.version.or(self.version);
        for pb::Peer { rank, address } in message.peers {
            match address {
                None => self.peers.remove(&rank),
                Some(address) => self.peers.insert(rank, address),
            };
        }
        Ok(())
    }
}

/// The data for checkpoints that the rank has sent last, which a new coordinator does not have.
#[derive(Debug, Clone, Default)]
pub(super) struct SentData {
    /// The epoch in which the rank has sent it.
    pub(super) epoch: u64,
    pub(super) version: u64,
    pub(super) data: Bytes,
}

impl SentData {
    /// The version and the data; none if the job was restored from a checkpoint since. The job may
    /// reach the version again, with other data.
    pub(super) fn current(&self, restored: Option<pb::Restored>) -> (u64, Bytes) {
        match restored.is_some_and(|restored| self.epoch < restored.epoch) {
            true => (0, Bytes::new()),
            false => (self.version, self.data.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(rank: u32, address: &str) -> pb::Peer {
        pb::Peer { rank, address: Some(address.into()) }
    }

    fn placement(id: u64) -> pb::Placement {
        let server = pb::Server { id, address: "host:1".into(), incarnation: 1 };
        pb::Placement { servers: vec![server], replicas: 1, owners: vec![0] }
    }

    fn first() -> Membership {
        let peers = vec![peer(0, "a:1"), peer(2, "c:1")];
        let message = pb::JoinResponse {
            epoch: 3,
            peers,
            placement: Some(placement(7)),
            ..Default::default()
        };
        Membership::new(message).unwrap()
    }

    #[test]
    fn a_later_message_changes_only_the_fields_that_it_contains() {
        let mut now = first();
        let peers = vec![peer(1, "b:1"), pb::Peer { rank: 2, address: None }];
        now.update(pb::JoinResponse { epoch: 4, version: Some(0), peers, ..Default::default() })
            .unwrap();
        assert_eq!((now.epoch, now.version, now.placement.servers()[0].id), (4, Some(0), 7));
        assert_eq!(
            now.peers.into_iter().collect::<Vec<_>>(),
            [(0, "a:1".into()), (1, "b:1".into())]
        );

        let mut now = first();
        now.version = Some(5);
        let moved =
            pb::JoinResponse { epoch: 3, placement: Some(placement(8)), ..Default::default() };
        now.update(moved).unwrap();
        assert_eq!((now.version, now.placement.servers()[0].id, now.peers.len()), (Some(5), 8, 2));
    }

    #[test]
    fn skipped_batches_are_taken_on_any_line() {
        let mut now = first();
        for number in [0, 1] {
            let line = Line::new(number, [4..8, 20..21]).unwrap();
            let message = pb::JoinResponse { line: Some((&line).into()), ..Default::default() };
            now.update(message).unwrap();
            assert_eq!(*now.line, line);
            now.update(pb::JoinResponse::default()).unwrap();
            assert_eq!(*now.line, line, "a message without a line changes nothing");
        }
    }

    #[test]
    fn data_of_a_version_that_was_lost_is_not_sent_again() {
        let sent = SentData { epoch: 4, version: 7, data: Bytes::from_static(b"data") };
        let current = |epoch| sent.current(Some(pb::Restored { epoch, version: 5 }));
        let lost = (0, Bytes::new());
        let kept = (7, sent.data.clone());
        assert_eq!(
            [sent.current(None), current(3), current(4)],
            [kept.clone(), kept.clone(), kept]
        );
        assert_eq!(current(5), lost);
    }

    #[test]
    fn an_invalid_placement_changes_nothing() {
        let mut now = first();
        let broken = pb::Placement { owners: vec![9], ..placement(8) };
        let message = pb::JoinResponse { epoch: 9, placement: Some(broken), ..Default::default() };
        assert!(now.update(message).is_err());
        assert_eq!((now.epoch, now.placement.servers()[0].id), (3, 7));
    }
}
