//! The reference backend: host memory, one thread a call. Callers spread slices over threads.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use zeroshard_proto::dtype::DType;

use super::kernels::convert::{self, Bf16, F16, F32};
use super::kernels::{Level, sum};
use super::memory::Memory;
use super::{Backend, OutOfMemory, Update};

mod step;

#[cfg(target_endian = "big")]
compile_error!("buffers are handed out as the little-endian bytes of the wire");

/// The CPU, at one instruction set. All of them give the same bits.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    level: Level,
}

impl Cpu {
    /// The fastest instruction set that the machine has.
    pub fn new() -> Cpu {
        Cpu::at(Level::best())
    }

    /// A given instruction set, to compare them.
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

    /// Converts between any two dtypes, by way of f32. Returns whether all of `src` is finite.
    fn convert(&self, src: &[u8], from: DType, dst: &mut [u8], to: DType) -> bool {
        const CHUNK: usize = 2_048;
        let mut values = [0.0; CHUNK];
        let mut finite = true;
        let sources = src.chunks(CHUNK * from.size());
        for (src, dst) in sources.zip(dst.chunks_mut(CHUNK * to.size())) {
            let values = &mut values[..src.len() / from.size()];
            finite &= self.decode(src, from, values);
            self.encode(values, dst, to);
        }
        finite
    }
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

    /// The elements of an f32 buffer, to write.
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
    type Buffer = Buffer;

    fn allocate(&self, dtype: DType, numel: usize) -> Result<Buffer, OutOfMemory> {
        let memory = numel.checked_mul(dtype.size()).and_then(Memory::zeroed);
        let memory = memory.ok_or(OutOfMemory { numel, dtype })?;
        Ok(Buffer { memory, dtype, numel })
    }

    fn numel(&self, buffer: &Buffer) -> usize {
        buffer.numel
    }

    fn dtype(&self, buffer: &Buffer) -> DType {
        buffer.dtype
    }

    fn store(&self, dst: &mut Buffer, offset: usize, src: &[u8], dtype: DType) -> bool {
        let to = dst.dtype;
        let range = offset..offset + src.len() / dtype.size();
        match to {
            DType::F32 => {
                // The compiler copies first and checks then: piece by piece, so that what is checked is in cache.
                const TILE: usize = 4_096;
                let tiles = src.chunks(TILE * dtype.size()).zip(dst.values_mut()[range].chunks_mut(TILE));
                tiles.fold(true, |finite, (src, dst)| self.decode(src, dtype, dst) & finite)
            }
            DType::Bf16 | DType::F16 => self.convert(src, dtype, dst.bytes_mut(range), to),
        }
    }

    fn accumulate(&self, dst: &mut Buffer, offset: usize, src: &[u8], dtype: DType) -> bool {
        let dst = &mut dst.values_mut()[offset..offset + src.len() / dtype.size()];
        match dtype {
            DType::F32 => convert::accumulate::<F32>(self.level, src, dst),
            DType::Bf16 => convert::accumulate::<Bf16>(self.level, src, dst),
            DType::F16 => convert::accumulate::<F16>(self.level, src, dst),
        }
    }

    fn read(&self, src: &Arc<Buffer>, range: Range<usize>, dtype: DType) -> Bytes {
        if src.dtype == dtype {
            let buffer = Arc::clone(src);
            return Bytes::from_owner(View { buffer, range });
        }
        let mut bytes = vec![0; range.len() * dtype.size()];
        self.convert(src.bytes(range), src.dtype, &mut bytes, dtype);
        bytes.into()
    }

    fn sum_of_squares(&self, src: &Buffer, range: Range<usize>) -> f64 {
        sum::of_squares(self.level, &src.values()[range])
    }

    fn apply(
        &self,
        update: &Update<'_>,
        master: &mut Buffer,
        state: &mut [&mut Buffer],
        gradient: &Buffer,
        published: Option<&mut Buffer>,
    ) {
        step::apply(self, update, master, state, gradient, published);
    }

    fn copy(&self, src: &Buffer, dst: &mut Buffer) {
        assert_eq!(src.numel, dst.numel, "a copy has as many elements");
        if src.dtype == dst.dtype {
            dst.memory.bytes_mut().copy_from_slice(src.memory.bytes());
        } else {
            let to = dst.dtype;
            self.convert(src.memory.bytes(), src.dtype, dst.memory.bytes_mut(), to);
        }
    }
}
