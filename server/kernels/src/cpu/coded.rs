//! Buffers of 8-bit state in host memory.

use std::ops::Range;

use bytes::Bytes;
use zeroshard_model::{DType, Elements, StateDType, geometry::blocks::TILE, optimizer::Code};

use super::{
    Buffer, Cpu,
    step::{Arrays, Prefetch},
};
use crate::{
    Output, Update,
    loops::{
        Level,
        code::{
            self, Positive, Signed,
            step::{OneState, Stepped, TwoStates, step_one, step_two},
        },
        prefetch::prefetch,
    },
    random::{self, TileKey},
};

/// The codes of a buffer of 8-bit state, and the exponents.
fn parts(buffer: &Buffer) -> (&[u8], &[u8]) {
    buffer.memory.bytes().split_at(buffer.numel)
}

fn parts_mut(buffer: &mut Buffer) -> (&mut [u8], &mut [u8]) {
    let numel = buffer.numel;
    buffer.memory.bytes_mut().split_at_mut(numel)
}

/// 8-bit state that a step reads and writes.
pub(crate) struct Coded<'a> {
    code: Code,
    codes: &'a mut [u8],
    exponents: &'a mut [u8],
    /// The earlier codes and exponents, if they are elsewhere.
    earlier: Option<(&'a [u8], &'a [u8])>,
}

impl<'a> Coded<'a> {
    pub(super) fn of(output: &'a mut Output<'_, Buffer>) -> Self {
        let code = output.buffer.layout.code().expect("all state tensors have codes, or none");
        let earlier = output.earlier.as_deref();
        assert!(earlier.is_none_or(|of| of.layout == output.buffer.layout), "of the same code");
        let earlier = earlier.map(parts);
        let (codes, exponents) = parts_mut(output.buffer);
        assert!(earlier.is_none_or(|(of, _)| of.len() == codes.len()), "of equal size");
        Self { code, codes, exponents, earlier }
    }

    pub(super) fn len(&self) -> usize {
        self.codes.len()
    }

    pub(super) fn code(&self) -> Code {
        self.code
    }

    /// The codes of a tile and its exponent byte, with the earlier ones. They are copied while the
    /// step has them in cache.
    #[inline]
    fn tile(&mut self, range: &Range<usize>) -> (&mut [u8], &mut u8) {
        let number = range.start / TILE;
        let (codes, exponent) = (&mut self.codes[range.clone()], &mut self.exponents[number]);
        if let Some((earlier, exponents)) = self.earlier {
            *exponent = exponents[number];
            codes.copy_from_slice(&earlier[range.clone()]);
        }
        (codes, exponent)
    }
}

impl Prefetch for Coded<'_> {
    const STEP_PREFETCHES: bool = true;

    #[inline]
    fn prefetch(&self, range: Range<usize>) {
        if let Some((codes, _)) = self.earlier {
            prefetch(&codes[range]);
        }
    }
}

/// The random numbers of a step.
struct Random {
    key: u64,
    /// The number of the first tile in the tensor.
    first: u64,
}

impl Random {
    fn of(update: &Update<'_>) -> Self {
        let first = update.at.element / TILE as u64;
        Self { key: random::key(update.step, update.at.tensor), first }
    }

    #[inline]
    fn tile(&self, range: &Range<usize>) -> TileKey {
        TileKey::new(self.key, self.first + (range.start / TILE) as u64)
    }
}

/// The elements of a tile, followed by zeros: those of the last tile may be fewer.
fn padded<T: Copy + Default>(values: &[T]) -> [T; TILE] {
    let mut padded = [T::default(); TILE];
    padded[..values.len()].copy_from_slice(values);
    padded
}

impl Cpu {
    /// A step with one tensor of 8-bit state.
    pub(crate) fn step_one<S: OneState>(&self, s: &S, update: &Update<'_>, mut arrays: Arrays<'_>) {
        let (state, random, level) = (arrays.state.take_coded(), Random::of(update), self.level);
        let mut stepped = Stepped::new(random.tile(&(0..0)));
        self.each_tile(arrays, state, |tile, parameter, [state]: &mut [Coded<'_>; 1], gradient| {
            stepped.key = random.tile(&tile);
            let (codes, exponent) = state.tile(&tile);
            if let (Some(p), Some(codes), Some(gradient)) =
                (parameter.as_mut_array(), codes.as_mut_array(), gradient.as_array())
            {
                *exponent = step_one(level, s, p, codes, *exponent, gradient, &mut stepped);
                return;
            }
            let (mut p, mut whole, gradient) = (padded(parameter), padded(codes), padded(gradient));
            *exponent = step_one(level, s, &mut p, &mut whole, *exponent, &gradient, &mut stepped);
            parameter.copy_from_slice(&p[..tile.len()]);
            codes.copy_from_slice(&whole[..tile.len()]);
        });
    }

    /// A step with two tensors of 8-bit state.
    pub(crate) fn step_two<S: TwoStates>(
        &self,
        s: &S,
        update: &Update<'_>,
        mut arrays: Arrays<'_>,
    ) {
        let (state, random) = (arrays.state.take_coded(), Random::of(update));
        let mut stepped = Stepped::new(random.tile(&(0..0)));
        let step = |tile: Range<usize>,
                    parameter: &mut [f32],
                    [first, second]: &mut [Coded<'_>; 2],
                    gradient: &[f32]| {
            stepped.key = random.tile(&tile);
            let ((m, exponent_m), (v, exponent_v)) = (first.tile(&tile), second.tile(&tile));
            let exponents = [*exponent_m, *exponent_v];
            let mut step = |parameter: &mut _, codes: [&mut _; 2], gradient: &_| {
                [*exponent_m, *exponent_v] =
                    step_two(self.level, s, parameter, codes, exponents, gradient, &mut stepped);
            };
            if let (Some(parameter), Some(m), Some(v), Some(gradient)) =
                (parameter.as_mut_array(), m.as_mut_array(), v.as_mut_array(), gradient.as_array())
            {
                return step(parameter, [m, v], gradient);
            }
            let (mut p, gradient) = (padded(parameter), padded(gradient));
            let [mut whole_m, mut whole_v] = [padded(m), padded(v)];
            step(&mut p, [&mut whole_m, &mut whole_v], &gradient);
            parameter.copy_from_slice(&p[..tile.len()]);
            m.copy_from_slice(&whole_m[..tile.len()]);
            v.copy_from_slice(&whole_v[..tile.len()]);
        };
        self.each_tile(arrays, state, step);
    }
}

fn decode(code: Code, level: Level, codes: &[u8], exponent: u8, values: &mut [f32]) {
    match code {
        Code::Signed => code::decode::<Signed>(level, codes, exponent, values),
        Code::Positive => code::decode::<Positive>(level, codes, exponent, values),
    }
}

impl Cpu {
    /// Encodes whole tiles of values of `dtype`, rounded to nearest. Returns whether all values are
    /// finite.
    pub(super) fn store_coded(
        &self,
        code: Code,
        dst: &mut Buffer,
        run: Range<usize>,
        src: &[u8],
        dtype: DType,
    ) -> bool {
        let is_whole = run.end.is_multiple_of(TILE) || run.end == dst.numel;
        assert!(run.start.is_multiple_of(TILE) && is_whole, "whole tiles are stored");
        let encode = match code {
            Code::Signed => code::encode::<Signed>,
            Code::Positive => code::encode::<Positive>,
        };
        let (codes, exponents) = parts_mut(dst);
        let (mut scratch, mut finite) = ([0.0; TILE], true);
        let first = run.start / TILE;
        let tiles = codes[run].chunks_mut(TILE).zip(&mut exponents[first..]);
        for ((codes, exponent), src) in tiles.zip(src.chunks(TILE * dtype.size())) {
            let values = &mut scratch[..codes.len()];
            finite &= self.decode(src, dtype, values);
            *exponent = encode(self.level, values, codes);
        }
        finite
    }

    /// Decodes consecutive elements, as little-endian bytes of `dtype`.
    pub(super) fn decode_into(
        &self,
        code: Code,
        src: &Buffer,
        run: Range<usize>,
        mut dst: &mut [u8],
        dtype: DType,
    ) {
        let (codes, exponents) = parts(src);
        let (mut scratch, mut start) = ([0.0; TILE], run.start);
        while start < run.end {
            let tile = start - start % TILE;
            let part = start..run.end.min(tile + TILE);
            let values = &mut scratch[..part.len()];
            decode(code, self.level, &codes[part.clone()], exponents[tile / TILE], values);
            let bytes = dst.split_off_mut(..values.len() * dtype.size());
            self.encode(values, bytes.expect("as long as the run"), dtype);
            start = part.end;
        }
    }

    /// Decodes elements, as little-endian bytes of `dtype`.
    pub(super) fn read_coded(
        &self,
        code: Code,
        src: &Buffer,
        from: &Elements,
        dtype: DType,
    ) -> Bytes {
        let mut bytes = vec![0; from.numel() * dtype.size()];
        let mut rest = &mut bytes[..];
        for run in from.runs() {
            let dst = rest.split_off_mut(..run.len() * dtype.size());
            self.decode_into(code, src, run, dst.expect("as long as all runs together"), dtype);
        }
        bytes.into()
    }
}

/// The codes and exponents of whole tiles, one after the other.
pub(super) fn read_tiles(src: &Buffer, tiles: Range<usize>) -> Bytes {
    let (codes, exponents) = parts(src);
    let mut bytes = Vec::with_capacity(StateDType::Int8.bytes(tiles.len()));
    bytes.extend_from_slice(&codes[tiles.clone()]);
    bytes.extend_from_slice(&exponents[exponents_of(tiles)]);
    bytes.into()
}

/// Stores what [`read_tiles`] has returned.
pub(super) fn store_tiles(dst: &mut Buffer, tiles: Range<usize>, src: &[u8]) {
    let (codes, exponents) = parts_mut(dst);
    let (new_codes, new_exponents) = src.split_at(tiles.len());
    codes[tiles.clone()].copy_from_slice(new_codes);
    exponents[exponents_of(tiles)].copy_from_slice(new_exponents);
}

/// The numbers of whole tiles.
fn exponents_of(tiles: Range<usize>) -> Range<usize> {
    tiles.start / TILE..tiles.end.div_ceil(TILE)
}
