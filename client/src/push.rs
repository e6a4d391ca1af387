//! Pushing: gradients go from the caller's array to the socket, slice by slice; without a copy where they are of the
//! wire's dtype.

use std::{collections::VecDeque, convert::Infallible, ops::Range, sync::atomic::Ordering};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use prost::Message;
use zeroshard_proto::{
    DType, Error, Manifest, Placement, Result, Server,
    frame::{Extent, Writer},
    pb,
};

use crate::{
    call::{call, finish},
    pull::{check_size, share},
    region::Share,
    shards::Shards,
    values::Values,
};

/// A tensor's gradient; or its initial parameters, a part of its optimizer state, a buffer's new content.
#[derive(Debug, Clone)]
pub struct Gradient {
    /// Index in the manifest of the tensor, which must own its storage (not tied to another).
    pub tensor: usize,
    /// What the rank has of it by the tensor's layout (all of it, if there is none), row-major.
    pub data: Values,
}

/// What one server is to receive.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) server: Server,
    parts: Vec<Part>,
    /// Slices that the rank has nothing more of.
    absent: Vec<u32>,
}

/// The message that opens a push takes 4 KiB: with so many slices, of five bytes at most, job and part fit too.
const ABSENT_A_PUSH: usize = 400;

#[derive(Debug, Clone)]
struct Part {
    slice: u32,
    data: Values,
    /// The slice's elements in `data`.
    range: Range<usize>,
    /// How many ranks add to the slice before us.
    waits: u32,
}

/// Which server receives what of a rank's gradients or, with `upload`, of what the job begins with. `shares` are the
/// rank's; what it need not send is left out.
///
/// # Errors
/// [`Error::Invalid`] for a tensor that does not exist, is tied to another, or has another size.
pub(crate) fn plan(
    manifest: &Manifest,
    placement: &Placement,
    shares: &[Share],
    gradients: Vec<Gradient>,
    upload: bool,
) -> Result<Vec<Plan>> {
    let plan = |server: &Server| Plan { server: server.clone(), parts: Vec::new(), absent: Vec::new() };
    let mut plans: Vec<_> = placement.servers().iter().map(plan).collect();
    for Gradient { tensor, data } in gradients {
        let share = share("data for", manifest, shares, tensor)?;
        check_size("data for", manifest, tensor, &share.region, data.len())?;
        check_owner(manifest, tensor)?;
        if !(if upload { share.uploads() } else { share.contributes() }) {
            continue;
        }
        for slice in manifest.slices_of(tensor) {
            let range = share.region.part(&manifest.slices()[slice]);
            if !range.is_empty() {
                let waits = share.waits(slice as u32);
                let part = Part { slice: slice as u32, data: data.clone(), range, waits };
                plans[placement.primary(slice)].parts.push(part);
            }
        }
    }
    // First the slices where it is our turn early.
    for plan in &mut plans {
        plan.parts.sort_by_key(|part| part.waits);
    }
    plans.retain(|plan| !plan.parts.is_empty());
    Ok(plans)
}

/// Whom to tell of which slices that the rank has nothing more of them.
///
/// # Errors
/// [`Error::Invalid`] for a tensor that does not exist, is tied to another, or does not train.
pub(crate) fn plan_absent(
    manifest: &Manifest,
    placement: &Placement,
    shares: &[Share],
    tensors: &[usize],
) -> Result<Vec<Plan>> {
    let mut slices = vec![Vec::new(); placement.servers().len()];
    for &tensor in tensors {
        let share = share("absent", manifest, shares, tensor)?;
        let spec = &manifest.tensors()[tensor];
        check_owner(manifest, tensor)?;
        if !spec.trains() {
            let what = format!("tensor {:?}", spec.name);
            return Err(Error::invalid(what, "said to be absent", "left out: it does not train"));
        }
        let ours =
            |slice: &usize| share.contributes() && !share.region.part(&manifest.slices()[*slice]).is_empty();
        for slice in manifest.slices_of(tensor).filter(ours) {
            slices[placement.primary(slice)].push(slice as u32);
        }
    }
    let plans = placement.servers().iter().zip(&slices).flat_map(|(server, slices)| {
        slices.chunks(ABSENT_A_PUSH).map(|absent| Plan {
            server: server.clone(),
            parts: Vec::new(),
            absent: absent.to_vec(),
        })
    });
    Ok(plans.collect())
}

fn check_owner(manifest: &Manifest, tensor: usize) -> Result<()> {
    if manifest.owner(tensor) == tensor {
        return Ok(());
    }
    let owner = &manifest.tensors()[manifest.owner(tensor)].name;
    let what = format!("data for tensor {:?}", manifest.tensors()[tensor].name);
    Err(Error::invalid(what, "pushed", format!("added to that of {owner:?}, which it is tied to")))
}

impl Plan {
    /// Pushes everything, also what an earlier try has pushed: the server skips it.
    pub(crate) async fn push(
        &mut self,
        shards: &Shards,
        begin: pb::PushBegin,
        dtype: DType,
        chunk_bytes: usize,
    ) -> Result<pb::PushResponse> {
        let shard = shards.get(&self.server)?;
        let bytes = self.parts.iter().map(|part| part.range.len() * dtype.size()).sum::<usize>();
        let body = StreamBody::new(self.frames(begin, dtype, chunk_bytes));
        let pushed = async {
            let body = call(&shard.push, "/zeroshard.v1.Data/Push", body, &shard.peer).await?;
            let unavailable = |cause: String| Error::Unavailable { peer: shard.peer.clone(), cause };
            let answer = body.collect().await.map_err(|e| unavailable(e.to_string()))?;
            let trailers = answer.trailers().cloned().unwrap_or_default();
            finish(&trailers, &shard.peer)?;
            let message = answer.to_bytes();
            let message = message.get(5..).ok_or_else(|| unavailable("an empty answer".to_owned()))?;
            pb::PushResponse::decode(message).map_err(|e| unavailable(e.to_string()))
        };
        let pushed = pushed.await;
        match &pushed {
            Ok(_) => _ = shards.pushed.fetch_add(bytes as u64, Ordering::Relaxed),
            Err(Error::ParkingFull { slice, .. }) => self.put_off(*slice),
            Err(_) => {}
        }
        pushed
    }

    /// Next time `slice` and those before it come last: other ranks may wait for what is behind it.
    fn put_off(&mut self, slice: u32) {
        if let Some(position) = self.parts.iter().position(|part| part.slice == slice) {
            self.parts.rotate_left(position + 1);
        }
    }

    fn frames(
        &self,
        begin: pb::PushBegin,
        dtype: DType,
        chunk_bytes: usize,
    ) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static {
        let mut writer = Writer::default();
        writer.begin(pb::PushBegin { absent: self.absent.clone(), ..begin });
        let parts = VecDeque::from(self.parts.clone());
        let chunk = (chunk_bytes / dtype.size()).max(1);
        let sending = Sending { writer, parts, sent: 0, dtype, chunk };
        stream::unfold(sending, |mut sending| async {
            let frame = sending.next_frame()?;
            Some((Ok(Frame::data(frame)), sending))
        })
    }
}

struct Sending {
    writer: Writer,
    parts: VecDeque<Part>,
    /// Elements of the first part that are sent.
    sent: usize,
    dtype: DType,
    /// Elements a message.
    chunk: usize,
}

impl Sending {
    fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.writer.next_frame() {
                return Some(frame);
            }
            let Some(part) = self.parts.front() else {
                self.writer.flush();
                return self.writer.next_frame();
            };
            let end = part.range.len().min(self.sent + self.chunk);
            let range = part.range.start + self.sent..part.range.start + end;
            let payload = part.data.encode(range, self.dtype);
            let extent = Extent { slice: part.slice, offset: self.sent as u64, dtype: self.dtype };
            self.writer.extent(extent, payload);
            self.sent = end;
            if self.sent == part.range.len() {
                self.sent = 0;
                self.parts.pop_front();
            }
        }
    }
}
