//! Arrays of f32 on their way to the wire.

use std::ops::Range;

use bytes::Bytes;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use zeroshard_proto::DType;

#[cfg(target_endian = "big")]
compile_error!("arrays go over the wire as they lie in memory, and the wire is little endian");

/// Shared, immutable f32 values. Cheap to clone; made from a `Vec` without a copy.
#[derive(Debug, Clone)]
pub struct Values(Bytes);

struct Owner(Vec<f32>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        bytemuck::must_cast_slice(&self.0)
    }
}

impl From<Vec<f32>> for Values {
    fn from(values: Vec<f32>) -> Self {
        Self(Bytes::from_owner(Owner(values)))
    }
}

impl Values {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.0.len() / 4
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `range` as little-endian bytes of `dtype`, rounded to nearest even; f32 without a copy.
    pub(crate) fn encode(&self, range: Range<usize>, dtype: DType) -> Bytes {
        let bytes = self.0.slice(range.start * 4..range.end * 4);
        let halves = |round: &dyn Fn(&[f32], &mut [u16])| {
            let values: &[f32] = bytemuck::cast_slice(&bytes);
            let mut halves = vec![0u16; values.len()];
            round(values, &mut halves);
            Bytes::from_owner(Halves(halves))
        };
        match dtype {
            DType::F32 => bytes.clone(),
            DType::Bf16 => halves(&|values, out| {
                bytemuck::must_cast_slice_mut::<_, bf16>(out).convert_from_f32_slice(values);
            }),
            DType::F16 => halves(&|values, out| {
                bytemuck::must_cast_slice_mut::<_, f16>(out).convert_from_f32_slice(values);
            }),
        }
    }
}

struct Halves(Vec<u16>);

impl AsRef<[u8]> for Halves {
    fn as_ref(&self) -> &[u8] {
        bytemuck::must_cast_slice(&self.0)
    }
}

/// Converts whole little-endian elements of `dtype`, at any alignment, into `out`.
pub(crate) fn decode(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    /// On the stack, and enough for the conversion to be vectorised.
    const CHUNK: usize = 1024;
    match dtype {
        DType::F32 => bytemuck::must_cast_slice_mut(out).copy_from_slice(bytes),
        DType::Bf16 | DType::F16 => {
            let mut halves = [0u16; CHUNK];
            for (bytes, out) in bytes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
                let halves = &mut halves[..out.len()];
                bytemuck::must_cast_slice_mut(halves).copy_from_slice(bytes);
                match dtype {
                    DType::Bf16 => bytemuck::must_cast_slice::<_, bf16>(halves).convert_to_f32_slice(out),
                    _ => bytemuck::must_cast_slice::<_, f16>(halves).convert_to_f32_slice(out),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_every_dtype_that_can_hold_them() {
        let values: Vec<f32> = (0..3000).map(|i| (i % 200) as f32 * 0.5).collect();
        for dtype in DType::ALL {
            let bytes = Values::from(values.clone()).encode(5..2500, dtype);
            let mut unaligned = vec![0u8];
            unaligned.extend_from_slice(&bytes);
            let mut out = vec![0.0; 2495];
            decode(&unaligned[1..], dtype, &mut out);
            assert_eq!(out, values[5..2500]);
        }
    }

    #[test]
    fn a_vec_is_not_copied() {
        let values = vec![1.0f32; 8];
        let address = values.as_ptr() as usize;
        assert_eq!(Values::from(values).encode(2..4, DType::F32).as_ptr() as usize, address + 8);
    }
}
