//! Pulling: data is copied once, from the network buffer, or from memory that a server on this host
//! shares, into the caller's array.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use http_body_util::Full;
use zeroshard_model::{
    DType, Error, Manifest, Placement, Result, Server, StridedBox, TensorBox, TensorId,
    local::LocalTensor,
};
use zeroshard_net::trace::{Span, SpanKind, Trace};
use zeroshard_proto::{
    Wire,
    convert::box_message,
    frame::{Event, Extent, Reader, Reference, encode_message},
    pb,
};
use zeroshard_shm::Keeper;

use crate::{
    call::{call, finish},
    exchange::Exchange,
    local::{check_size, local},
    retry::is_answer,
    shards::{Shard, Shards},
    state_selector::StateSelector,
    values::Slots,
    window::{Guard, Hold, Window},
};

/// The longest message that a server may send. It is longer than the largest chunk that can be
/// requested.
const MAX_MESSAGE: usize = 64 << 20;

/// The destination of a tensor's parameters.
#[derive(Debug)]
pub struct Target<'a> {
    /// The tensor.
    pub tensor: TensorId,
    /// The box to pull; `None`: the box that the rank holds according to the tensor's layout
    /// (without a layout: the whole tensor).
    pub bounds: Option<TensorBox>,
    /// The destination of all elements of the box, row-major.
    pub data: Slots<'a>,
}

impl<'a> Target<'a> {
    /// A target for the box that the rank holds of a tensor.
    pub fn new(tensor: TensorId, data: impl Into<Slots<'a>>) -> Self {
        Self { tensor, bounds: None, data: data.into() }
    }
}

/// The part of a pull that comes from one server.
pub(crate) struct ServerPull<'a> {
    pub(crate) server: Server,
    /// The encoding of the elements.
    wire: Wire,
    /// The boxes to pull of tensors that are not pulled as a whole, by tensor.
    boxes: BTreeMap<u32, pb::Box>,
    /// The destinations, in the order of transmission. INVARIANT: none is empty.
    rest: VecDeque<SliceSlots<'a>>,
}

/// The destination of the values of one slice.
struct SliceSlots<'a> {
    slice: u32,
    /// The first element that has not arrived.
    offset: usize,
    /// The destination of this element and the elements after it.
    data: Slots<'a>,
}

/// The encoding of tensor number `tensor`, if parameters are encoded as `wire`. Buffers are f32.
/// What is not trained is not int8, because its noise would be the same in every step.
pub(crate) fn wire_of(manifest: &Manifest, wire: Wire, tensor: usize) -> Wire {
    let spec = &manifest.tensors()[manifest.owner(tensor)];
    match wire {
        _ if spec.buffer => DType::F32.into(),
        Wire::Int8 if !spec.trains() => spec.dtype.into(),
        wire => wire,
    }
}

/// The targets of a pull of parameters, by their encoding.
pub(crate) fn by_wire<'a>(
    manifest: &Manifest,
    wire: Wire,
    targets: Vec<Target<'a>>,
) -> Vec<(Wire, Vec<Target<'a>>)> {
    let mut parts: Vec<(Wire, Vec<Target<'a>>)> = Vec::new();
    for target in targets {
        let tensor = target.tensor.index();
        // An unknown tensor is refused when its pull is planned.
        let wire = match tensor < manifest.tensors().len() {
            true => wire_of(manifest, wire, tensor),
            false => wire,
        };
        match parts.iter_mut().find(|(of, _)| *of == wire) {
            Some((_, targets)) => targets.push(target),
            None => parts.push((wire, vec![target])),
        }
    }
    parts
}

/// Plans the parts of a pull, by server. `locals` are the tensor parts of the rank.
///
/// # Errors
/// [`Error::Invalid`] for an unknown tensor, a box outside the tensor, or a target of a different
/// size.
pub(crate) fn plan<'a>(
    manifest: &Manifest,
    placement: &Placement,
    locals: &[LocalTensor],
    wire: Wire,
    targets: Vec<Target<'a>>,
) -> Result<Vec<ServerPull<'a>>> {
    // A request contains at most one box of each tensor; further boxes go into separate requests.
    let mut requests: Vec<Vec<ServerPull<'_>>> = Vec::new();
    let mut boxes: HashMap<usize, Vec<Arc<StridedBox>>> = HashMap::new();
    for Target { tensor, bounds, data } in targets {
        let local = local("pulled", manifest, locals, tensor)?;
        let tensor = tensor.index();
        let of = match bounds {
            None => local.of.clone(),
            Some(bounds) => {
                let spec = &manifest.tensors()[tensor];
                bounds.check(&spec.shape, &spec.name)?;
                Arc::new(StridedBox::new(&spec.shape, bounds))
            }
        };
        check_size("target of a pull of", manifest, tensor, &of, data.len())?;
        let known = boxes.entry(manifest.owner(tensor)).or_default();
        let request = known.iter().position(|other| *other == of).unwrap_or(known.len());
        if request == known.len() {
            known.push(of.clone());
        }
        if request == requests.len() {
            requests.push(empty(placement, wire));
        }
        add(&mut requests[request], manifest, placement, tensor, &of, data);
    }
    Ok(requests.into_iter().flatten().filter(|pull| !pull.rest.is_empty()).collect())
}

/// Plans the parts of a pull of this rank's pieces, by server and encoding, which `wire_of` returns
/// for a tensor.
///
/// # Errors
/// [`Error::Invalid`] if the number of slots is not that of the elements.
pub(crate) fn plan_pieces<'a>(
    placement: &Placement,
    locals: &[LocalTensor],
    wire_of: impl Fn(usize) -> Wire,
    exchange: &Exchange,
    mut slots: Slots<'a>,
) -> Result<Vec<ServerPull<'a>>> {
    if slots.len() != exchange.part_len() {
        let (found, expected) = (slots.len(), exchange.part_len());
        return Err(Error::refused(format!(
            "there is room for {found} elements, and the pieces of the rank have {expected}"
        )));
    }
    let mut requests: Vec<Vec<ServerPull<'_>>> = Vec::new();
    for piece in exchange.own_pulls() {
        let tensor = exchange.tensors()[piece.tensor].index();
        let data = slots.split_off(piece.elements.len());
        let wire = wire_of(tensor);
        let known = requests.iter().position(|pulls| pulls[0].wire == wire);
        let request = known.unwrap_or(requests.len());
        if request == requests.len() {
            requests.push(empty(placement, wire));
        }
        let pull = &mut requests[request][placement.primary(piece.slice as usize)];
        if !locals[tensor].of.is_whole() {
            pull.boxes.insert(tensor as u32, box_message(locals[tensor].of.bounds(), tensor));
        }
        pull.rest.push_back(SliceSlots { slice: piece.slice, offset: piece.offset, data });
    }
    Ok(requests.into_iter().flatten().filter(|pull| !pull.rest.is_empty()).collect())
}

/// A pull of nothing from each server.
fn empty<'a>(placement: &Placement, wire: Wire) -> Vec<ServerPull<'a>> {
    let pull = |server: &Server| ServerPull {
        server: server.clone(),
        wire,
        boxes: BTreeMap::new(),
        rest: VecDeque::new(),
    };
    placement.servers().iter().map(pull).collect()
}

fn add<'a>(
    pulls: &mut [ServerPull<'a>],
    manifest: &Manifest,
    placement: &Placement,
    tensor: usize,
    of: &StridedBox,
    mut data: Slots<'a>,
) {
    let tensor = manifest.owner(tensor);
    for slice in manifest.slices_of(tensor) {
        let data = data.split_off(of.in_slice(&manifest.slices()[slice]).len());
        if data.is_empty() {
            continue;
        }
        let pull = &mut pulls[placement.primary(slice)];
        if !of.is_whole() {
            pull.boxes.insert(tensor as u32, box_message(of.bounds(), tensor));
        }
        pull.rest.push_back(SliceSlots { slice: slice as u32, offset: 0, data });
    }
}

/// The job, version and part of a pull.
pub(crate) struct PullOf<'a> {
    pub(crate) job: &'a str,
    pub(crate) job_id: u64,
    pub(crate) epoch: u64,
    pub(crate) version: u64,
    pub(crate) part: StateSelector<'a>,
    /// The number of the server's pin that keeps the version; 0: none.
    pub(crate) pin: u64,
    pub(crate) chunk_bytes: usize,
    pub(crate) timeout: Duration,
    /// The trace of the step that begins with the version; none for a reader.
    pub(crate) trace: Trace,
    pub(crate) rank: Option<u32>,
    /// The shared memory with the server, if it is on this host.
    pub(crate) window: Option<Arc<Window>>,
}

impl<'a> ServerPull<'a> {
    /// Returns whether the server is still the primary of all slices that have not arrived.
    pub(crate) fn is_at_primary(&self, placement: &Placement) -> bool {
        self.rest
            .iter()
            .all(|next| placement.servers()[placement.primary(next.slice as usize)] == self.server)
    }

    /// Divides what has not arrived among the servers of another placement.
    pub(crate) fn divide(self, placement: &Placement) -> Vec<Self> {
        let mut parts: BTreeMap<usize, Self> = BTreeMap::new();
        for next in self.rest {
            let primary = placement.primary(next.slice as usize);
            let part = parts.entry(primary).or_insert_with(|| Self {
                server: placement.servers()[primary].clone(),
                wire: self.wire,
                boxes: self.boxes.clone(),
                rest: VecDeque::new(),
            });
            part.rest.push_back(next);
        }
        parts.into_values().collect()
    }
}

impl<'a> ServerPull<'a> {
    /// Pulls the values that have not arrived yet. After an error, arrived values are kept and the
    /// rest can be pulled again. A server that is lost after its last value is not asked again.
    pub(crate) async fn pull(&mut self, shards: &Shards, of: &PullOf<'_>) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let mut span = of
            .trace
            .span("pull", SpanKind::Client)
            .with("server.address", self.server.address.clone())
            .with("zeroshard.version", of.version as i64);
        if let Some(rank) = of.rank {
            span = span.with("zeroshard.rank", i64::from(rank));
        }
        let guard = Guard::new(of.window.clone());
        let received = self.receive(shards, of, &span).await.inspect_err(|error| span.fail(error));
        if received.as_ref().err().is_none_or(is_answer) {
            guard.disarm();
        }
        let is_whole =
            |error: &Error| self.rest.is_empty() && !matches!(error, Error::Internal { .. });
        received.or_else(|error| if is_whole(&error) { Ok(()) } else { Err(error) })
    }

    async fn receive(&mut self, shards: &Shards, of: &PullOf<'_>, span: &Span) -> Result<()> {
        let shard = shards.get(&self.server)?;
        let extents = self.rest.iter().map(|next| pb::Extent {
            slice: next.slice,
            offset: next.offset as u64,
            length: next.data.len() as u64,
        });
        let request = pb::PullRequest {
            boxes: self.boxes.values().cloned().collect(),
            job: of.job.to_owned(),
            epoch: of.epoch,
            version: of.version,
            dtype: pb::Dtype::from(self.wire).into(),
            chunk_bytes: of.chunk_bytes as u32,
            extents: extents.collect(),
            part: Some(of.part.into()),
            job_id: of.job_id,
            pin: of.pin,
            // Ranks name the epoch, and readers the pin.
            line: None,
            window: of.window.as_ref().map_or(0, |window| window.number()),
        };
        let body = Full::new(encode_message(&request));
        let connection = shard.pull.within(of.timeout).in_span(span);
        let answer = call(&connection, "/zeroshard.v1.DataService/Pull", body, &shard.peer).await?;
        let mut reader = Reader::new(answer, MAX_MESSAGE);
        while let Some(event) = reader.next().await? {
            match event {
                Event::Extent(extent, elements) => {
                    self.check(extent, elements).map_err(|found| unexpected(&shard, found))?;
                }
                Event::Payload(bytes) => {
                    shards.pulled.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    self.store(&bytes);
                }
                Event::Reference(reference) => {
                    let window = of.window.as_ref();
                    let no_window = || unexpected(&shard, "a place in a window".to_owned());
                    let window = window.ok_or_else(no_window)?;
                    shards.pulled.fetch_add(reference.bytes, Ordering::Relaxed);
                    self.refer(window, reference)?;
                }
                Event::Begin(_) => {
                    return Err(unexpected(&shard, "the beginning of a push".to_owned()));
                }
            }
        }
        finish(reader.trailers(), &shard.peer)?;
        match self.rest.front() {
            None => Ok(()),
            Some(next) => Err(unexpected(
                &shard,
                format!("the end of the stream before slice {}", next.slice),
            )),
        }
    }

    /// Checks that extents arrive in the requested order, without gaps.
    fn check(&self, extent: Extent, elements: u64) -> Result<(), String> {
        let expected = self.rest.front().filter(|next| {
            extent.wire == self.wire
                && next.slice == extent.slice
                && next.offset as u64 == extent.offset
                && elements <= next.data.len() as u64
        });
        expected.map(|_| ()).ok_or_else(|| format!("{extent:?} with {elements} elements"))
    }

    /// Shows the next elements where they are, if that is possible, and copies them otherwise.
    fn refer(&mut self, window: &Arc<Window>, reference: Reference) -> Result<()> {
        let mut hold = Some(Box::new(Hold::new(window, reference.hold)) as Keeper);
        let bytes = window.parameters(reference)?;
        let next = self.rest.front().expect("the extent was checked");
        if reference.lasts && next.data.show(window.view(), reference, self.wire, &mut hold) {
            self.pass(bytes.len());
        } else {
            self.store(bytes);
        }
        Ok(())
    }

    fn store(&mut self, bytes: &[u8]) {
        self.pass(bytes.len()).decode(bytes, self.wire);
    }

    /// The destination of the next elements, which have arrived in this number of bytes.
    fn pass(&mut self, bytes: usize) -> Slots<'a> {
        let elements = self.wire.elements(bytes as u64).expect("the extent was checked") as usize;
        let next = self.rest.front_mut().expect("the extent was checked");
        let passed = next.data.split_off(elements);
        next.offset += elements;
        if next.data.is_empty() {
            self.rest.pop_front();
        }
        passed
    }
}

fn unexpected(shard: &Shard, found: String) -> Error {
    Error::Internal { cause: format!("{} sent data that was not requested: {found}", shard.peer) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use zeroshard_model::{JobSpec, TensorSpec};

    use super::*;

    /// Otherwise the lost server would be asked for nothing until the deadline.
    #[tokio::test]
    async fn a_pull_whose_values_have_all_arrived_needs_its_server_no_more() {
        let manifest = Manifest::new(vec![TensorSpec::new("w", [3])]).unwrap();
        let spec = JobSpec::new("job", manifest, vec!["sgd".parse().unwrap()]);
        let server = Server { id: 1, incarnation: 1, address: "127.0.0.1:1".into() };
        let placement = Placement::new(vec![server], 1, vec![0]).unwrap();
        let mut weight = [0_f32; 3];
        let targets = vec![Target::new(TensorId::new(0), &mut weight[..])];
        let locals = LocalTensor::all(&spec, 0);
        let plan = plan(&spec.manifest, &placement, &locals, DType::F32.into(), targets);
        let mut pull = plan.unwrap().remove(0);
        let of = PullOf {
            job: "job",
            job_id: 1,
            epoch: 1,
            version: 0,
            part: StateSelector::Parameters,
            pin: 0,
            chunk_bytes: 1 << 20,
            timeout: Duration::from_secs(5),
            trace: Trace::default(),
            rank: None,
            window: None,
        };
        let values: Vec<u8> = [1_f32, 2.0, 3.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        pull.store(&values[..8]);
        let missing = pull.pull(&Shards::default(), &of).await;
        assert!(matches!(missing, Err(Error::Unavailable { .. })), "{missing:?}");
        pull.store(&values[8..]);
        assert_eq!(pull.pull(&Shards::default(), &of).await, Ok(()));
        drop(pull);
        assert_eq!(weight, [1.0, 2.0, 3.0]);
    }
}
