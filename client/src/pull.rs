//! Pulling: bytes go from the network buffer straight into the caller's array.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::atomic::Ordering,
    time::Duration,
};

use http_body_util::Full;
use tonic::body::Body;
use zeroshard_proto::{
    DType, Error, Manifest, Placement, Result, Server, TensorBox,
    frame::{Event, Extent, Reader, encode_message},
    pb::{self, slice_array::Array},
};

use crate::{
    call::{call, finish},
    region::{Region, Share},
    shards::{Shard, Shards},
    values::Slots,
};

/// The longest message that a server may send: more than the largest chunk that it may be asked
/// for.
const MAX_MESSAGE: usize = 64 << 20;

/// Where a tensor's parameters go.
#[derive(Debug)]
pub struct Target<'a> {
    /// Its index in the manifest.
    pub tensor: usize,
    /// What of it; `None`: what the rank has of it by the tensor's layout, which is all of it if
    /// there is none.
    pub area: Option<TensorBox>,
    /// Room for all elements of that, row-major.
    pub data: Slots<'a>,
}

impl<'a> Target<'a> {
    /// What the rank has of a tensor.
    pub fn new(tensor: usize, data: impl Into<Slots<'a>>) -> Self {
        Self { tensor, area: None, data: data.into() }
    }
}

/// What one server is to send.
pub(crate) struct Plan<'a> {
    pub(crate) server: Server,
    /// On the wire.
    dtype: DType,
    /// What of which tensors is sent, where that is not all; by tensor.
    boxes: BTreeMap<u32, pb::Box>,
    /// In the order in which it is sent. INVARIANT: none is empty.
    rest: VecDeque<Part<'a>>,
}

struct Part<'a> {
    slice: u32,
    /// First element that has not come.
    offset: usize,
    /// Where it and those after it go.
    data: Slots<'a>,
}

/// Which server sends what, as `dtype`. `shares` are the rank's.
///
/// # Errors
/// [`Error::Invalid`] for a tensor that does not exist, an area outside of it, or a target of
/// another size.
pub(crate) fn plan<'a>(
    manifest: &Manifest,
    placement: &Placement,
    shares: &[Share],
    dtype: DType,
    targets: Vec<Target<'a>>,
) -> Result<Vec<Plan<'a>>> {
    // A request has one box of each tensor: further ones go into requests of their own.
    let mut rounds: Vec<Vec<Plan<'_>>> = Vec::new();
    let mut areas: HashMap<usize, Vec<TensorBox>> = HashMap::new();
    for Target { tensor, area, data } in targets {
        let region = match area {
            None => share("target of a pull of", manifest, shares, tensor)?.region.clone(),
            Some(area) => {
                share("target of a pull of", manifest, shares, tensor)?;
                let spec = &manifest.tensors()[tensor];
                area.check(&spec.shape, &spec.name)?;
                Region::new(&spec.shape, area)
            }
        };
        check_size("target of a pull of", manifest, tensor, &region, data.len())?;
        let known = areas.entry(manifest.owner(tensor)).or_default();
        let round = known.iter().position(|area| area == region.area()).unwrap_or(known.len());
        if round == known.len() {
            known.push(region.area().clone());
        }
        if round == rounds.len() {
            let plan = |server: &Server| Plan {
                server: server.clone(),
                dtype,
                boxes: BTreeMap::new(),
                rest: VecDeque::new(),
            };
            rounds.push(placement.servers().iter().map(plan).collect());
        }
        add(&mut rounds[round], manifest, placement, tensor, &region, data);
    }
    Ok(rounds.into_iter().flatten().filter(|plan| !plan.rest.is_empty()).collect())
}

fn add<'a>(
    plans: &mut [Plan<'a>],
    manifest: &Manifest,
    placement: &Placement,
    tensor: usize,
    region: &Region,
    mut data: Slots<'a>,
) {
    let tensor = manifest.owner(tensor);
    for slice in manifest.slices_of(tensor) {
        let data = data.split_off(region.part(&manifest.slices()[slice]).len());
        if data.is_empty() {
            continue;
        }
        let plan = &mut plans[placement.primary(slice)];
        plan.boxes.extend(region.to_wire(tensor).map(|area| (area.tensor, area)));
        plan.rest.push_back(Part { slice: slice as u32, offset: 0, data });
    }
}

/// The rank's share of a tensor.
///
/// # Errors
/// [`Error::Invalid`] unless the tensor exists.
pub(crate) fn share<'a>(
    what: &str,
    manifest: &Manifest,
    shares: &'a [Share],
    tensor: usize,
) -> Result<&'a Share> {
    shares.get(tensor).ok_or_else(|| {
        let expected = format!("less than the number of tensors, {}", manifest.tensors().len());
        Error::invalid(format!("{what} tensor"), tensor, expected)
    })
}

/// # Errors
/// [`Error::Invalid`] unless a region of the tensor has `numel` elements.
pub(crate) fn check_size(
    what: &str,
    manifest: &Manifest,
    tensor: usize,
    region: &Region,
    numel: usize,
) -> Result<()> {
    if region.numel() == numel {
        return Ok(());
    }
    let spec = &manifest.tensors()[tensor];
    let expected = match region.is_whole() {
        true => format!("its {} of shape {:?}", spec.numel(), spec.shape),
        false => format!(
            "the {} of the box at {:?} of size {:?} of its shape {:?}",
            region.numel(),
            region.area().offset,
            region.area().size,
            spec.shape
        ),
    };
    Err(Error::invalid(
        format!("{what} tensor {:?}", spec.name),
        format!("{numel} elements"),
        expected,
    ))
}

/// What a pull says of itself.
pub(crate) struct PullOf<'a> {
    pub(crate) job: &'a str,
    pub(crate) job_id: u64,
    pub(crate) epoch: u64,
    pub(crate) version: u64,
    pub(crate) part: &'a str,
    pub(crate) chunk_bytes: usize,
    pub(crate) timeout: Duration,
}

/// The array of a slice that `part` names: empty, `master`, or a state tensor of the optimizer.
pub(crate) fn slice_array(part: &str) -> pb::SliceArray {
    let array = match part {
        "" => Array::Parameters(pb::slice_array::Parameters {}),
        "master" => Array::MasterWeights(pb::slice_array::MasterWeights {}),
        state => Array::OptimizerState(state.to_owned()),
    };
    pb::SliceArray { array: Some(array) }
}

impl Plan<'_> {
    /// Pulls what has not come yet. After an error, what has come stays, and the rest can be pulled
    /// again.
    pub(crate) async fn pull(&mut self, shards: &Shards, of: &PullOf<'_>) -> Result<()> {
        let shard = shards.get(&self.server)?;
        let extents = self.rest.iter().map(|part| pb::Extent {
            slice: part.slice,
            offset: part.offset as u64,
            length: part.data.len() as u64,
        });
        let request = pb::PullRequest {
            boxes: self.boxes.values().cloned().collect(),
            job: of.job.to_owned(),
            epoch: of.epoch,
            version: of.version,
            dtype: pb::Dtype::from(self.dtype).into(),
            chunk_bytes: of.chunk_bytes as u32,
            extents: extents.collect(),
            array: Some(slice_array(of.part)),
            job_id: of.job_id,
        };
        let body = Full::new(encode_message(&request));
        let connection = shard.pull.within(of.timeout);
        let path = "/zeroshard.v1.DataService/Pull";
        let answer = call(&connection, path, body, &shard.peer).await?;
        let mut reader = Reader::new(answer, MAX_MESSAGE);
        self.receive(&mut reader, shards, &shard).await?;
        finish(reader.trailers(), &shard.peer)?;
        match self.rest.front() {
            None => Ok(()),
            Some(part) => Err(unexpected(&shard, format!("the end before slice {}", part.slice))),
        }
    }

    async fn receive(
        &mut self,
        reader: &mut Reader<Body>,
        shards: &Shards,
        shard: &Shard,
    ) -> Result<()> {
        let mut dtype = DType::F32;
        while let Some(event) = reader.next().await? {
            match event {
                Event::Extent(extent, elements) => {
                    self.check(extent, elements).map_err(|found| unexpected(shard, found))?;
                    dtype = extent.dtype;
                }
                Event::Payload(bytes) => {
                    shards.pulled.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    self.store(&bytes, dtype);
                }
                Event::Begin(_) => {
                    return Err(unexpected(shard, "the beginning of a push".to_owned()));
                }
            }
        }
        Ok(())
    }

    /// Extents come in the order in which they were asked for, without gaps.
    fn check(&self, extent: Extent, elements: u64) -> Result<(), String> {
        let expected = self.rest.front().filter(|part| {
            part.slice == extent.slice
                && part.offset as u64 == extent.offset
                && elements <= part.data.len() as u64
        });
        expected.map(|_| ()).ok_or_else(|| format!("{extent:?} with {elements} elements"))
    }

    fn store(&mut self, bytes: &[u8], dtype: DType) {
        let part = self.rest.front_mut().expect("the extent was checked");
        let elements = bytes.len() / dtype.size();
        part.data.split_off(elements).decode(bytes, dtype);
        part.offset += elements;
        if part.data.is_empty() {
            self.rest.pop_front();
        }
    }
}

fn unexpected(shard: &Shard, found: String) -> Error {
    Error::Internal { cause: format!("{} sent what was not asked for: {found}", shard.peer) }
}
