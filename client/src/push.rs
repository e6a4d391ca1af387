//! Pushing: gradients go from the caller's array to the socket, slice by slice; without a copy
//! where they are of the wire's dtype.

use std::{
    collections::VecDeque, convert::Infallible, ops::Range, sync::atomic::Ordering, time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use zeroshard_proto::{
    DType, Error, Manifest, Placement, Result, Server,
    frame::{Extent, Writer, decode_message},
    pb::{self, push_begin::Contents as Wire},
};

use crate::{
    call::{call, finish},
    pull::{check_size, share},
    region::Share,
    shards::Shards,
    values::Values,
};

/// A tensor and its values, to be sent: parameters, optimizer state, a gradient or a buffer's
/// content, as the method that takes it says.
#[derive(Debug, Clone)]
pub struct TensorData {
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

/// The message that opens a push takes 4 KiB: with so many slices, of five bytes at most, job and
/// part fit too.
const ABSENT_A_PUSH: usize = 400;

#[derive(Debug, Clone)]
struct Part {
    slice: u32,
    data: Values,
    /// The elements in `data` that are to be sent.
    range: Range<usize>,
    /// Number of the first of them, among those that the rank has of the slice.
    offset: usize,
    /// How many ranks add to the slice before us.
    waits: u32,
}

/// What a push is of.
#[derive(Debug)]
pub(crate) enum Contents<'a> {
    /// What each rank contributes: gradients.
    Contributed(Vec<TensorData>),
    /// What one of the ranks that have the same uploads: initial values, buffers.
    Uploaded(Vec<TensorData>),
    /// Tensors of which the rank has nothing more.
    Absent(&'a [usize]),
}

/// Which server receives what. `shares` are the rank's; what it need not send is left out.
///
/// # Errors
/// [`Error::Invalid`] for a tensor that does not exist, is tied to another, or has another size;
/// for an absent one that does not train.
pub(crate) fn plan(
    manifest: &Manifest,
    placement: &Placement,
    shares: &[Share],
    contents: Contents<'_>,
) -> Result<Vec<Plan>> {
    let (data, sends): (_, fn(&Share) -> bool) = match contents {
        Contents::Absent(tensors) => return plan_absent(manifest, placement, shares, tensors),
        Contents::Contributed(data) => (data, Share::contributes),
        Contents::Uploaded(data) => (data, Share::uploads),
    };
    let plan =
        |server: &Server| Plan { server: server.clone(), parts: Vec::new(), absent: Vec::new() };
    let mut plans: Vec<_> = placement.servers().iter().map(plan).collect();
    for TensorData { tensor, data } in data {
        let share = share("data for", manifest, shares, tensor)?;
        check_size("data for", manifest, tensor, &share.region, data.len())?;
        check_owner(manifest, tensor)?;
        if !sends(share) {
            continue;
        }
        for slice in manifest.slices_of(tensor) {
            let range = share.region.part(&manifest.slices()[slice]);
            if !range.is_empty() {
                let (slice, waits, data) = (slice as u32, share.waits(slice as u32), data.clone());
                let part = Part { slice, data, range, offset: 0, waits };
                plans[placement.primary(slice as usize)].parts.push(part);
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

fn plan_absent(
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
        let ours = |slice: &usize| {
            share.contributes() && !share.region.part(&manifest.slices()[*slice]).is_empty()
        };
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
    /// Pushes what no earlier try is known to have pushed. What comes again the server skips.
    pub(crate) async fn push(
        &mut self,
        shards: &Shards,
        begin: pb::PushBegin,
        dtype: DType,
        chunk_bytes: usize,
        timeout: Duration,
    ) -> Result<pb::PushResponse> {
        let shard = shards.get(&self.server)?;
        let bytes = self.parts.iter().map(|part| part.range.len() * dtype.size()).sum::<usize>();
        let body = StreamBody::new(self.frames(begin, dtype, chunk_bytes));
        let pushed = async {
            let connection = shard.push.within(timeout);
            let path = "/zeroshard.v1.DataService/Push";
            let body = call(&connection, path, body, &shard.peer).await?;
            let unavailable =
                |cause: String| Error::Unavailable { peer: shard.peer.clone(), cause };
            let answer = body.collect().await.map_err(|e| unavailable(e.to_string()))?;
            let trailers = answer.trailers().cloned().unwrap_or_default();
            finish(&trailers, &shard.peer)?;
            decode_message(&answer.to_bytes())
        };
        let pushed = pushed.await;
        match &pushed {
            Ok(_) => _ = shards.pushed.fetch_add(bytes as u64, Ordering::Relaxed),
            Err(Error::ParkingFull { slice, offset, .. }) => {
                self.put_off(*slice, *offset);
                let rest = self.parts.iter().map(|part| part.range.len() * dtype.size()).sum();
                shards.pushed.fetch_add(bytes.saturating_sub(rest) as u64, Ordering::Relaxed);
            }
            Err(_) => {}
        }
        pushed
    }

    /// The server has taken what comes before element `offset` of `slice`, and refused the rest of
    /// that slice for now. The rest comes last next time: other ranks may wait for what is behind
    /// it.
    fn put_off(&mut self, slice: u32, offset: u64) {
        let Some(refused) = self.parts.iter().position(|part| part.slice == slice) else { return };
        let mut part = self.parts.drain(..=refused).next_back().expect("the range is not empty");
        let taken = usize::try_from(offset).ok().and_then(|offset| offset.checked_sub(part.offset));
        // What the plan does not have was not taken from it.
        if let Some(taken) = taken.filter(|&taken| taken <= part.range.len()) {
            part.offset += taken;
            part.range.start += taken;
        }
        if !part.range.is_empty() {
            self.parts.push(part);
        }
    }

    fn frames(
        &self,
        mut begin: pb::PushBegin,
        dtype: DType,
        chunk_bytes: usize,
    ) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static {
        let mut writer = Writer::default();
        if let Some(Wire::Gradients(gradients)) = &mut begin.contents {
            gradients.absent = self.absent.clone();
        }
        writer.begin(begin);
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
            let offset = (part.offset + self.sent) as u64;
            let extent = Extent { slice: part.slice, offset, dtype: self.dtype };
            self.writer.extent(extent, payload);
            self.sent = end;
            if self.sent == part.range.len() {
                self.sent = 0;
                self.parts.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zeroshard_proto::{JobSpec, TensorSpec};

    use super::*;

    /// Three slices on one server, of one rank: two of a large tensor, one of a small one.
    fn plan() -> Plan {
        let tensors =
            vec![TensorSpec::new("large", [4_194_304 + 10]), TensorSpec::new("small", [5])];
        let spec =
            JobSpec::new("job", Manifest::new(tensors).unwrap(), vec!["sgd".parse().unwrap()]);
        let server = Server { id: 1, incarnation: 1, address: "host:1".into() };
        let placement = Placement::new(vec![server], 1, vec![0; 3]).unwrap();
        let values = |numel: usize| (0..numel).map(|i| i as f32).collect::<Vec<_>>().into();
        let data = [4_194_304 + 10, 5]
            .into_iter()
            .enumerate()
            .map(|(tensor, numel)| TensorData { tensor, data: values(numel) })
            .collect();
        let shares = Share::all(&spec, 0);
        super::plan(&spec.manifest, &placement, &shares, Contents::Contributed(data))
            .unwrap()
            .remove(0)
    }

    /// Slice, first element and number of elements of every part that would be sent.
    fn parts(plan: &Plan) -> Vec<(u32, usize, usize)> {
        plan.parts.iter().map(|part| (part.slice, part.offset, part.range.len())).collect()
    }

    #[test]
    fn after_a_full_buffer_only_what_was_not_taken_is_sent_and_the_refused_slice_comes_last() {
        let mut plan = plan();
        assert_eq!(parts(&plan), [(0, 0, 4_194_304), (1, 0, 10), (2, 0, 5)]);
        plan.put_off(1, 4);
        assert_eq!(parts(&plan), [(2, 0, 5), (1, 4, 6)]);
        assert_eq!(plan.parts[1].range, 4_194_308..4_194_314, "the values follow the numbers");
        plan.put_off(1, 7);
        assert_eq!(parts(&plan), [(1, 7, 3)]);
        plan.put_off(1, 10);
        assert!(parts(&plan).is_empty());
    }

    #[test]
    fn a_refusal_of_what_was_not_sent_drops_nothing_of_it() {
        let mut plan = plan();
        plan.put_off(7, 0);
        assert_eq!(parts(&plan), [(0, 0, 4_194_304), (1, 0, 10), (2, 0, 5)]);
        plan.put_off(1, u64::MAX);
        assert_eq!(parts(&plan), [(2, 0, 5), (1, 0, 10)]);
        plan.put_off(1, 6);
        plan.put_off(1, 5);
        assert_eq!(parts(&plan), [(1, 6, 4)], "an earlier element than the first");
    }

    #[tokio::test]
    async fn the_rest_of_a_refused_slice_is_sent_under_its_own_numbers() {
        use futures_util::StreamExt;
        use zeroshard_proto::frame::{Decoder, Event};

        let mut plan = plan();
        plan.put_off(1, 4);
        let mut decoder = Decoder::new(1 << 20);
        let mut frames = std::pin::pin!(plan.frames(pb::PushBegin::default(), DType::F32, 16));
        let mut extents = Vec::new();
        while let Some(Ok(frame)) = frames.next().await {
            decoder.feed(frame.into_data().unwrap());
            while let Some(event) = decoder.next().unwrap() {
                if let Event::Extent(extent, elements) = event {
                    extents.push((extent.slice, extent.offset, elements));
                }
            }
        }
        assert_eq!(extents, [(2, 0, 4), (2, 4, 1), (1, 4, 4), (1, 8, 2)]);
    }
}
