//! Pushing: values go from the caller's array to the socket, slice by slice. Values that already
//! have the wire's dtype are not copied.

use std::{
    convert::Infallible,
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use bytes::Bytes;
use futures_util::Stream;
use http_body::Frame;
use http_body_util::StreamBody;
use zeroshard_model::{Error, Manifest, Placement, Result, Server, TensorId, local::LocalTensor};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::{
    Wire,
    frame::Writer,
    pb::{self, push_begin::Contents as Message},
};

use crate::{
    Options,
    call::unary,
    exchange::{Exchange, Sums},
    local::{check_owner, check_size, local},
    retry::{Next, Tries, is_answer},
    shards::{Shard, Shards},
    values::Values,
    window::{Guard, Sender, Window},
    windows::{Holder, Of, Windows},
};
use frames::Frames;

mod frames;

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
    /// The shared memory with servers on this host.
    pub(crate) windows: &'a Windows,
    /// The encoding of the elements.
    pub(crate) encoding: Encoding,
    pub(crate) deadline: Deadline,
    /// The trace of the step.
    pub(crate) trace: Trace,
}

/// How the elements of a push are encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoding {
    pub(crate) wire: Wire,
    /// The seed of the rounding to int8.
    pub(crate) seed: u64,
    /// The step of gradients, which decides on their rounding to int8.
    pub(crate) step: u64,
}

impl Sending<'_> {
    /// The window of a server, if there is one.
    async fn window(&self, server: &Server, shard: &Shard) -> Result<Option<Arc<Window>>> {
        let pb::PushBegin { job, job_id, rank, lease, .. } = self.begin;
        let holder = Holder::Rank { rank: *rank, lease: *lease };
        let of = Of { job, job_id: *job_id, holder };
        self.windows.get(server, shard, of).await
    }
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
    tensor: u32,
    /// The lowest rank whose gradient is part of the values.
    lowest: u32,
    /// The number of the element at offset 0 for the rounding: the slice's first element in the
    /// tensor, and what the rank holds of the slice before its share. It is a multiple of a tile.
    origin: usize,
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
    /// Initial values, from the uploading ranks.
    Uploaded(Vec<TensorData>),
    /// New values, from the ranks that may push them.
    Replaced(Vec<TensorData>),
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
            return Ok(plan_sums(manifest, placement, exchange, sums, is_present));
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
        Contents::Replaced(data) => (data, LocalTensor::replaces, Placement::owners),
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
                let turn = local.turn(slice as u32).unwrap_or_default();
                let of = (slice as u32, local.rank());
                let values = SliceValues::new(manifest, of, data.clone(), range, turn);
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
    manifest: &Manifest,
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
        let of = (piece.slice, piece.ranks.iter().copied().min().unwrap_or(exchange.rank()));
        let values = SliceValues::new(manifest, of, data.clone(), range, piece.turn);
        let push = &mut pushes[placement.primary(piece.slice as usize)];
        // The server counts from the first element of the share.
        push.values.push(SliceValues { origin: values.origin + piece.offset, ..values });
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
            let name = &spec.name;
            let sentence = format!("tensor {name:?} is not trained; do not declare it absent");
            Err(Error::refused(sentence))
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
            .with("zeroshard.bytes", self.bytes(how.encoding.wire) as i64);
        let sent = self.send_in(&span, how).await;
        sent.inspect_err(|error| span.fail(error))
    }

    async fn send_in(mut self, span: &Span, how: &Sending<'_>) -> Result<()> {
        let &Sending { shards, options, begin, encoding, deadline, .. } = how;
        let what = match &begin.contents {
            Some(Message::Gradients(gradients)) => format!("push of step {}", gradients.step),
            _ => "upload".to_owned(),
        };
        let waiting_for = format!(
            "shard server {} to accept data of rank {} ({what}) in epoch {}",
            self.server.address, begin.rank, begin.epoch
        );
        let mut tries = Tries::until(deadline);
        loop {
            let shard = shards.get(&self.server)?;
            let window = how.window(&self.server, &shard);
            let window = tries.limit(|| waiting_for.clone(), window).await??;
            let guard = Guard::new(window.clone());
            let sender = window.map(Sender::new);
            let frames = self.frames(begin, encoding, options.chunk_bytes, sender.clone());
            let body = StreamBody::new(frames);
            let connection = shard.push.within(tries.timeout()).in_span(span);
            let pushed = unary(&connection, "/zeroshard.v1.DataService/Push", body, &shard.peer);
            let before = self.bytes(encoding.wire);
            let pushed: Result<pb::PushResponse> =
                tries.limit(|| waiting_for.clone(), pushed).await?;
            if pushed.as_ref().err().is_none_or(is_answer) {
                guard.disarm();
                sender.iter().for_each(|sender| sender.end());
            }
            if let Err(Error::ParkingFull { slice, offset, .. }) = pushed {
                self.put_off(slice, offset, encoding.wire.grain());
            }
            let left = if pushed.is_ok() { 0 } else { self.bytes(encoding.wire) };
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

    fn bytes(&self, wire: Wire) -> u64 {
        self.values.iter().map(|values| wire.bytes(values.range.len()) as u64).sum()
    }

    /// The server has accepted the elements of `slice` before `offset` and has refused the others
    /// for now. They are sent last in the next try, because other ranks may wait for the slices
    /// behind them. What is sent begins at a multiple of `grain`: the server skips what it has.
    fn put_off(&mut self, slice: u32, offset: u64, grain: usize) {
        let refused = self.values.iter().position(|values| values.slice == slice);
        let Some(refused) = refused else { return };
        let mut values = self.values.drain(..=refused).next_back().expect("the range is not empty");
        let taken =
            usize::try_from(offset).ok().and_then(|offset| offset.checked_sub(values.offset));
        let taken = taken.map(|taken| taken - taken % grain);
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
        encoding: Encoding,
        chunk_bytes: usize,
        sender: Option<Arc<Sender>>,
    ) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + use<> {
        let mut writer = Writer::default();
        let mut begin = begin.clone();
        begin.window = sender.as_ref().map_or(0, |sender| sender.window().number());
        match &mut begin.contents {
            Some(Message::Gradients(gradients)) => {
                gradients.absent.clone_from(&self.absent);
                gradients.overflow.clone_from(&self.overflow);
            }
            Some(Message::Upload(upload)) => upload.kept.clone_from(&self.absent),
            // Replacements cannot be absent.
            Some(Message::Replacement(_)) | None => {}
        }
        writer.begin(begin);
        Frames::new(writer, self.values.clone(), encoding, chunk_bytes, sender).stream()
    }
}

impl SliceValues {
    fn new(
        manifest: &Manifest,
        (slice, lowest): (u32, u32),
        data: Values,
        range: Range<usize>,
        turn: usize,
    ) -> Self {
        let of = &manifest.slices()[slice as usize];
        let (tensor, origin) = (of.tensor as u32, of.offset);
        Self { slice, tensor, lowest, origin, data, range, offset: 0, turn }
    }
}

#[cfg(test)]
mod tests;
