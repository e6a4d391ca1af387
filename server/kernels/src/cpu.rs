//! The reference backend: host memory, one thread per call. Callers distribute slices over threads.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use zeroshard_model::{DType, Elements, geometry::blocks::BLOCK};

use super::failure::DeviceName;
use super::loops::convert::{self, Bf16, F16, F32};
use super::loops::{Level, sum};
use super::memory::Memory;
use super::{Backend, Failure, Output, Result, Update};

mod step;

#[cfg(target_endian = "big")]
compile_error!("buffers are handed out as the little-endian bytes of the wire");

/// The CPU with one instruction set. All instruction sets give the same bits.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    level: Level,
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

    fn encode(&self, src: &[f32], dst: &mut [u8], dtype: DType) {
        match dtype {
            DType::F32 => convert::encode::<F32>(self.level, src, dst),
            DType::Bf16 => convert::encode::<Bf16>(self.level, src, dst),
            DType::F16 => convert::encode::<F16>(self.level, src, dst),
        }
    }

    /// Converts between any two dtypes, through f32. Returns whether all values of `src` are
    /// finite.
    fn convert(
        &self,
        src: &[u8],
        from: DType,
        dst: &mut [u8],
        to: DType,
        scratch: &mut Scratch,
    ) -> bool {
        let mut finite = true;
        let sources = src.chunks(scratch.len() * from.size());
        for (src, dst) in sources.zip(dst.chunks_mut(scratch.len() * to.size())) {
            let values = &mut scratch[..src.len() / from.size()];
            finite &= self.decode(src, from, values);
            self.encode(values, dst, to);
        }
        finite
    }
}

/// Values during the conversion from one dtype to another. The array fits into the first-level
/// cache, and is created once for all runs.
type Scratch = [f32; 2_048];

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
    /// INVARIANT: `numel * dtype.size()` bytes.
    memory: Memory,
    dtype: DType,
    numel: usize,
}

impl Buffer {
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        let size = self.dtype.size();
        &self.memory.bytes()[range.start * size..range.end * size]
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let size = self.dtype.size();
        &mut self.memory.bytes_mut()[range.start * size..range.end * size]
    }

    /// The elements of an f32 buffer.
    pub fn values(&self) -> &[f32] {
        assert_eq!(self.dtype, DType::F32, "an f32 buffer is needed here");
        bytemuck::cast_slice(self.memory.bytes())
    }

    /// The elements of an f32 buffer, for writing.
    pub fn values_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype, DType::F32, "an f32 buffer is needed here");
        bytemuck::cast_slice_mut(self.memory.bytes_mut())
    }
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
        let memory = numel.checked_mul(dtype.size()).and_then(Memory::zeroed);
        let bytes = numel.saturating_mul(dtype.size());
        let memory = memory.ok_or_else(|| Failure::out_of_memory(DeviceName::Cpu, bytes))?;
        Ok(Buffer { memory, dtype, numel })
    }

    fn populate(&self, buffer: &mut Buffer, range: Range<usize>) {
        let size = buffer.dtype.size();
        buffer.memory.populate(range.start * size..range.end * size);
    }

    fn numel(&self, buffer: &Buffer) -> usize {
        buffer.numel
    }

    fn dtype(&self, buffer: &Buffer) -> DType {
        buffer.dtype
    }

    fn store(
        &self,
        dst: &mut Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool> {
        let (at, to) = (at.into(), dst.dtype);
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
            DType::Bf16 | DType::F16 => {
                let mut scratch = [0.0; _];
                each_run(&at, src, dtype, |run, src| {
                    self.convert(src, dtype, dst.bytes_mut(run), to, &mut scratch)
                })
            }
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
        if src.dtype != dtype {
            let mut bytes = vec![0; from.numel() * dtype.size()];
            let (mut rest, mut scratch) = (&mut bytes[..], [0.0; _]);
            for run in from.runs() {
                let dst = rest
                    .split_off_mut(..run.len() * dtype.size())
                    .expect("as long as all runs together");
                self.convert(src.bytes(run), src.dtype, dst, dtype, &mut scratch);
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

    fn block_sums(&self, src: &Buffer, range: Range<usize>) -> Result<Vec<f64>> {
        let blocks = src.values()[range].chunks(BLOCK);
        Ok(blocks.map(|block| sum::of_block(self.level, block)).collect())
    }

    fn apply(
        &self,
        update: &Update<'_>,
        master: Output<'_, Buffer>,
        state: Vec<Output<'_, Buffer>>,
        gradient: &Buffer,
        published: Option<&mut Buffer>,
    ) -> Result<()> {
        step::apply(self, update, master, state, gradient, published);
        Ok(())
    }

    fn copy(&self, src: &Buffer, dst: &mut Buffer) -> Result<()> {
        assert_eq!(src.numel, dst.numel, "a copy has as many elements");
        if src.dtype == dst.dtype {
            dst.memory.bytes_mut().copy_from_slice(src.memory.bytes());
        } else {
            let to = dst.dtype;
            self.convert(src.memory.bytes(), src.dtype, dst.memory.bytes_mut(), to, &mut [0.0; _]);
        }
        Ok(())
    }
}
