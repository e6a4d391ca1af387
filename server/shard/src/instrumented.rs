//! The CPU backend for tests: counts writes, refuses memory beyond a limit, and sums blocks as late
//! as GPUs do.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use zeroshard_kernels::{Backend, Cpu, DeviceName, Failure, Output, Record, Result, Update};
use zeroshard_model::{DType, Elements, optimizer::Code};

type Buffer = <Cpu as Backend>::Buffer;

/// The CPU backend with its counters.
pub(crate) struct Instrumented {
    cpu: Cpu,
    /// The number of writes to buffers, except by steps.
    pub(crate) writes: AtomicUsize,
    /// The number of further buffers that can be allocated.
    pub(crate) room: AtomicUsize,
    /// What the device says of itself.
    pub(crate) device: DeviceName,
    pub(crate) is_lost: bool,
}

impl Instrumented {
    /// A backend without a limit on the number of buffers.
    pub(crate) fn new() -> Self {
        let (writes, room) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
        Self { cpu: Cpu::new(), writes, room, device: DeviceName::Cpu, is_lost: false }
    }

    fn take_room(&self, bytes: usize, make: impl FnOnce() -> Result<Buffer>) -> Result<Buffer> {
        let take = |room: usize| room.checked_sub(1);
        match self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => make(),
            Err(_) => Err(Failure::out_of_memory(DeviceName::Cpu, bytes)),
        }
    }

    fn count(&self) -> &Cpu {
        self.writes.fetch_add(1, Ordering::Relaxed);
        &self.cpu
    }
}

impl Backend for Instrumented {
    /// As GPUs, so that tests cover both ways.
    const SUMS_EARLY: bool = false;

    type Buffer = Buffer;

    fn device(&self) -> DeviceName {
        self.device
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn allocate(&self, dtype: DType, numel: usize) -> Result<Buffer> {
        self.take_room(numel * dtype.size(), || self.cpu.allocate(dtype, numel))
    }

    fn allocate_coded(&self, code: Code, numel: usize) -> Result<Buffer> {
        self.take_room(numel, || self.cpu.allocate_coded(code, numel))
    }

    fn another(&self, of: &Buffer) -> Result<Buffer> {
        let another = || self.cpu.another(of);
        self.take_room(self.cpu.bytes(of), another)
    }

    fn bytes(&self, buffer: &Buffer) -> usize {
        self.cpu.bytes(buffer)
    }

    fn populate(&self, buffer: &mut Buffer, range: Range<usize>) {
        self.cpu.populate(buffer, range);
    }

    fn numel(&self, buffer: &Buffer) -> usize {
        self.cpu.numel(buffer)
    }

    fn dtype(&self, buffer: &Buffer) -> DType {
        self.cpu.dtype(buffer)
    }

    fn store(
        &self,
        dst: &mut Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        self.count().store(dst, at, src, dtype)
    }

    fn accumulate(
        &self,
        dst: &mut Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        self.count().accumulate(dst, at, src, dtype)
    }

    fn canonicalise(&self, dst: &mut Buffer, at: impl Into<Elements>) -> Result<()> {
        self.count().canonicalise(dst, at)
    }

    fn read(&self, src: &Arc<Buffer>, from: impl Into<Elements>, dtype: DType) -> Result<Bytes> {
        self.cpu.read(src, from, dtype)
    }

    fn read_tiles(&self, src: &Buffer, tiles: Range<usize>) -> Result<Bytes> {
        self.cpu.read_tiles(src, tiles)
    }

    fn store_tiles(&self, dst: &mut Buffer, tiles: Range<usize>, src: &[u8]) -> Result<()> {
        self.count().store_tiles(dst, tiles, src)
    }

    fn block_sums(&self, src: &Buffer, range: Range<usize>) -> Result<Vec<f64>> {
        self.cpu.block_sums(src, range)
    }

    fn apply(
        &self,
        update: &Update<'_>,
        master: Output<'_, Buffer>,
        state: Vec<Output<'_, Buffer>>,
        gradient: Option<&Buffer>,
        published: Option<&mut Buffer>,
        record: Option<&mut dyn Record>,
    ) -> Result<()> {
        self.cpu.apply(update, master, state, gradient, published, record)
    }

    fn average(
        &self,
        weight: f64,
        values: &Buffer,
        average: [Output<'_, Buffer>; 2],
    ) -> Result<()> {
        self.cpu.average(weight, values, average)
    }

    fn copy(&self, src: &Buffer, dst: &mut Buffer) -> Result<()> {
        self.cpu.copy(src, dst)
    }
}
