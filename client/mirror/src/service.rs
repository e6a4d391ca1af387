//! The calls of readers.

use std::{collections::VecDeque, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status};
use zeroshard_changes::merge;
use zeroshard_model::{DType, Error, Result, SliceSpec, View};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    changes::{Packed, Rest, followed},
    pb::{self, mirror_service_server::MirrorService},
    status::to_status,
};

use crate::{
    access::Access,
    store::{Known, Store},
};

/// The maximum number of bytes of values in one message.
const PART: usize = 1 << 20;

/// The longest wait of a call that has no deadline of its own.
const WITHIN: Duration = Duration::from_secs(60);

/// The cause of an error before the first version.
const NOTHING: &str = "it has no version yet";

/// Serves readers.
pub(crate) struct Service {
    store: Arc<Store>,
    access: Access,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl MirrorService for Service {
    type ChangesStream = Answers<pb::ChangesResponse>;

    async fn changes(
        &self,
        request: Request<pb::ChangesRequest>,
    ) -> Result<Response<Self::ChangesStream>, Status> {
        self.access.check(&request).await.map_err(to_status)?;
        let deadline = Deadline::of_call(request.metadata().as_ref());
        let deadline = deadline.unwrap_or_else(|| Deadline::after(WITHIN));
        let changes = self.changed(request.into_inner(), deadline).await.map_err(to_status)?;
        Ok(Response::new(changes.map(|of| of.map_err(to_status)).boxed()))
    }

    type CopyStream = Answers<pb::CopyResponse>;

    async fn copy(
        &self,
        request: Request<pb::CopyRequest>,
    ) -> Result<Response<Self::CopyStream>, Status> {
        self.access.check(&request).await.map_err(to_status)?;
        let copied = self.copied(request.into_inner()).await.map_err(to_status)?;
        Ok(Response::new(copied.map(|of| of.map_err(to_status)).boxed()))
    }
}

/// The job, its id and its line, as a reader knows them.
struct Asked {
    job: String,
    id: u64,
    line: Option<u64>,
}

impl Asked {
    /// # Errors
    /// [`Error::Refused`] if the mirror follows another job; [`Error::Unavailable`] if it has not
    /// arrived at the reader's line yet.
    fn check(&self, known: &Known) -> Result<()> {
        let Some(of) = &known.job else { return Err(unavailable(NOTHING)) };
        if of.spec.name != self.job {
            return Err(Error::refused(format!(
                "the mirror has job {:?}, not {:?}; name the one that it follows",
                of.spec.name, self.job
            )));
        }
        let is_same =
            [0, of.id].contains(&self.id) && (self.line.is_none() || self.line == of.line);
        match is_same {
            true => Ok(()),
            false => Err(unavailable("it does not have the job's current line yet")),
        }
    }
}

fn unavailable(cause: &str) -> Error {
    Error::Unavailable { peer: "the mirror".to_owned(), cause: cause.to_owned() }
}

impl Service {
    pub(crate) fn new(store: Arc<Store>, access: Access) -> Self {
        Self { store, access }
    }

    /// Returns the slices of a request, in its order.
    ///
    /// # Errors
    /// [`Error::Refused`] and [`Error::Invalid`] for slices that the mirror does not have in the
    /// reader's dtype.
    async fn slices(&self, messages: &[pb::FollowedSlices]) -> Result<VecDeque<(u32, SliceSpec)>> {
        let values = self.store.values().await;
        self.store.known(|known| {
            let Some(of) = &known.job else { return Err(unavailable(NOTHING)) };
            let manifest = &of.spec.manifest;
            let spec = |(slice, view): (u32, View)| {
                let (specs, dtype) = (manifest.slices(), view.dtype());
                if view.bounds().is_some() {
                    let sentence = "a mirror has whole tensors, and the request has boxes; follow \
                                    boxes without a mirror";
                    return Err(Error::refused(sentence));
                }
                let spec = specs.get(slice as usize).copied().ok_or_else(|| {
                    let what = format!("slice {slice} of a reader's request");
                    Error::invalid(what, "not there", "a slice of the job")
                })?;
                let own = values.dtype(spec.tensor)?;
                if dtype != own {
                    let expected = format!("that of the mirror, {own}");
                    return Err(Error::invalid("dtype of a reader", dtype, expected));
                }
                Ok((slice, spec))
            };
            followed(messages, manifest)?.into_iter().map(spec).collect()
        })
    }

    async fn changed(
        &self,
        request: pb::ChangesRequest,
        deadline: Deadline,
    ) -> Result<impl Stream<Item = Result<pb::ChangesResponse>> + Send + use<>> {
        let pb::ChangesRequest { job, job_id, line, slices, from, to, wait_ms, newer_than, .. } =
            request;
        let asked = Asked { job, id: job_id, line };
        let wait = deadline.at_most(Duration::from_millis(wait_ms.into()));
        let version = match to {
            Some(to) => self.wait(&asked, to, deadline).await?.min(to),
            None => {
                let newer = newer_than.or(from).map_or(0, |than| than.saturating_add(1));
                self.wait(&asked, newer, wait).await?
            }
        };
        let mut rest = self.slices(&slices).await?;
        let from = from.filter(|&from| from < version || to.is_some());
        if from.is_none() {
            rest.clear();
        }
        let versions = [from.unwrap_or(version), version];
        let changes = Changes { store: self.store.clone(), rest, versions, part: None };
        let first = pb::ChangesResponse { version: Some(version), ..Default::default() };
        let parts = stream::try_unfold(changes, |mut changes| async {
            Ok(changes.next_message().await?.map(|message| (message, changes)))
        });
        Ok(stream::iter([Ok(first)]).chain(parts))
    }

    /// Waits for a version, or until the deadline. Returns the newest one.
    async fn wait(&self, asked: &Asked, version: u64, deadline: Deadline) -> Result<u64> {
        let mut changed = self.store.changes();
        loop {
            let newest = self.store.known(|known| {
                asked.check(known)?;
                Ok::<_, Error>(known.version)
            })?;
            if newest >= version || deadline.left().is_zero() {
                return Ok(newest);
            }
            // An error means that the deadline has passed, or that the mirror ends.
            let _ = deadline.limit(String::new, changed.changed()).await;
        }
    }

    async fn copied(
        &self,
        request: pb::CopyRequest,
    ) -> Result<impl Stream<Item = Result<pb::CopyResponse>> + Send + use<>> {
        let pb::CopyRequest { job, job_id, line, slices } = request;
        let asked = Asked { job, id: job_id, line };
        self.store.known(|known| asked.check(known))?;
        let rest = self.slices(&slices).await?;
        let copy = Copy { store: self.store.clone(), asked, rest, part: None };
        Ok(stream::try_unfold(copy, |mut copy| async {
            Ok(copy.next_message().await?.map(|message| (message, copy)))
        }))
    }
}

/// The changes that are still to be sent.
struct Changes {
    store: Arc<Store>,
    /// The slices after the current one.
    rest: VecDeque<(u32, SliceSpec)>,
    versions: [u64; 2],
    part: Option<Rest>,
}

impl Changes {
    async fn next_message(&mut self) -> Result<Option<pb::ChangesResponse>> {
        if self.part.is_none() && !self.next_slice().await? {
            let is_unknown = !self.rest.is_empty();
            self.rest.clear();
            let last = pb::ChangesResponse { is_unknown, ..Default::default() };
            return Ok(is_unknown.then_some(last));
        }
        let mut packed = Packed::default();
        while self.part.is_some() {
            packed.add(&mut self.part);
            if packed.is_full() || self.part.is_none() && !self.next_slice().await? {
                break;
            }
        }
        Ok(Some(packed.message()))
    }

    /// Prepares the change of the next slice. Returns `false` after the last slice, and if the
    /// change is unknown. In this case the slice stays in `rest`.
    async fn next_slice(&mut self) -> Result<bool> {
        let Some((slice, spec)) = self.rest.front() else { return Ok(false) };
        let found = self.store.known(|known| known.history.between(*slice, self.versions));
        let Some((mut changes, hash)) = found else { return Ok(false) };
        let slice = *slice;
        let change = match changes.len() {
            1 => changes.remove(0),
            _ => {
                let dtype = self.store.values().await.dtype(spec.tensor)?;
                merged(dtype, spec.numel, changes).await?
            }
        };
        self.rest.pop_front();
        self.part = Some(Rest { slice, change, hash });
        Ok(true)
    }
}

/// Adds the changes of several steps, on a thread that serves no calls.
async fn merged(dtype: DType, numel: usize, changes: Vec<Bytes>) -> Result<Bytes> {
    let work = move || {
        let parts: Vec<&[u8]> = changes.iter().map(|change| &change[..]).collect();
        merge(dtype, numel, &parts).map(Bytes::from)
    };
    let failed = |cause: &dyn std::fmt::Display| Error::Internal { cause: cause.to_string() };
    let merged = tokio::task::spawn_blocking(work).await.map_err(|error| failed(&error))?;
    merged.map_err(|error| failed(&error))
}

/// The values that are still to be sent.
struct Copy {
    store: Arc<Store>,
    asked: Asked,
    /// The slices after the current one.
    rest: VecDeque<(u32, SliceSpec)>,
    /// The current slice, the rest of its values, and its version.
    part: Option<(u32, Bytes, u64)>,
}

impl Copy {
    async fn next_message(&mut self) -> Result<Option<pb::CopyResponse>> {
        if self.part.is_none() {
            let Some((slice, spec)) = self.rest.pop_front() else { return Ok(None) };
            let values = self.store.values().await;
            // The job may have gone to another line meanwhile.
            self.store.known(|known| self.asked.check(known))?;
            let of = Bytes::copy_from_slice(values.slice(&spec)?);
            self.part = Some((slice, of, values.version));
        }
        let Some((slice, mut rest, version)) = self.part.take() else { return Ok(None) };
        let values = rest.split_to(rest.len().min(PART));
        let is_last = rest.is_empty();
        if !is_last {
            self.part = Some((slice, rest, version));
        }
        Ok(Some(pb::CopyResponse { slice, values, version: is_last.then_some(version) }))
    }
}
