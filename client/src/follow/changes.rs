//! The calls of a follower: changes from all servers, to one version.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::try_join_all;
use zeroshard_changes::{block, merge};
use zeroshard_model::{DType, Error, Result, Server};
use zeroshard_net::transport::MAX_CONTROL_MESSAGE;
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};

use super::{Follower, version::SliceChange};

/// What the servers know about the versions after the reader's.
pub(super) enum Since {
    /// There is no newer version.
    Same,
    /// A server does not know the changes.
    Unknown,
    Changed {
        version: u64,
        slices: BTreeMap<u32, SliceChange>,
    },
}

/// The answer of one server.
struct Answer {
    /// The part of a request that says what the server was asked for.
    request: pb::ChangesRequest,
    server: Server,
    version: u64,
    /// `None`: the server does not know them.
    slices: Option<BTreeMap<u32, SliceChange>>,
}

impl Follower {
    /// The servers of the slices that are followed, each with a request without versions.
    fn requests(&self) -> Result<Vec<(Server, pb::ChangesRequest)>> {
        let (manifest, placement) = (&self.of.spec.manifest, &self.of.placement);
        let mut of_server = vec![BTreeMap::<DType, Vec<u32>>::new(); placement.servers().len()];
        for slice in self.slices()? {
            let dtype = self.dtype_of(manifest.slices()[slice as usize].tensor);
            let of = &mut of_server[placement.primary(slice as usize)];
            of.entry(dtype).or_default().push(slice);
        }
        let requests = placement.servers().iter().zip(of_server).filter(|(_, of)| !of.is_empty());
        let requests = requests.map(|(server, of)| {
            let slices = of.into_iter().map(|(dtype, slices)| pb::FollowedSlices {
                dtype: pb::Dtype::from(dtype).into(),
                slices,
            });
            let request = pb::ChangesRequest {
                job: self.of.spec.name.clone(),
                job_id: self.of.id,
                line: self.of.line,
                slices: slices.collect(),
                ..Default::default()
            };
            (server.clone(), request)
        });
        Ok(requests.collect())
    }

    /// Asks all servers to record changes, once there is a version. Returns the newest one. Waits
    /// for one after the last one that was returned.
    pub(super) async fn begin(&self, wait: Duration) -> Result<Option<u64>> {
        let (wait_ms, newer_than) = (wait.as_millis() as u32, self.shown);
        let calls = self.requests()?.into_iter().map(|(server, request)| {
            self.ask(server, pb::ChangesRequest { wait_ms, newer_than, ..request }, wait)
        });
        Ok(try_join_all(calls).await?.iter().map(|answer| answer.version).max())
    }

    /// The changes since `from`, to the newest version that any of the servers has.
    pub(super) async fn changes_since(&self, from: u64, wait: Duration) -> Result<Since> {
        let (wait_ms, newer_than) = (wait.as_millis() as u32, self.shown);
        let calls = self.requests()?.into_iter().map(|(server, request)| {
            let from = Some(from);
            self.ask(server, pb::ChangesRequest { from, wait_ms, newer_than, ..request }, wait)
        });
        let answers = try_join_all(calls).await?;
        let Some(version) = answers.iter().map(|answer| answer.version).max() else {
            return Ok(Since::Same);
        };
        if version <= from.max(self.shown.unwrap_or_default()) {
            return Ok(Since::Same);
        }
        let completed = answers.into_iter().map(|answer| self.complete(answer, from, version));
        let mut slices = BTreeMap::new();
        for answer in try_join_all(completed).await? {
            let Some(of) = answer else { return Ok(Since::Unknown) };
            slices.extend(of);
        }
        match self.slices()?.find(|slice| !slices.contains_key(slice)) {
            None => Ok(Since::Changed { version, slices }),
            Some(slice) => {
                let cause = format!("the servers left out the change of slice {slice}");
                Err(Error::Internal { cause })
            }
        }
    }

    /// The changes of a server to `version`, which it may not have had when it answered.
    async fn complete(
        &self,
        answer: Answer,
        from: u64,
        version: u64,
    ) -> Result<Option<BTreeMap<u32, SliceChange>>> {
        let Answer { request, server, version: had, slices } = answer;
        let Some(first) = slices else { return Ok(None) };
        if had == version {
            return Ok(Some(first));
        }
        let had = had.max(from);
        let request = pb::ChangesRequest { from: Some(had), to: Some(version), ..request };
        let rest = self.ask(server, request, Duration::ZERO).await?;
        let Some(rest) = rest.slices else { return Ok(None) };
        if had == from {
            return Ok(Some(rest));
        }
        let slices = &self.of.spec.manifest.slices();
        let mut merged = BTreeMap::new();
        for (slice, SliceChange { change, hash }) in rest {
            let of = &slices[slice as usize];
            let change = match first.get(&slice) {
                Some(first) => {
                    let parts = [&first.change[..], &change];
                    let merged = merge(self.dtype_of(of.tensor), of.numel, &parts);
                    merged.map(Bytes::from).map_err(|error| malformed(slice, &error))?
                }
                None => return Ok(None),
            };
            merged.insert(slice, SliceChange { change, hash });
        }
        Ok(Some(merged))
    }

    /// Asks one server, which waits at most for `wait` before it answers.
    async fn ask(
        &self,
        server: Server,
        request: pb::ChangesRequest,
        wait: Duration,
    ) -> Result<Answer> {
        let shard = self.cluster.shards.get(&server)?;
        let failed = |status: tonic::Status| from_status(&status, &shard.peer);
        // The server waits, and has then the time of any other operation to send what it has.
        let left = wait + self.cluster.options.timeout;
        let client = ShardServiceClient::new(shard.pull.within(left));
        let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
        let mut call = client.changes(request.clone()).await.map_err(failed)?.into_inner();
        let (mut version, mut parts, mut is_unknown) = (None, Parts::default(), false);
        while let Some(message) = call.message().await.map_err(failed)? {
            version = version.or(message.version);
            is_unknown |= message.is_unknown;
            for part in message.changes {
                parts.add(self, part)?;
            }
        }
        let version = version.ok_or_else(|| Error::Internal {
            cause: format!("{} has sent changes without a version", shard.peer),
        })?;
        Ok(Answer { request, server, version, slices: (!is_unknown).then_some(parts.complete) })
    }
}

/// The parts of changes that have arrived from one server.
#[derive(Default)]
struct Parts {
    complete: BTreeMap<u32, SliceChange>,
    /// The change of which the last part is missing.
    open: Option<(u32, BytesMut)>,
}

impl Parts {
    fn add(&mut self, of: &Follower, part: pb::SliceChange) -> Result<()> {
        let pb::SliceChange { slice, change, hash } = part;
        let Some(spec) = of.of.spec.manifest.slices().get(slice as usize) else {
            let cause =
                format!("a server has sent the change of slice {slice}, which is not there");
            return Err(Error::Internal { cause });
        };
        let change = match self.open.take() {
            Some((open, mut parts)) if open == slice => {
                parts.extend_from_slice(&change);
                parts.freeze()
            }
            _ => change,
        };
        if change.len() > block::most_bytes(of.dtype_of(spec.tensor), spec.numel) {
            return Err(malformed(slice, &"it is longer than the slice"));
        }
        match hash {
            Some(hash) => _ = self.complete.insert(slice, SliceChange { change, hash }),
            None => self.open = Some((slice, change.into())),
        }
        Ok(())
    }
}

/// The error for a change that a server should not have sent.
pub(super) fn malformed(slice: u32, cause: &dyn std::fmt::Display) -> Error {
    Error::Internal { cause: format!("the change of slice {slice} is malformed: {cause}") }
}
