//! The kernels for NVIDIA GPUs (`kernels/`), and the backend that launches them.
//!
//! The kernels are the loops of [`super::kernels`], operation by operation, so that they give the
//! same bits. `tests/kernels.py` compiles them to `kernels.ptx`, and checks that no instruction can
//! be contracted or rounds in another way.
//!
//! A [`Device`] runs the kernels. In tests it is [`host::Host`], which compiles the same source
//! with a C compiler.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_proto::{Elements, dtype::DType};

use super::{Backend, OutOfMemory, Output, Update};
use launch::{Address, Array, Launch, Published, dtype_number};
use step::Step;

#[cfg(test)]
mod host;
pub(crate) mod launch;
mod step;

/// A device with memory of its own, which carries out calls in their order.
pub(crate) trait Device: Send + Sync + 'static {
    /// Allocates zeroed memory. `None`: the device does not have enough.
    fn allocate(&self, bytes: usize) -> Option<Address>;

    /// Frees memory that was allocated.
    fn free(&self, address: Address);

    /// Copies bytes to the device.
    fn upload(&self, to: Address, bytes: &[u8]);

    /// Copies bytes from the device.
    fn download(&self, from: Address, bytes: &mut [u8]);

    /// Runs a kernel.
    fn launch(&self, launch: &Launch);
}

/// A backend on a device.
pub(crate) struct Cuda<D: Device> {
    device: Arc<D>,
}

/// An array in the memory of a device.
pub(crate) struct Buffer<D: Device> {
    memory: Memory<D>,
    dtype: DType,
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
        self.memory.address + (element * self.dtype.size()) as Address
    }
}

/// The launch that converts consecutive elements of one dtype to another. `special` is the address
/// of a flag that the kernel sets if an element is infinite or NaN.
fn convert(
    (to, to_dtype): (Address, u32),
    numel: usize,
    (from, from_dtype): (Address, u32),
    special: Address,
) -> Launch {
    let launch = Launch::over_elements("store", numel).with(to).with(to_dtype).with(numel);
    launch.with(from).with(from_dtype).with(special)
}

impl<D: Device> Cuda<D> {
    pub(crate) fn new(device: D) -> Self {
        Self { device: Arc::new(device) }
    }

    fn memory(&self, bytes: usize) -> Option<Memory<D>> {
        let address = self.device.allocate(bytes)?;
        Some(Memory { device: self.device.clone(), address })
    }

    /// Memory for one operation.
    fn scratch(&self, bytes: usize) -> Memory<D> {
        self.memory(bytes).expect("a device has memory for a few numbers")
    }

    /// Uploads values, and launches a kernel for each run of consecutive elements. `launch` gets
    /// the first element, the number of elements, the address of their values, and the address of
    /// a flag that the kernel sets if a value is infinite or NaN. Returns whether all are finite.
    fn receive(
        &self,
        at: &Elements,
        src: &[u8],
        dtype: DType,
        launch: impl Fn(usize, usize, Address, Address) -> Launch,
    ) -> bool {
        let values = self.scratch(src.len());
        let special = self.scratch(size_of::<u32>());
        self.device.upload(values.address, src);
        let mut from = values.address;
        for run in at.runs() {
            self.device.launch(&launch(run.start, run.len(), from, special.address));
            from += (run.len() * dtype.size()) as Address;
        }
        let mut found = [0; size_of::<u32>()];
        self.device.download(special.address, &mut found);
        u32::from_le_bytes(found) == 0
    }
}

impl<D: Device> Backend for Cuda<D> {
    type Buffer = Buffer<D>;

    fn allocate(&self, dtype: DType, numel: usize) -> Result<Self::Buffer, OutOfMemory> {
        let bytes = numel.checked_mul(dtype.size());
        let memory = bytes.and_then(|bytes| self.memory(bytes));
        let memory = memory.ok_or(OutOfMemory { numel, dtype })?;
        Ok(Buffer { memory, dtype, numel })
    }

    /// The memory of a device is provided when it is allocated.
    fn populate(&self, _: &mut Self::Buffer, _: Range<usize>) {}

    fn numel(&self, buffer: &Self::Buffer) -> usize {
        buffer.numel
    }

    fn dtype(&self, buffer: &Self::Buffer) -> DType {
        buffer.dtype
    }

    fn store(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> bool {
        let [to, of] = [dst.dtype, dtype].map(dtype_number);
        self.receive(&at.into(), src, dtype, |start, numel, values, special| {
            convert((dst.address(start), to), numel, (values, of), special)
        })
    }

    fn accumulate(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> bool {
        self.receive(&at.into(), src, dtype, |start, numel, values, special| {
            Launch::over_elements("accumulate", numel)
                .with(dst.address(start))
                .with(numel)
                .with(values)
                .with(dtype_number(dtype))
                .with(special)
        })
    }

    fn canonicalise(&self, dst: &mut Self::Buffer, at: impl Into<Elements>) {
        for run in at.into().runs() {
            let launch = Launch::over_elements("canonicalise", run.len());
            self.device.launch(&launch.with(dst.address(run.start)).with(run.len()));
        }
    }

    fn read(&self, src: &Arc<Self::Buffer>, from: impl Into<Elements>, dtype: DType) -> Bytes {
        let from = from.into();
        let mut bytes = vec![0; from.numel() * dtype.size()];
        let (values, special) = (self.scratch(bytes.len()), self.scratch(size_of::<u32>()));
        let mut to = values.address;
        let [of, as_dtype] = [src.dtype, dtype].map(dtype_number);
        for run in from.runs() {
            let source = (src.address(run.start), of);
            self.device.launch(&convert((to, as_dtype), run.len(), source, special.address));
            to += (run.len() * dtype.size()) as Address;
        }
        self.device.download(values.address, &mut bytes);
        bytes.into()
    }

    fn sum_of_squares(&self, src: &Self::Buffer, range: Range<usize>) -> f64 {
        let squares = Launch::over_sums("squares", range.len());
        let sums = self.scratch((squares.blocks + 1) * size_of::<f64>());
        let result = sums.address + (squares.blocks * size_of::<f64>()) as Address;
        let total = Launch::over_elements("total", 1).with(sums.address).with(squares.blocks);
        let squares = squares.with(src.address(range.start)).with(range.len()).with(sums.address);
        self.device.launch(&squares);
        self.device.launch(&total.with(result));
        let mut sum = [0; size_of::<f64>()];
        self.device.download(result, &mut sum);
        f64::from_le_bytes(sum)
    }

    fn apply(
        &self,
        update: &Update<'_>,
        master: Output<'_, Self::Buffer>,
        state: Vec<Output<'_, Self::Buffer>>,
        gradient: &Self::Buffer,
        published: Option<&mut Self::Buffer>,
    ) {
        let array = |of: &Output<'_, Self::Buffer>| Array {
            from: of.earlier.as_deref().unwrap_or(of.buffer).address(0),
            to: of.buffer.address(0),
        };
        assert_eq!(state.len(), update.optimizer.state().len(), "the state tensors");
        assert_eq!(gradient.numel, master.buffer.numel, "the gradient is of the master's size");
        let step = Step {
            numel: master.buffer.numel,
            master: array(&master),
            state: state.iter().map(|of| (array(of), of.buffer.numel)).collect(),
            gradient: gradient.address(0),
            published: match &published {
                None => Published { to: 0, dtype: 0 },
                Some(of) => Published { to: of.address(0), dtype: dtype_number(of.dtype) },
            },
        };
        let scratch = self.scratch(step.scratch_bytes());
        for launch in step.launches(update, scratch.address) {
            self.device.launch(&launch);
        }
        // The master in its own dtype is not published by the kernels.
        if let Some(published) = published.filter(|of| of.dtype == DType::F32) {
            self.copy(master.buffer, published);
        }
    }

    fn copy(&self, src: &Self::Buffer, dst: &mut Self::Buffer) {
        assert_eq!(src.numel, dst.numel, "copies are of equal size");
        let special = self.scratch(size_of::<u32>());
        let (to, from) = [&*dst, src].map(|of| (of.address(0), dtype_number(of.dtype))).into();
        self.device.launch(&convert(to, src.numel, from, special.address));
    }
}
