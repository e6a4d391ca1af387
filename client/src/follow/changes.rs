//! Calls the servers for a follower: fetches changes from all of them, to one version.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::try_join_all;
use zeroshard_changes::{Known, SliceChange, block};
use zeroshard_model::{DType, Error, Result, Server};
use zeroshard_net::transport::MAX_CONTROL_MESSAGE;
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};

use super::Follower;

/// The changes since the reader's version, as far as the servers know them.
pub(super) enum Since {
    /// There is no newer version.
    Same,
    /// At least one server does not know the changes.
    Unknown,
    /// The changes of all followed slices.
    Changed { version: u64, slices: BTreeMap<u32, SliceChange> },
}

impl Follower {
    /// Returns the servers of the followed slices, each with a request that has no versions yet.
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

    /// Makes all servers record changes. Waits for a version after the last one that
    /// [`Self::next`] returned, and returns the newest one.
    pub(super) async fn begin(&self, wait: Duration) -> Result<Option<u64>> {
        let (_, answers) = self.ask_all(None, wait).await?;
        Ok(answers.iter().map(|answer| answer.version).max())
    }

    /// Fetches the changes since `from`, up to the newest version that any server has.
    pub(super) async fn changes_since(&self, from: u64, wait: Duration) -> Result<Since> {
        let (requests, answers) = self.ask_all(Some(from), wait).await?;
        let Some(mut gathering) = self.reader.gather(answers) else { return Ok(Since::Same) };
        let version = gathering.version();
        let rest = gathering.behind().into_iter().map(|(at, had)| {
            let (server, request) = requests[at].clone();
            let request = pb::ChangesRequest { from: Some(had), to: Some(version), ..request };
            async move { Ok((at, self.ask(server, request, Duration::ZERO).await?)) }
        });
        let manifest = &self.of.spec.manifest;
        let size = |slice: u32| {
            let of = &manifest.slices()[slice as usize];
            (self.dtype_of(of.tensor), of.numel)
        };
        for (at, rest) in try_join_all(rest).await? {
            let added = gathering.add(at, rest, size);
            added.map_err(|(slice, error)| malformed(slice, &error))?;
        }
        let Some(slices) = gathering.finish() else { return Ok(Since::Unknown) };
        match self.slices()?.find(|slice| !slices.contains_key(slice)) {
            None => Ok(Since::Changed { version, slices }),
            Some(slice) => {
                let cause = format!("the servers left out the change of slice {slice}");
                Err(Error::Internal { cause })
            }
        }
    }

    /// Asks all servers. Each waits at most for `wait` for a version after the last one that
    /// [`Self::next`] returned. Returns the requests and their answers.
    async fn ask_all(
        &self,
        from: Option<u64>,
        wait: Duration,
    ) -> Result<(Vec<(Server, pb::ChangesRequest)>, Vec<Known>)> {
        let (wait_ms, newer_than) = (wait.as_millis() as u32, self.reader.shown());
        let mut requests = self.requests()?;
        for (_, request) in &mut requests {
            *request = pb::ChangesRequest { from, wait_ms, newer_than, ..request.clone() };
        }
        let calls = requests.iter().cloned();
        let calls = calls.map(|(server, request)| self.ask(server, request, wait));
        let answers = try_join_all(calls).await?;
        Ok((requests, answers))
    }

    /// Asks one server. It waits at most for `wait` before it answers.
    async fn ask(
        &self,
        server: Server,
        request: pb::ChangesRequest,
        wait: Duration,
    ) -> Result<Known> {
        let shard = self.cluster.shards.get(&server)?;
        let failed = |status: tonic::Status| from_status(&status, &shard.peer);
        // After its wait, the server has as long to send the changes as for any other operation.
        let left = wait + self.cluster.options.timeout;
        let client = ShardServiceClient::new(shard.pull.within(left));
        let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
        let mut call = client.changes(request).await.map_err(failed)?.into_inner();
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
        Ok(Known { version, slices: (!is_unknown).then_some(parts.complete) })
    }
}

/// The changes that have arrived from one server.
#[derive(Default)]
struct Parts {
    complete: BTreeMap<u32, SliceChange>,
    /// The change whose last part has not arrived yet.
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

/// Returns the error for a malformed change.
pub(super) fn malformed(slice: u32, cause: &dyn std::fmt::Display) -> Error {
    Error::Internal { cause: format!("the change of slice {slice} is malformed: {cause}") }
}
