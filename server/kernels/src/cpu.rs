//! The reference backend: host memory, one thread per call. Callers distribute slices over threads.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use zeroshard_loops::convert::{self, Bf16, F16, F32};
use zeroshard_model::{DType, Elements, geometry::blocks::BLOCK, optimizer::Code};
use zeroshard_shm::Arena;

use super::failure::DeviceName;
use super::loops::{Level, sum};
use super::memory::Memory;
use super::{Backend, Failure, Output, Record, Result, Update};
use crate::layout::Layout;

mod coded;
pub(crate) mod step;

#[cfg(target_endian = "big")]
compile_error!("buffers are handed out as the little-endian bytes of the wire");

/// The CPU with one instruction set. All instruction sets give the same bits.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    pub(crate) level: Level,
}

impl Cpu {
    /// Uses the fastest instruction set of the machine.
    pub fn new() -> Cpu {
        Cpu::at(Level::best())
    }

    /// Uses a given instruction set, for comparisons.
    pub fn at(level: Level) -> Cpu {
        Cpu { level }
    }

    fn decode(&self, src: &[u8], dtype: DType, dst: &mut [f32]) -> bool {
        match dtype {
            DType::F32 => convert::decode::<F32>(self.level, src, dst),
            DType::Bf16 => convert::decode::<Bf16>(self.level, src, dst),
            DType::F16 => convert::decode::<F16>(self.level, src, dst),
        }
    }

    pub(crate) fn encode(&self, src: &[f32], dst: &mut [u8], dtype: DType) {
        match dtype {
            DType::F32 => convert::encode::<F32>(self.level, src, dst),
            DType::Bf16 => convert::encode::<Bf16>(self.level, src, dst),
            DType::F16 => convert::encode::<F16>(self.level, src, dst),
        }
    }
}

/// Splits `src` by the runs of `at`. Returns whether `each` returned true for all of them.
fn each_run(
    at: &Elements,
    mut src: &[u8],
    dtype: DType,
    mut each: impl FnMut(Range<usize>, &[u8]) -> bool,
) -> bool {
    assert_eq!(src.len(), at.numel() * dtype.size(), "one value for each element");
    at.runs().fold(true, |all, run| {
        let (values, rest) = src.split_at(run.len() * dtype.size());
        src = rest;
        each(run, values) & all
    })
}

impl Default for Cpu {
    fn default() -> Self {
        Cpu::new()
    }
}

/// An array in host memory.
pub struct Buffer {
    /// INVARIANT: `layout.bytes(numel)` bytes.
    memory: Memory,
    layout: Layout,
    numel: usize,
}

impl Buffer {
    pub(crate) fn dtype(&self) -> DType {
        self.layout.dtype()
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        let size = self.dtype().size();
        &self.memory.bytes()[range.start * size..range.end * size]
    }

    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let size = self.dtype().size();
        &mut self.memory.bytes_mut()[range.start * size..range.end * size]
    }

    /// The elements of an f32 buffer.
    pub fn values(&self) -> &[f32] {
        assert_eq!(self.layout, Layout::Values(DType::F32), "an f32 buffer is needed here");
        bytemuck::cast_slice(self.memory.bytes())
    }

    /// The elements of an f32 buffer, for writing.
    pub fn values_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.layout, Layout::Values(DType::F32), "an f32 buffer is needed here");
        bytemuck::cast_slice_mut(self.memory.bytes_mut())
    }
}

/// A buffer whose memory `allocate` provides, from its size in bytes.
fn buffer(
    layout: Layout,
    numel: usize,
    allocate: impl FnOnce(usize) -> Option<Memory>,
) -> Result<Buffer> {
    let bytes = layout.bytes(numel);
    let memory = bytes.and_then(allocate);
    let memory = memory
        .ok_or_else(|| Failure::out_of_memory(DeviceName::Cpu, bytes.unwrap_or(usize::MAX)))?;
    Ok(Buffer { memory, layout, numel })
}

/// A part of a buffer, as the owner of [`Bytes`].
struct View {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        self.buffer.bytes(self.range.clone())
    }
}

impl Backend for Cpu {
    const SUMS_EARLY: bool = true;

    type Buffer = Buffer;

    fn allocate(&self, dtype: DType, numel: usize) -> Result<Buffer> {
        buffer(Layout::Values(dtype), numel, Memory::zeroed)
    }

    fn allocate_in(&self, arena: &Arc<Arena>, dtype: DType, numel: usize) -> Result<Buffer> {
        buffer(Layout::Values(dtype), numel, |bytes| Memory::shared(arena, bytes))
    }

    fn allocate_coded(&self, code: Code, numel: usize) -> Result<Buffer> {
        buffer(Layout::Codes(code), numel, Memory::zeroed)
    }

    fn another(&self, of: &Buffer) -> Result<Buffer> {
        buffer(of.layout, of.numel, |_| of.memory.another())
    }

    fn bytes(&self, buffer: &Buffer) -> usize {
        buffer.memory.bytes().len()
    }

    fn place(&self, buffer: &Buffer) -> Option<Range<usize>> {
        buffer.memory.place()
    }

    fn populate(&self, buffer: &mut Buffer, range: Range<usize>) {
        let size = match buffer.layout {
            Layout::Values(dtype) => dtype.size(),
            // The exponents behind the codes of a whole slice are 32 KiB.
            Layout::Codes(_) => 1,
        };
        buffer.memory.populate(range.start * size..range.end * size);
    }

    fn numel(&self, buffer: &Buffer) -> usize {
        buffer.numel
    }

    fn dtype(&self, buffer: &Buffer) -> DType {
        buffer.dtype()
    }

    fn store(
        &self,
        dst: &mut Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        let at = at.into();
        let to = match dst.layout {
            Layout::Values(to) => to,
            Layout::Codes(code) => {
                return Ok(each_run(&at, src, dtype, |run, src| {
                    self.store_coded(code, dst, run, src, dtype)
                }));
            }
        };
        Ok(match to {
            DType::F32 => {
                // The compiler copies first and then checks. With tiles, the checked data is in
                // cache.
                const TILE: usize = 4_096;
                let dst = dst.values_mut();
                each_run(&at, src, dtype, |run, src| {
                    let tiles = src.chunks(TILE * dtype.size()).zip(dst[run].chunks_mut(TILE));
                    tiles.fold(true, |finite, (src, dst)| self.decode(src, dtype, dst) & finite)
                })
            }
            DType::Bf16 | DType::F16 => each_run(&at, src, dtype, |run, src| {
                convert::cast(self.level, src, dtype, dst.bytes_mut(run), to)
            }),
        })
    }

    fn accumulate(
        &self,
        dst: &mut Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        let dst = dst.values_mut();
        let add = match dtype {
            DType::F32 => convert::accumulate::<F32>,
            DType::Bf16 => convert::accumulate::<Bf16>,
            DType::F16 => convert::accumulate::<F16>,
        };
        Ok(each_run(&at.into(), src, dtype, |run, src| add(self.level, src, &mut dst[run])))
    }

    fn canonicalise(&self, dst: &mut Buffer, at: impl Into<Elements>) -> Result<()> {
        let dst = dst.values_mut();
        at.into().runs().for_each(|run| convert::canonicalise(self.level, &mut dst[run]));
        Ok(())
    }

    fn read(&self, src: &Arc<Buffer>, from: impl Into<Elements>, dtype: DType) -> Result<Bytes> {
        let from = from.into();
        let src_dtype = match src.layout {
            Layout::Values(src_dtype) => src_dtype,
            Layout::Codes(code) => return Ok(self.read_coded(code, src, &from, dtype)),
        };
        if src_dtype != dtype {
            let mut bytes = Vec::with_capacity(from.numel() * dtype.size());
            for run in from.runs() {
                convert::append(self.level, src.bytes(run), src_dtype, &mut bytes, dtype);
            }
            return Ok(bytes.into());
        }
        if let Elements::Range(range) = from {
            return Ok(Bytes::from_owner(View { buffer: Arc::clone(src), range }));
        }
        let mut bytes = Vec::with_capacity(from.numel() * dtype.size());
        from.runs().for_each(|run| bytes.extend_from_slice(src.bytes(run)));
        Ok(bytes.into())
    }

    fn read_tiles(&self, src: &Buffer, tiles: Range<usize>) -> Result<Bytes> {
        Ok(coded::read_tiles(src, tiles))
    }

    fn store_tiles(&self, dst: &mut Buffer, tiles: Range<usize>, src: &[u8]) -> Result<()> {
        coded::store_tiles(dst, tiles, src);
        Ok(())
    }

    fn block_sums(&self, src: &Buffer, range: Range<usize>) -> Result<Vec<f64>> {
        let blocks = src.values()[range].chunks(BLOCK);
        Ok(blocks.map(|block| sum::of_block(self.level, block)).collect())
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
        step::apply(self, update, master, state, gradient, published, record);
        Ok(())
    }

    fn average(
        &self,
        weight: f64,
        values: &Buffer,
        [high, low]: [Output<'_, Buffer>; 2],
    ) -> Result<()> {
        step::average(self, weight, values, high, low);
        Ok(())
    }

    fn copy(&self, src: &Buffer, dst: &mut Buffer) -> Result<()> {
        assert_eq!(src.numel, dst.numel, "a copy has as many elements");
        if src.layout == dst.layout {
            dst.memory.bytes_mut().copy_from_slice(src.memory.bytes());
            return Ok(());
        }
        match (src.layout, dst.layout) {
            (Layout::Values(from), Layout::Values(to)) => {
                let (from_bytes, to_bytes) = (src.memory.bytes(), dst.memory.bytes_mut());
                convert::cast(self.level, from_bytes, from, to_bytes, to);
            }
            (Layout::Values(from), Layout::Codes(code)) => {
                self.store_coded(code, dst, 0..src.numel, src.memory.bytes(), from);
            }
            (Layout::Codes(code), Layout::Values(to)) => {
                self.decode_into(code, src, 0..src.numel, dst.memory.bytes_mut(), to);
            }
            (Layout::Codes(_), Layout::Codes(_)) => unreachable!("a copy has the same code"),
        }
        Ok(())
    }
}
