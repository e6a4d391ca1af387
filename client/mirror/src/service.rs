//! The calls of readers.

use std::{collections::VecDeque, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use tokio::task::spawn_blocking;
use tonic::{Request, Response, Status};
use zeroshard_changes::{Sent, Wanted, sum};
use zeroshard_model::{Error, Result, SliceSpec, View};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    changes::{Change, bytes, followed, messages},
    pb::{self, mirror_service_server::MirrorService},
    status::to_status,
};

use crate::{
    access::Access,
    metrics::Metrics,
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
    metrics: Arc<Metrics>,
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
        let reader = self.metrics.reader();
        let deadline = Deadline::of_call(request.metadata().as_ref());
        let deadline = deadline.unwrap_or_else(|| Deadline::after(WITHIN));
        let changes = self.changed(request.into_inner(), deadline).await.map_err(to_status)?;
        let metrics = self.metrics.clone();
        let counted = changes.map(move |of| {
            let _reader = &reader;
            of.inspect(|message| metrics.sent_changes(bytes(message))).map_err(to_status)
        });
        Ok(Response::new(counted.boxed()))
    }

    type CopyStream = Answers<pb::CopyResponse>;

    async fn copy(
        &self,
        request: Request<pb::CopyRequest>,
    ) -> Result<Response<Self::CopyStream>, Status> {
        self.access.check(&request).await.map_err(to_status)?;
        let reader = self.metrics.reader();
        let copied = self.copied(request.into_inner()).await.map_err(to_status)?;
        let metrics = self.metrics.clone();
        let counted = copied.map(move |of| {
            let _reader = &reader;
            let count = |message: &pb::CopyResponse| metrics.sent_copy(message.values.len() as u64);
            of.inspect(count).map_err(to_status)
        });
        Ok(Response::new(counted.boxed()))
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
        match known.state.has((self.id, self.line)) {
            true => Ok(()),
            false => Err(unavailable("it does not have the job's current line yet")),
        }
    }
}

fn unavailable(cause: &str) -> Error {
    Error::Unavailable { peer: "the mirror".to_owned(), cause: cause.to_owned() }
}

impl Service {
    pub(crate) fn new(store: Arc<Store>, access: Access, metrics: Arc<Metrics>) -> Self {
        Self { store, access, metrics }
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
        let within = if to.is_some() { deadline } else { wait };
        let Sent { version, from } =
            self.wait(&asked, Wanted { from, to, newer_than }, within).await?;
        let mut rest = self.slices(&slices).await?;
        if from.is_none() {
            rest.clear();
        }
        let versions = [from.unwrap_or(version), version];
        let changes = Changes { store: self.store.clone(), asked, rest, versions };
        let changes = stream::try_unfold(changes, |mut changes| async {
            Ok(changes.next().await?.map(|change| (change, changes)))
        });
        Ok(messages(version, changes))
    }

    /// Waits for a version that the reader wants. After the deadline it gets the newest one.
    async fn wait(&self, asked: &Asked, wanted: Wanted, deadline: Deadline) -> Result<Sent> {
        let mut changed = self.store.changes();
        loop {
            let is_last = deadline.left().is_zero();
            let sent = self.store.known(|known| {
                asked.check(known)?;
                Ok::<_, Error>(known.state.answer(wanted, is_last))
            })?;
            if let Some(sent) = sent {
                return Ok(sent);
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
    asked: Asked,
    /// The slices after the current one.
    rest: VecDeque<(u32, SliceSpec)>,
    versions: [u64; 2],
}

impl Changes {
    /// Prepares the change of the next slice, or `None` if it is unknown. The last one was sent
    /// before if there is none.
    async fn next(&mut self) -> Result<Option<Option<Change>>> {
        let Some((slice, spec)) = self.rest.pop_front() else { return Ok(None) };
        let found = self.store.known(|known| {
            // The job may have gone to another line meanwhile, and have such versions again.
            self.asked.check(known)?;
            Ok::<_, Error>(known.state.changes(slice, self.versions))
        })?;
        let Some((changes, hash)) = found else { return Ok(Some(None)) };
        let change = match &changes[..] {
            [change] => change.clone(),
            _ => {
                let size = (self.store.values().await.dtype(spec.tensor)?, spec.numel);
                let summed = spawn_blocking(move || sum(size, &changes)).await;
                summed.map_err(|error| Error::Internal { cause: error.to_string() })??
            }
        };
        Ok(Some(Some(Change { slice, change, hash })))
    }
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
