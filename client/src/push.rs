//! Pushing: values go from the caller's array to the socket, slice by slice. Values that already
//! have the wire's dtype are not copied.

use std::{collections::VecDeque, convert::Infallible, ops::Range, sync::atomic::Ordering};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http_body::Frame;
use http_body_util::StreamBody;
use zeroshard_model::{
    DType, Error, Manifest, Placement, Result, Server, TensorId, local::LocalTensor,
};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::{
    frame::{Extent, Writer},
    pb::{self, push_begin::Contents as Wire},
};

use crate::{
    Options,
    call::unary,
    exchange::{Exchange, Sums},
    local::{check_owner, check_size, local},
    retry::{Next, Tries},
    shards::Shards,
    values::Values,
};

/// A tensor and its values to be sent: parameters, optimizer state, or a gradient, depending on the
/// method.
#[derive(Debug, Clone)]
pub struct TensorData {
    /// The tensor. It must own its storage (it must not be tied to another).
    pub tensor: TensorId,
    /// The box of the tensor that this rank holds according to the tensor's layout (without a
    /// layout: the whole tensor), row-major.
    pub data: Values,
}

impl TensorData {
    /// Values of a tensor.
    pub fn new(tensor: TensorId, data: impl Into<Values>) -> Self {
        Self { tensor, data: data.into() }
    }
}

/// The part of a push that goes to one server.
#[derive(Debug, Clone)]
pub(crate) struct ServerPush {
    pub(crate) server: Server,
    values: Vec<SliceValues>,
    /// Slices for which the rank sends nothing more.
    absent: Vec<u32>,
    /// Slices of which the sum over the group is not finite.
    overflow: Vec<pb::Overflow>,
    /// `true` if the server may still be opening the job, to become a backup.
    may_be_opening: bool,
}

/// The settings of a push that are the same for all servers.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    pub(crate) shards: &'a Shards,
    pub(crate) options: &'a Options,
    /// The first message.
    pub(crate) begin: &'a pb::PushBegin,
    /// The dtype on the wire.
    pub(crate) dtype: DType,
    pub(crate) deadline: Deadline,
    /// The trace of the step.
    pub(crate) trace: Trace,
}

/// The maximum number of absent slices in one push. The message that opens a push is at most 4 KiB
/// long, and the number of a slice takes up to five bytes; the limit leaves space for the other
/// fields.
const MAX_ABSENT: usize = 400;

/// The maximum number of slices in one push whose overflows have names. A report needs the first.
const MAX_OVERFLOWS: usize = 32;

/// Values for one slice.
#[derive(Debug, Clone)]
struct SliceValues {
    slice: u32,
    data: Values,
    /// The elements of `data` to be sent.
    range: Range<usize>,
    /// The position of the first of them among the elements that the rank holds of the slice.
    offset: usize,
    /// The rank's position in the slice's order of addition.
    turn: usize,
}

/// The contents of a push.
#[derive(Debug)]
pub(crate) enum Contents<'a> {
    /// Gradients, from every contributing rank.
    Contributed(Vec<TensorData>),
    /// Values, from the uploading ranks.
    Uploaded(Vec<TensorData>),
    /// Sums over the group, which this rank has made, and whether any rank of the group has a
    /// gradient of each tensor.
    Sums(&'a Exchange, Sums, &'a [bool]),
    /// Tensors for which the rank has nothing more to send.
    Absent(&'a [TensorId]),
    /// Tensors of which the rank uploads nothing.
    Kept(&'a [TensorId]),
}

/// Plans the parts of a push, by server. Values that the rank does not have to send are omitted.
/// `locals` are the tensor parts of the rank.
///
/// # Errors
/// [`Error::Invalid`] for a tensor that does not exist, is tied to another or has a different size,
/// and for an absent tensor that is not trained.
pub(crate) fn plan(
    manifest: &Manifest,
    placement: &Placement,
    locals: &[LocalTensor],
    contents: Contents<'_>,
) -> Result<Vec<ServerPush>> {
    // Primaries send their backups the sums of the gradients, and nothing else.
    let (data, sends, receivers): (_, fn(&LocalTensor) -> bool, Receivers) = match contents {
        Contents::Sums(exchange, sums, is_present) => {
            return Ok(plan_sums(placement, exchange, sums, is_present));
        }
        Contents::Absent(tensors) => {
            let sends = LocalTensor::pushes;
            let pushes = plan_absent(manifest, placement, locals, tensors, sends, primary)?;
            return check_trains(manifest, tensors).map(|()| pushes);
        }
        Contents::Kept(tensors) => {
            let sends = |local: &LocalTensor, _, numel| numel > 0 && local.uploads();
            return plan_absent(manifest, placement, locals, tensors, sends, Placement::owners);
        }
        Contents::Contributed(data) => (data, LocalTensor::contributes, primary),
        Contents::Uploaded(data) => (data, LocalTensor::uploads, Placement::owners),
    };
    let mut pushes = empty(placement);
    for TensorData { tensor, data } in data {
        let local = local("pushed", manifest, locals, tensor)?;
        let tensor = tensor.index();
        check_size("data for", manifest, tensor, &local.of, data.len())?;
        check_owner(manifest, tensor)?;
        if !sends(local) {
            continue;
        }
        for slice in manifest.slices_of(tensor) {
            let range = local.of.in_slice(&manifest.slices()[slice]);
            if !range.is_empty() {
                let (index, data) = (slice as u32, data.clone());
                let turn = local.turn(index).unwrap_or_default();
                let values = SliceValues { slice: index, data, range, offset: 0, turn };
                for &server in receivers(placement, slice) {
                    pushes[server as usize].values.push(values.clone());
                }
            }
        }
    }
    Ok(in_order(pushes))
}

fn empty(placement: &Placement) -> Vec<ServerPush> {
    let push = |server: &Server| ServerPush {
        server: server.clone(),
        values: Vec::new(),
        absent: Vec::new(),
        overflow: Vec::new(),
        may_be_opening: placement.replicas() > 1,
    };
    placement.servers().iter().map(push).collect()
}

/// Slices whose gradient can be added first are sent first.
fn in_order(mut pushes: Vec<ServerPush>) -> Vec<ServerPush> {
    for push in &mut pushes {
        push.values.sort_by_key(|values| values.turn);
    }
    pushes.retain(|push| !push.values.is_empty());
    pushes
}

fn plan_sums(
    placement: &Placement,
    exchange: &Exchange,
    sums: Sums,
    is_present: &[bool],
) -> Vec<ServerPush> {
    let Sums { values: data, overflow } = sums;
    let mut pushes = empty(placement);
    let mut begin = 0;
    for piece in exchange.own_pushes() {
        let range = begin..begin + piece.elements.len();
        begin = range.end;
        if !is_present[piece.tensor] {
            continue;
        }
        let (slice, turn, data) = (piece.slice, piece.turn, data.clone());
        let push = &mut pushes[placement.primary(slice as usize)];
        push.values.push(SliceValues { slice, data, range, offset: 0, turn });
    }
    for overflow in overflow {
        let push = &mut pushes[placement.primary(overflow.slice as usize)];
        if push.overflow.len() < MAX_OVERFLOWS {
            push.overflow.push(overflow);
        }
    }
    in_order(pushes)
}

/// The positions in the placement of the servers that receive data of a slice.
type Receivers = fn(&Placement, usize) -> &[u32];

/// The primary of a slice.
fn primary(placement: &Placement, slice: usize) -> &[u32] {
    &placement.owners(slice)[..1]
}

fn plan_absent(
    manifest: &Manifest,
    placement: &Placement,
    locals: &[LocalTensor],
    tensors: &[TensorId],
    sends: fn(&LocalTensor, u32, usize) -> bool,
    receivers: Receivers,
) -> Result<Vec<ServerPush>> {
    let mut slices = vec![Vec::new(); placement.servers().len()];
    for &tensor in tensors {
        let local = local("absent", manifest, locals, tensor)?;
        let tensor = tensor.index();
        check_owner(manifest, tensor)?;
        let ours = |slice: &usize| {
            let held = local.of.in_slice(&manifest.slices()[*slice]);
            sends(local, *slice as u32, held.len())
        };
        for slice in manifest.slices_of(tensor).filter(ours) {
            for &server in receivers(placement, slice) {
                slices[server as usize].push(slice as u32);
            }
        }
    }
    let pushes = placement.servers().iter().zip(&slices).flat_map(|(server, slices)| {
        slices.chunks(MAX_ABSENT).map(|absent| ServerPush {
            server: server.clone(),
            values: Vec::new(),
            absent: absent.to_vec(),
            overflow: Vec::new(),
            may_be_opening: placement.replicas() > 1,
        })
    });
    Ok(pushes.collect())
}

fn check_trains(manifest: &Manifest, tensors: &[TensorId]) -> Result<()> {
    let specs = tensors.iter().map(|tensor| &manifest.tensors()[tensor.index()]);
    match specs.into_iter().find(|spec| !spec.trains()) {
        None => Ok(()),
        Some(spec) => {
            let what = format!("tensor {:?}", spec.name);
            Err(Error::invalid(what, "declared absent", "omitted: it is not trained"))
        }
    }
}

impl ServerPush {
    /// Sends everything, with retries after transient errors. The server skips elements that it
    /// receives again.
    ///
    /// # Errors
    /// Those of the server; [`Error::Timeout`] after the deadline.
    pub(crate) async fn send(self, how: &Sending<'_>) -> Result<()> {
        let mut span = how
            .trace
            .span("push", SpanKind::Client)
            .with("server.address", self.server.address.clone())
            .with("zeroshard.rank", i64::from(how.begin.rank))
            .with("zeroshard.bytes", self.bytes(how.dtype) as i64);
        let sent = self.send_in(&span, how).await;
        sent.inspect_err(|error| span.fail(error))
    }

    async fn send_in(mut self, span: &Span, how: &Sending<'_>) -> Result<()> {
        let &Sending { shards, options, begin, dtype, deadline, .. } = how;
        let what = match &begin.contents {
            Some(Wire::Gradients(gradients)) => format!("push of step {}", gradients.step),
            _ => "upload".to_owned(),
        };
        let waiting_for = format!(
            "shard server {} to accept data of rank {} ({what}) in epoch {}",
            self.server.address, begin.rank, begin.epoch
        );
        let mut tries = Tries::until(deadline);
        loop {
            let shard = shards.get(&self.server)?;
            let body = StreamBody::new(self.frames(begin, dtype, options.chunk_bytes));
            let connection = shard.push.within(tries.timeout()).in_span(span);
            let pushed = unary(&connection, "/zeroshard.v1.DataService/Push", body, &shard.peer);
            let before = self.bytes(dtype);
            let pushed: Result<pb::PushResponse> =
                tries.limit(|| waiting_for.clone(), pushed).await?;
            if let Err(Error::ParkingFull { slice, offset, .. }) = pushed {
                self.put_off(slice, offset);
            }
            let left = if pushed.is_ok() { 0 } else { self.bytes(dtype) };
            shards.pushed.fetch_add(before - left, Ordering::Relaxed);
            let error = match pushed {
                Ok(_) => return Ok(()),
                Err(Error::UnknownJob { job }) if self.may_be_opening => Error::Unavailable {
                    peer: shard.peer,
                    cause: format!("it has not opened job {job:?} yet"),
                },
                Err(error) => error,
            };
            if let Next::Refresh(error) = tries.next(error).await? {
                return Err(error);
            }
        }
    }

    fn bytes(&self, dtype: DType) -> u64 {
        self.values.iter().map(|values| (values.range.len() * dtype.size()) as u64).sum()
    }

    /// The server has accepted the elements of `slice` before `offset` and has refused the others
    /// for now. They are sent last in the next try, because other ranks may wait for the slices
    /// behind them.
    fn put_off(&mut self, slice: u32, offset: u64) {
        let refused = self.values.iter().position(|values| values.slice == slice);
        let Some(refused) = refused else { return };
        let mut values = self.values.drain(..=refused).next_back().expect("the range is not empty");
        let taken =
            usize::try_from(offset).ok().and_then(|offset| offset.checked_sub(values.offset));
        // The server cannot have accepted elements that were not sent.
        if let Some(taken) = taken.filter(|&taken| taken <= values.range.len()) {
            values.offset += taken;
            values.range.start += taken;
        }
        if !values.range.is_empty() {
            self.values.push(values);
        }
    }

    fn frames(
        &self,
        begin: &pb::PushBegin,
        dtype: DType,
        chunk_bytes: usize,
    ) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + use<> {
        let mut writer = Writer::default();
        let mut begin = begin.clone();
        match &mut begin.contents {
            Some(Wire::Gradients(gradients)) => {
                gradients.absent.clone_from(&self.absent);
                gradients.overflow.clone_from(&self.overflow);
            }
            Some(Wire::Upload(upload)) => upload.kept.clone_from(&self.absent),
            // Replacements cannot be absent.
            Some(Wire::Replacement(_)) | None => {}
        }
        writer.begin(begin);
        let values = VecDeque::from(self.values.clone());
        let chunk = (chunk_bytes / dtype.size()).max(1);
        let frames = Frames { writer, values, sent: 0, dtype, chunk };
        stream::unfold(frames, |mut frames| async {
            let frame = frames.next_frame()?;
            Some((Ok(Frame::data(frame)), frames))
        })
    }
}

/// The frames of a push.
struct Frames {
    writer: Writer,
    values: VecDeque<SliceValues>,
    /// The number of elements of the first slice that have been sent.
    sent: usize,
    dtype: DType,
    /// Elements per message.
    chunk: usize,
}

impl Frames {
    fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.writer.next_frame() {
                return Some(frame);
            }
            let Some(values) = self.values.front() else {
                self.writer.flush();
                return self.writer.next_frame();
            };
            let end = values.range.len().min(self.sent + self.chunk);
            let range = values.range.start + self.sent..values.range.start + end;
            let payload = values.data.encode(range, self.dtype);
            let offset = (values.offset + self.sent) as u64;
            let extent = Extent { slice: values.slice, offset, dtype: self.dtype };
            self.writer.extent(extent, payload);
            self.sent = end;
            if self.sent == values.range.len() {
                self.sent = 0;
                self.values.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zeroshard_model::{JobSpec, TensorSpec};

    use super::*;

    /// Three slices of one rank on one server: two of a large tensor and one of a small tensor.
    fn plan() -> ServerPush {
        let tensors =
            vec![TensorSpec::new("large", [4_194_304 + 10]), TensorSpec::new("small", [5])];
        let spec =
            JobSpec::new("job", Manifest::new(tensors).unwrap(), vec!["sgd".parse().unwrap()]);
        let server = Server { id: 1, incarnation: 1, address: "host:1".into() };
        let placement = Placement::new(vec![server], 1, vec![0; 3]).unwrap();
        let numbers = |numel: usize| (0..numel).map(|i| i as f32).collect::<Vec<_>>();
        let data = [4_194_304 + 10, 5]
            .into_iter()
            .enumerate()
            .map(|(tensor, numel)| TensorData::new(TensorId::new(tensor), numbers(numel)))
            .collect();
        let locals = LocalTensor::all(&spec, 0);
        super::plan(&spec.manifest, &placement, &locals, Contents::Contributed(data))
            .unwrap()
            .remove(0)
    }

    /// The slice, first element and number of elements of all values to be sent.
    fn values_of(plan: &ServerPush) -> Vec<(u32, usize, usize)> {
        plan.values.iter().map(|values| (values.slice, values.offset, values.range.len())).collect()
    }

    #[test]
    fn after_a_full_buffer_only_refused_elements_are_sent_and_the_refused_slice_is_last() {
        let mut plan = plan();
        assert_eq!(values_of(&plan), [(0, 0, 4_194_304), (1, 0, 10), (2, 0, 5)]);
        plan.put_off(1, 4);
        assert_eq!(values_of(&plan), [(2, 0, 5), (1, 4, 6)]);
        assert_eq!(plan.values[1].range, 4_194_308..4_194_314, "the values follow the numbers");
        plan.put_off(1, 7);
        assert_eq!(values_of(&plan), [(1, 7, 3)]);
        plan.put_off(1, 10);
        assert!(values_of(&plan).is_empty());
    }

    #[test]
    fn a_refusal_of_unsent_elements_drops_nothing() {
        let mut plan = plan();
        plan.put_off(7, 0);
        assert_eq!(values_of(&plan), [(0, 0, 4_194_304), (1, 0, 10), (2, 0, 5)]);
        plan.put_off(1, u64::MAX);
        assert_eq!(values_of(&plan), [(2, 0, 5), (1, 0, 10)]);
        plan.put_off(1, 6);
        plan.put_off(1, 5);
        assert_eq!(values_of(&plan), [(1, 6, 4)], "an earlier element than the first");
    }

    #[tokio::test]
    async fn the_rest_of_a_refused_slice_keeps_its_element_numbers() {
        use futures_util::StreamExt;
        use zeroshard_proto::frame::{Decoder, Event};

        let mut plan = plan();
        plan.put_off(1, 4);
        let mut decoder = Decoder::new(1 << 20);
        let mut frames = std::pin::pin!(plan.frames(&pb::PushBegin::default(), DType::F32, 16));
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
