//! Calls the servers for a follower: fetches changes from all of them, to one version.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::{join_all, try_join_all};
use zeroshard_changes::{Known, SliceChange, block, vouch};
use zeroshard_model::{DType, Error, Result, Server};
use zeroshard_net::transport::MAX_CONTROL_MESSAGE;
use zeroshard_proto::{
    convert::box_message,
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};

use super::{Follower, mirror::Mirror};

/// How long a reader waits until the backups record changes.
const BACKUPS: Duration = Duration::from_secs(2);

/// The changes since the reader's version, as far as the servers know them.
pub(super) enum Since {
    /// There is no newer version.
    Same,
    /// At least one server does not know the changes.
    Unknown,
    /// The changes of all followed slices.
    Changed { version: u64, slices: BTreeMap<u32, SliceChange> },
}

/// Who sends changes.
#[derive(Clone)]
enum Source {
    Server(Server),
    Mirror(Mirror),
}

impl Follower {
    /// Returns whom to ask for changes: the mirror if there is one, or else [`Self::servers`].
    fn sources(&self, turn: usize) -> Result<Vec<(Source, pb::ChangesRequest)>> {
        match &self.mirror {
            Some(mirror) => Ok(vec![(Source::Mirror(mirror.clone()), self.request(self.slices()))]),
            None => self.servers(turn),
        }
    }

    /// Returns the servers of the followed slices, each with a request that has no versions yet.
    /// With replicas, `turn` selects one of the servers of each slice; 0: the primaries.
    fn servers(&self, turn: usize) -> Result<Vec<(Source, pb::ChangesRequest)>> {
        let placement = &self.of.placement;
        let mut of_server = vec![Vec::new(); placement.servers().len()];
        for slice in self.slices() {
            let owners = placement.owners(slice as usize);
            of_server[owners[turn % owners.len()] as usize].push(slice);
        }
        let requests = placement.servers().iter().zip(of_server).filter(|(_, of)| !of.is_empty());
        let requests =
            requests.map(|(server, slices)| (Source::Server(server.clone()), self.request(slices)));
        Ok(requests.collect())
    }

    /// Returns a request for these slices that has no versions yet.
    fn request(&self, slices: impl IntoIterator<Item = u32>) -> pb::ChangesRequest {
        pb::ChangesRequest {
            job: self.of.spec.name.clone(),
            job_id: self.of.id,
            line: self.of.line,
            slices: self.by_dtype(slices),
            reader: self.id,
            ..Default::default()
        }
    }

    /// Returns slices, which are ascending, by the dtype of the reader's values, with the boxes of
    /// their tensors.
    pub(super) fn by_dtype(
        &self,
        slices: impl IntoIterator<Item = u32>,
    ) -> Vec<pb::FollowedSlices> {
        let mut of_dtype = BTreeMap::<DType, pb::FollowedSlices>::new();
        let mut last = None;
        for slice in slices {
            let tensor = self.of.spec.manifest.slices()[slice as usize].tensor;
            let dtype = self.dtype_of(tensor);
            let of = of_dtype.entry(dtype).or_default();
            of.dtype = pb::Dtype::from(dtype).into();
            of.slices.push(slice);
            if last.replace(tensor) != Some(tensor) {
                let bounds = self.bounds(tensor);
                of.boxes.extend(bounds.map(|bounds| box_message(bounds, tensor)));
            }
        }
        of_dtype.into_values().collect()
    }

    /// Makes all servers record changes, unless a mirror has done so. Waits for a version after the
    /// last one that [`Self::next`] returned, and returns the newest one.
    pub(super) async fn begin(&self, wait: Duration) -> Result<Option<u64>> {
        let primaries = self.ask_all(self.sources(0)?, None, wait);
        let (answers, ()) = tokio::join!(primaries, self.begin_backups());
        let (_, answers) = answers?;
        Ok(answers.iter().map(|answer| answer.version).max())
    }

    /// Makes the backups record changes. One that does not is asked later, and the reader then asks
    /// the primary instead.
    async fn begin_backups(&self) {
        let replicas = if self.mirror.is_some() { 1 } else { self.of.placement.replicas() };
        let backups = (1..replicas).filter_map(|turn| self.servers(turn).ok());
        let calls = backups.flatten().map(|(source, request)| async {
            let asked = self.ask(source, request, Duration::ZERO);
            if let Ok(Err(error)) = tokio::time::timeout(BACKUPS, asked).await {
                tracing::debug!(%error, "a backup does not record changes yet");
            }
        });
        join_all(calls).await;
    }

    /// Fetches the changes since `from`, up to the newest version that any source has.
    pub(super) async fn changes_since(&self, from: u64, wait: Duration) -> Result<Since> {
        let (requests, answers) = self.ask_all(self.sources(self.turn)?, Some(from), wait).await?;
        let Some(mut gathering) = self.reader.gather(answers) else { return Ok(Since::Same) };
        let version = gathering.version();
        let rest = gathering.behind().into_iter().map(|(at, had)| {
            let (source, request) = requests[at].clone();
            let request = pb::ChangesRequest { from: Some(had), to: Some(version), ..request };
            async move { Ok((at, self.ask(source, request, Duration::ZERO).await?)) }
        });
        let manifest = &self.of.spec.manifest;
        let size = |slice: u32| {
            let place = self.views.place(&manifest.slices()[slice as usize]);
            let (dtype, positions) = place.expect("each change is of a followed slice");
            (dtype, positions.len())
        };
        for (at, rest) in try_join_all(rest).await? {
            let added = gathering.add(at, rest, size);
            added.map_err(|(slice, error)| malformed(slice, &error))?;
        }
        let Some(mut slices) = gathering.finish() else { return Ok(Since::Unknown) };
        if let Some(slice) = self.slices().find(|slice| !slices.contains_key(slice)) {
            let cause = format!("the servers left out the change of slice {slice}");
            return Err(Error::Internal { cause });
        }
        if self.mirror.is_some() {
            let Some(hashes) = self.hashes_of_servers(version).await? else {
                return Ok(Since::Unknown);
            };
            let vouched = vouch(&mut slices, &hashes);
            vouched.map_err(|slice| Error::Internal {
                cause: format!("the servers left out the hash of slice {slice}"),
            })?;
        }
        Ok(Since::Changed { version, slices })
    }

    /// Asks the servers for the hashes of all followed slices at a version. Returns `None` if a
    /// server does not know them any more.
    pub(super) async fn hashes_of_servers(
        &self,
        version: u64,
    ) -> Result<Option<BTreeMap<u32, u64>>> {
        let calls = self.servers(self.turn)?.into_iter().map(|(server, request)| {
            let (from, to) = (Some(version), Some(version));
            self.ask(server, pb::ChangesRequest { from, to, ..request }, Duration::ZERO)
        });
        let answers = try_join_all(calls).await?;
        let slices: Option<Vec<_>> = answers.into_iter().map(|answer| answer.slices).collect();
        let hashes = slices.map(|of| of.into_iter().flatten().map(|(slice, of)| (slice, of.hash)));
        Ok(hashes.map(Iterator::collect))
    }

    /// Asks the mirror for the changes of some slices between two versions.
    pub(super) async fn changes_of_mirror(
        &self,
        mirror: &Mirror,
        slices: impl IntoIterator<Item = u32>,
        [from, to]: [u64; 2],
    ) -> Result<Option<BTreeMap<u32, SliceChange>>> {
        let (from, to) = (Some(from), Some(to));
        let request = pb::ChangesRequest { from, to, ..self.request(slices) };
        let answer = self.ask(Source::Mirror(mirror.clone()), request, Duration::ZERO).await?;
        Ok(answer.slices)
    }

    /// Asks several sources. Each waits at most for `wait` for a version after the last one that
    /// [`Self::next`] returned. Returns the requests and their answers.
    async fn ask_all(
        &self,
        mut requests: Vec<(Source, pb::ChangesRequest)>,
        from: Option<u64>,
        wait: Duration,
    ) -> Result<(Vec<(Source, pb::ChangesRequest)>, Vec<Known>)> {
        let (wait_ms, newer_than) = (wait.as_millis() as u32, self.reader.shown());
        for (_, request) in &mut requests {
            *request = pb::ChangesRequest { from, wait_ms, newer_than, ..request.clone() };
        }
        let calls = requests.iter().cloned();
        let calls = calls.map(|(source, request)| self.ask(source, request, wait));
        let answers = try_join_all(calls).await?;
        Ok((requests, answers))
    }

    /// Asks one source. It waits at most for `wait` before it answers.
    async fn ask(
        &self,
        source: Source,
        request: pb::ChangesRequest,
        wait: Duration,
    ) -> Result<Known> {
        // After its wait, the source has as long to send the changes as for any other operation.
        let left = wait + self.cluster.options.timeout;
        let (peer, sent) = match source {
            Source::Server(server) => {
                let shard = self.cluster.shards.get(&server)?;
                let client = ShardServiceClient::new(shard.pull.within(left));
                let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
                (shard.peer, client.changes(request).await)
            }
            Source::Mirror(mirror) => {
                let sent = mirror.client(left).changes(request).await;
                (mirror.peer, sent)
            }
        };
        let failed = |status: tonic::Status| from_status(&status, &peer);
        let mut call = sent.map_err(failed)?.into_inner();
        let (mut version, mut parts, mut is_unknown) = (None, Parts::default(), false);
        while let Some(message) = call.message().await.map_err(failed)? {
            version = version.or(message.version);
            is_unknown |= message.is_unknown;
            for part in message.changes {
                parts.add(self, part)?;
            }
        }
        let version = version.ok_or_else(|| Error::Internal {
            cause: format!("{peer} has sent changes without a version"),
        })?;
        Ok(Known { version, slices: (!is_unknown).then_some(parts.complete) })
    }
}

/// The changes that have arrived from one source.
#[derive(Default)]
struct Parts {
    complete: BTreeMap<u32, SliceChange>,
    /// The change whose last part has not arrived yet.
    open: Option<(u32, BytesMut)>,
}

impl Parts {
    fn add(&mut self, of: &Follower, part: pb::SliceChange) -> Result<()> {
        let pb::SliceChange { slice, change, hash } = part;
        let spec = of.of.spec.manifest.slices().get(slice as usize);
        let Some((dtype, positions)) = spec.and_then(|spec| of.views.place(spec)) else {
            let cause =
                format!("a server has sent the change of slice {slice}, which was not asked for");
            return Err(Error::Internal { cause });
        };
        let change = match self.open.take() {
            Some((open, mut parts)) if open == slice => {
                parts.extend_from_slice(&change);
                parts.freeze()
            }
            _ => change,
        };
        if change.len() > block::most_bytes(dtype, positions.len()) {
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
