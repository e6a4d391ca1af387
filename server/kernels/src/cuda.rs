//! The kernels for NVIDIA GPUs (`kernels/`), and the backend that launches them.
//!
//! The kernels are the loops of [`super::loops`], operation by operation, so that they give the
//! same bits. `tests/kernels.py` compiles them to `kernels.ptx`, and checks that no instruction can
//! be contracted or rounds in another way.
//!
//! A [`Device`] runs the kernels: [`driver::Gpu`] by the driver of NVIDIA. Tests have a fake
//! driver, which interprets the PTX (`tests/fake-cuda`), and [`host::Host`], which runs the same
//! source, compiled by a C compiler.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_loops::convert::{self, Bf16, F16, F32};
use zeroshard_model::{
    Elements,
    dtype::DType,
    geometry::blocks::{BLOCK, TILE},
    optimizer::Code,
};

use super::{
    Backend, Failure, Output, Record, Result, Update, Usage, failure::DeviceName, layout::Layout,
    loops::Level,
};
use launch::{Address, Array, Launch, Published, dtype_number};
use step::{Rounding, Step};

pub(crate) mod driver;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod host;
pub(crate) mod launch;
pub(crate) mod step;
#[cfg(test)]
mod tests;

/// A device with memory of its own, which runs kernels in the order of their launches.
///
/// An operation may return before the device has carried it out. A failure may then be returned by
/// a later operation.
pub(crate) trait Device: Send + Sync + 'static {
    /// The number of the device.
    fn number(&self) -> usize;

    /// Returns whether every operation fails from now on.
    fn is_lost(&self) -> bool;

    /// The largest number of bytes of an upload or a download.
    fn stage_bytes(&self) -> usize;

    /// Allocates zeroed memory for the kernels.
    fn allocate(&self, bytes: usize) -> Result<Address>;

    /// Frees memory that was allocated, after the kernels that were launched before.
    fn free(&self, address: Address);

    /// Runs kernels, one after the other.
    fn launch(&self, launches: &[Launch]) -> Result<()>;

    /// Returns the counters of the device.
    fn usage(&self) -> Usage;

    /// Copies bytes to the device, which `fill` writes. `launches` gets their address, and launches
    /// the kernels that read them. The memory is only theirs. Does not wait for them.
    fn upload(
        &self,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()>;

    /// Copies bytes from the device. `launches` gets the address of memory for them, and launches
    /// the kernels that fill all of it. Waits for them.
    fn download(
        &self,
        bytes: &mut [u8],
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()>;
}

/// A backend on a device.
pub(crate) struct Cuda<D: Device> {
    device: Arc<D>,
    /// The instruction set of the host, which checks what is uploaded.
    level: Level,
}

/// An array in the memory of a device.
pub(crate) struct Buffer<D: Device> {
    memory: Memory<D>,
    layout: Layout,
    numel: usize,
}

/// Memory of a device, freed when it is dropped.
struct Memory<D: Device> {
    device: Arc<D>,
    address: Address,
}

impl<D: Device> Drop for Memory<D> {
    fn drop(&mut self) {
        self.device.free(self.address);
    }
}

impl<D: Device> Buffer<D> {
    /// The address of an element.
    fn address(&self, element: usize) -> Address {
        let size = match self.layout {
            Layout::Values(dtype) => dtype.size(),
            Layout::Codes(_) => 1,
        };
        self.memory.address + (element * size) as Address
    }

    /// The address of the exponent of the tile of an element of 8-bit state.
    fn exponent(&self, element: usize) -> Address {
        self.address(self.numel) + (element / TILE) as Address
    }

    /// The addresses and lengths of the codes of whole tiles, and of their exponents.
    fn tiles(&self, tiles: &Range<usize>) -> [(Address, usize); 2] {
        let exponents = tiles.end.div_ceil(TILE) - tiles.start / TILE;
        [(self.address(tiles.start), tiles.len()), (self.exponent(tiles.start), exponents)]
    }

    /// The launch that stores consecutive elements, of 8-bit state whole tiles, at `start`.
    fn stored(&self, start: usize, numel: usize, values: (Address, DType)) -> Launch {
        let from = (values.0, dtype_number(values.1));
        match self.layout {
            Layout::Values(to) => {
                Launch::conversion((self.address(start), dtype_number(to)), numel, from)
            }
            Layout::Codes(code) => {
                let to = [self.address(start), self.exponent(start)];
                Launch::encoding(code, to, numel, from)
            }
        }
    }

    /// The launch that loads consecutive elements.
    fn loaded(&self, run: &Range<usize>, to: (Address, DType)) -> Launch {
        let to = (to.0, dtype_number(to.1));
        match self.layout {
            Layout::Values(of) => {
                Launch::conversion(to, run.len(), (self.address(run.start), dtype_number(of)))
            }
            Layout::Codes(code) => {
                let from = [self.address(0), self.exponent(0)];
                Launch::decoding(code, to, run, from)
            }
        }
    }
}

/// The addresses of an array that a step reads and writes.
fn array<D: Device>(of: &Output<'_, Buffer<D>>) -> Array {
    let from = of.earlier.as_deref().unwrap_or(of.buffer);
    Array { from: from.address(0), to: of.buffer.address(0) }
}

/// Splits consecutive elements, and those of a box, at every `stage` elements. Each part has its
/// runs of elements.
fn parts(elements: &Elements, stage: usize) -> Vec<Vec<Range<usize>>> {
    let mut parts = vec![Vec::new()];
    let mut room = stage;
    for mut run in elements.runs().filter(|run| !run.is_empty()) {
        while run.len() > room {
            let end = run.start + room;
            parts.last_mut().expect("there is one").push(run.start..end);
            run.start = end;
            parts.push(Vec::new());
            room = stage;
        }
        room -= run.len();
        parts.last_mut().expect("there is one").push(run);
    }
    parts.retain(|part| part.iter().any(|run| !run.is_empty()));
    parts
}

impl Cuda<driver::Gpu> {
    /// Opens a GPU.
    pub(crate) fn open(number: usize) -> Result<Self> {
        driver::Gpu::open(number, Default::default()).map(Self::new)
    }
}

impl<D: Device> Cuda<D> {
    pub(crate) fn new(device: D) -> Self {
        Self { device: Arc::new(device), level: Level::best() }
    }

    fn buffer(&self, layout: Layout, numel: usize) -> Result<Buffer<D>> {
        let device = self.device();
        let too_large = || Failure::out_of_memory(device, usize::MAX);
        let bytes = layout.bytes(numel).ok_or_else(too_large)?;
        Ok(Buffer { memory: self.memory(bytes)?, layout, numel })
    }

    fn memory(&self, bytes: usize) -> Result<Memory<D>> {
        let address = self.device.allocate(bytes)?;
        Ok(Memory { device: self.device.clone(), address })
    }

    /// Uploads values, and launches a kernel for each run of consecutive elements. `launch` gets
    /// the first element, the number of elements, and the address of their values. Returns whether
    /// all are finite. The host checks this while it copies them to pinned memory, so that it does
    /// not wait for the device.
    fn receive(
        &self,
        at: &Elements,
        src: &[u8],
        dtype: DType,
        launch: impl Fn(usize, usize, Address) -> Launch,
    ) -> Result<bool> {
        assert_eq!(src.len(), at.numel() * dtype.size(), "one value for each element");
        let (mut rest, mut finite) = (src, true);
        // Whole tiles stay together.
        let stage = self.device.stage_bytes() / dtype.size() / TILE * TILE;
        for part in parts(at, stage) {
            let numel: usize = part.iter().map(ExactSizeIterator::len).sum();
            let (values, later) = rest.split_at(numel * dtype.size());
            rest = later;
            let mut fill = |pinned: &mut [u8]| finite &= self.copy_checked(values, dtype, pinned);
            self.device.upload(values.len(), &mut fill, &mut |mut from| {
                let launches = part.iter().map(|run| {
                    let launch = launch(run.start, run.len(), from);
                    from += (run.len() * dtype.size()) as Address;
                    launch
                });
                self.device.launch(&launches.collect::<Vec<_>>())
            })?;
        }
        Ok(finite)
    }

    /// Copies values. Returns whether all are finite.
    fn copy_checked(&self, values: &[u8], dtype: DType, to: &mut [u8]) -> bool {
        /// Fits into the first-level cache, because the compiler copies first and then checks.
        const TILE: usize = 16 << 10;
        let copy = match dtype {
            DType::F32 => convert::copy::<F32>,
            DType::Bf16 => convert::copy::<Bf16>,
            DType::F16 => convert::copy::<F16>,
        };
        let tiles = values.chunks(TILE).zip(to.chunks_mut(TILE));
        tiles.fold(true, |finite, (from, to)| copy(self.level, from, to) & finite)
    }
}

impl<D: Device> Backend for Cuda<D> {
    const SUMS_EARLY: bool = false;

    type Buffer = Buffer<D>;

    fn device(&self) -> DeviceName {
        DeviceName::Cuda(self.device.number())
    }

    fn is_lost(&self) -> bool {
        self.device.is_lost()
    }

    fn usage(&self) -> Option<Usage> {
        Some(self.device.usage())
    }

    fn records(&self) -> bool {
        false
    }

    /// The memory of a device is provided when it is allocated.
    fn populate(&self, _: &mut Self::Buffer, _: Range<usize>) {}

    fn numel(&self, buffer: &Self::Buffer) -> usize {
        buffer.numel
    }

    fn dtype(&self, buffer: &Self::Buffer) -> DType {
        buffer.layout.dtype()
    }

    fn bytes(&self, buffer: &Self::Buffer) -> usize {
        buffer.layout.bytes(buffer.numel).expect("it was computed before the allocation")
    }

    fn allocate(&self, dtype: DType, numel: usize) -> Result<Self::Buffer> {
        self.buffer(Layout::Values(dtype), numel)
    }

    fn allocate_coded(&self, code: Code, numel: usize) -> Result<Self::Buffer> {
        self.buffer(Layout::Codes(code), numel)
    }

    fn another(&self, of: &Self::Buffer) -> Result<Self::Buffer> {
        self.buffer(of.layout, of.numel)
    }

    fn store(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        self.receive(&at.into(), src, dtype, |start, numel, values| {
            dst.stored(start, numel, (values, dtype))
        })
    }

    fn accumulate(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        self.receive(&at.into(), src, dtype, |start, numel, values| {
            Launch::over_elements("accumulate", numel)
                .with(dst.address(start))
                .with(numel)
                .with(values)
                .with(dtype_number(dtype))
        })
    }

    fn canonicalise(&self, dst: &mut Self::Buffer, at: impl Into<Elements>) -> Result<()> {
        let at = at.into();
        let launches = at.runs().filter(|run| !run.is_empty()).map(|run| {
            let launch = Launch::over_elements("canonicalise", run.len());
            launch.with(dst.address(run.start)).with(run.len())
        });
        self.device.launch(&launches.collect::<Vec<_>>())
    }

    fn read(
        &self,
        src: &Arc<Self::Buffer>,
        from: impl Into<Elements>,
        dtype: DType,
    ) -> Result<Bytes> {
        let from = from.into();
        let mut bytes = vec![0; from.numel() * dtype.size()];
        let mut rest = &mut bytes[..];
        for part in parts(&from, self.device.stage_bytes() / dtype.size()) {
            let numel: usize = part.iter().map(ExactSizeIterator::len).sum();
            let values = rest.split_off_mut(..numel * dtype.size()).expect("as long as all parts");
            self.device.download(values, &mut |mut to| {
                let launches = part.iter().map(|run| {
                    let launch = src.loaded(run, (to, dtype));
                    to += (run.len() * dtype.size()) as Address;
                    launch
                });
                self.device.launch(&launches.collect::<Vec<_>>())
            })?;
        }
        Ok(bytes.into())
    }

    fn read_tiles(&self, src: &Self::Buffer, tiles: Range<usize>) -> Result<Bytes> {
        let mut bytes = Vec::new();
        for (from, length) in src.tiles(&tiles) {
            for start in (0..length).step_by(self.device.stage_bytes()) {
                let length = self.device.stage_bytes().min(length - start);
                let mut part = vec![0; length];
                self.device.download(&mut part, &mut |to| {
                    self.device.launch(&[Launch::bytes(to, length, from + start as Address)])
                })?;
                bytes.extend_from_slice(&part);
            }
        }
        Ok(bytes.into())
    }

    fn store_tiles(
        &self,
        dst: &mut Self::Buffer,
        tiles: Range<usize>,
        mut src: &[u8],
    ) -> Result<()> {
        for (mut to, length) in dst.tiles(&tiles) {
            let (these, later) = src.split_at(length);
            src = later;
            for part in these.chunks(self.device.stage_bytes()) {
                self.device.upload(
                    part.len(),
                    &mut |pinned| pinned.copy_from_slice(part),
                    &mut |from| self.device.launch(&[Launch::bytes(to, part.len(), from)]),
                )?;
                to += part.len() as Address;
            }
        }
        Ok(())
    }

    fn block_sums(&self, src: &Self::Buffer, range: Range<usize>) -> Result<Vec<f64>> {
        let blocks = range.len().div_ceil(BLOCK);
        let mut sums = vec![0.0; blocks];
        let most = self.device.stage_bytes() / size_of::<f64>();
        for (sums, first) in sums.chunks_mut(most).zip((range.start..).step_by(most * BLOCK)) {
            let numel = (range.end - first).min(sums.len() * BLOCK);
            self.device.download(bytemuck::cast_slice_mut(sums), &mut |to| {
                let squares = Launch::over_sums("squares", numel);
                self.device.launch(&[squares.with(src.address(first)).with(numel).with(to)])
            })?;
        }
        Ok(sums)
    }

    fn apply(
        &self,
        update: &Update<'_>,
        master: Output<'_, Self::Buffer>,
        state: Vec<Output<'_, Self::Buffer>>,
        gradient: Option<&Self::Buffer>,
        published: Option<&mut Self::Buffer>,
        _: Option<&mut dyn Record>,
    ) -> Result<()> {
        assert_eq!(state.len(), update.optimizer.state().len(), "the state tensors");
        let is_coded = state.iter().any(|of| of.buffer.layout.code().is_some());
        let gradient = gradient.unwrap_or(master.buffer);
        assert_eq!(gradient.numel, master.buffer.numel, "the gradient is of the master's size");
        let step = Step {
            numel: master.buffer.numel,
            master: array(&master),
            state: state.iter().map(|of| (array(of), of.buffer.numel)).collect(),
            gradient: gradient.address(0),
            published: match &published {
                None => Published { to: 0, dtype: 0 },
                Some(of) => Published { to: of.address(0), dtype: dtype_number(of.layout.dtype()) },
            },
            rounding: is_coded.then(|| Rounding::of(update)),
        };
        let scratch = self.memory(step.scratch_bytes())?;
        self.device.launch(&step.launches(update, scratch.address))?;
        // The master in its own dtype is not published by the kernels.
        match published.filter(|of| of.layout.dtype() == DType::F32) {
            Some(published) => self.copy(master.buffer, published),
            None => Ok(()),
        }
    }

    fn average(
        &self,
        weight: f64,
        values: &Self::Buffer,
        average: [Output<'_, Self::Buffer>; 2],
    ) -> Result<()> {
        let numel = values.numel;
        let of_size = |of: &Output<'_, Self::Buffer>| of.buffer.numel == numel;
        assert!(average.iter().all(of_size), "an average is of its parameters' size");
        if numel == 0 {
            return Ok(());
        }
        let launch = Launch::over_elements("running_average", numel).with(weight).with(numel);
        let [high, low] = average.each_ref().map(array);
        self.device.launch(&[launch.with(values.address(0)).with(high).with(low)])
    }

    fn copy(&self, src: &Self::Buffer, dst: &mut Self::Buffer) -> Result<()> {
        assert_eq!(src.numel, dst.numel, "copies are of equal size");
        if src.numel == 0 {
            return Ok(());
        }
        let launch = match (src.layout, dst.layout) {
            (Layout::Codes(from), Layout::Codes(to)) => {
                assert_eq!(from, to, "copies have the same code");
                Launch::bytes(dst.address(0), self.bytes(src), src.address(0))
            }
            (Layout::Values(from), _) => dst.stored(0, src.numel, (src.address(0), from)),
            (_, Layout::Values(to)) => src.loaded(&(0..src.numel), (dst.address(0), to)),
        };
        self.device.launch(&[launch])
    }
}
