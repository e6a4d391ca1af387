//! Arrays of any dtype, for sending and receiving.

use std::ops::Range;

use bytes::Bytes;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use zeroshard_model::{DType, Error, Result};

#[cfg(target_endian = "big")]
compile_error!("arrays go over the wire as they lie in memory, and the wire is little endian");

/// Shared, immutable values. Cheap to clone; created from a `Vec<f32>` or from bytes without a
/// copy.
#[derive(Debug, Clone)]
pub struct Values {
    /// INVARIANT: whole elements, at any alignment.
    bytes: Bytes,
    dtype: DType,
}

struct Owner(Vec<f32>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        bytemuck::must_cast_slice(&self.0)
    }
}

impl From<Vec<f32>> for Values {
    fn from(values: Vec<f32>) -> Self {
        Self { bytes: Bytes::from_owner(Owner(values)), dtype: DType::F32 }
    }
}

impl Values {
    /// The values in `bytes`, little endian, at any alignment.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the length is not a whole number of elements.
    pub fn new(bytes: Bytes, dtype: DType) -> Result<Self> {
        check_whole("values", bytes.len(), dtype)?;
        Ok(Self { bytes, dtype })
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Encodes `range` as little-endian bytes of `dtype`, rounded to nearest even. Values that
    /// already have this dtype are not copied.
    pub(crate) fn encode(&self, range: Range<usize>, dtype: DType) -> Bytes {
        let size = self.dtype.size();
        let bytes = self.bytes.slice(range.start * size..range.end * size);
        if dtype == self.dtype {
            return bytes;
        }
        let mut converted = vec![0; range.len() * dtype.size()];
        convert(&bytes, self.dtype, &mut converted, dtype);
        converted.into()
    }
}

/// The destination of values: an array of the caller.
#[derive(Debug)]
pub struct Slots<'a> {
    /// INVARIANT: whole elements, at any alignment.
    bytes: &'a mut [u8],
    dtype: DType,
}

impl<'a> From<&'a mut [f32]> for Slots<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self { bytes: bytemuck::must_cast_slice_mut(values), dtype: DType::F32 }
    }
}

impl<'a> From<&'a mut Vec<f32>> for Slots<'a> {
    fn from(values: &'a mut Vec<f32>) -> Self {
        values.as_mut_slice().into()
    }
}

impl<'a> Slots<'a> {
    /// A destination for values of `dtype`, little endian, at any alignment.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the length is not a whole number of elements.
    pub fn new(bytes: &'a mut [u8], dtype: DType) -> Result<Self> {
        check_whole("room for values", bytes.len(), dtype)?;
        Ok(Self { bytes, dtype })
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of values that fit.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Returns whether no value fits.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Splits off the first `count` slots.
    pub(crate) fn split_off(&mut self, count: usize) -> Self {
        let (first, rest) = std::mem::take(&mut self.bytes).split_at_mut(count * self.dtype.size());
        self.bytes = rest;
        Self { bytes: first, dtype: self.dtype }
    }

    /// Fills the slots of `range` with little-endian elements of `dtype`, at any alignment.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are fewer slots, or another number of elements.
    pub fn fill(&mut self, range: Range<usize>, bytes: &[u8], dtype: DType) -> Result<()> {
        let (len, size, numel) = (self.len(), self.dtype.size(), range.len());
        if range.end > len || bytes.len() != numel * dtype.size() {
            let found = format!("{} bytes for elements {range:?} of {len}", bytes.len());
            let expected = format!("{} bytes for existing elements", numel * dtype.size());
            return Err(Error::invalid("values", found, expected));
        }
        let slots = &mut self.bytes[range.start * size..range.end * size];
        convert(bytes, dtype, slots, self.dtype);
        Ok(())
    }

    /// Fills all slots with little-endian elements of `dtype`, at any alignment. The number of
    /// elements equals the number of slots.
    pub(crate) fn decode(self, bytes: &[u8], dtype: DType) {
        convert(bytes, dtype, self.bytes, self.dtype);
    }
}

fn check_whole(what: &str, bytes: usize, dtype: DType) -> Result<()> {
    if bytes.is_multiple_of(dtype.size()) {
        return Ok(());
    }
    let expected = format!("a multiple of {} bytes", dtype.size());
    Err(Error::invalid(format!("{what} of {dtype}"), format!("{bytes} bytes"), expected))
}

/// The number of elements that are converted at once. They are on the stack, and enough for the
/// conversion to be vectorised.
const CHUNK: usize = 1024;

/// Converts the elements of `src` to `to`, through f32, rounded to nearest even. `dst` has the same
/// number of elements.
fn convert(src: &[u8], from: DType, dst: &mut [u8], to: DType) {
    if from == to {
        return dst.copy_from_slice(src);
    }
    let mut values = [0f32; CHUNK];
    for (src, dst) in src.chunks(CHUNK * from.size()).zip(dst.chunks_mut(CHUNK * to.size())) {
        let values = &mut values[..src.len() / from.size()];
        to_f32(src, from, values);
        from_f32(values, dst, to);
    }
}

/// Converts at most [`CHUNK`] elements, at any alignment.
fn to_f32(src: &[u8], dtype: DType, values: &mut [f32]) {
    let mut halves = [0u16; CHUNK];
    let halves = &mut halves[..values.len()];
    match dtype {
        DType::F32 => return bytemuck::must_cast_slice_mut(values).copy_from_slice(src),
        DType::Bf16 | DType::F16 => bytemuck::must_cast_slice_mut(halves).copy_from_slice(src),
    }
    match dtype {
        DType::F16 => bytemuck::must_cast_slice::<_, f16>(halves).convert_to_f32_slice(values),
        _ => bytemuck::must_cast_slice::<_, bf16>(halves).convert_to_f32_slice(values),
    }
}

/// Converts at most [`CHUNK`] elements, at any alignment.
fn from_f32(values: &[f32], dst: &mut [u8], dtype: DType) {
    let mut halves = [0u16; CHUNK];
    let halves = &mut halves[..values.len()];
    match dtype {
        DType::F32 => return dst.copy_from_slice(bytemuck::must_cast_slice(values)),
        DType::F16 => {
            bytemuck::must_cast_slice_mut::<_, f16>(halves).convert_from_f32_slice(values)
        }
        DType::Bf16 => {
            bytemuck::must_cast_slice_mut::<_, bf16>(halves).convert_from_f32_slice(values)
        }
    }
    dst.copy_from_slice(bytemuck::must_cast_slice(halves));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies `bytes` such that no element is aligned.
    fn unaligned(bytes: &[u8]) -> Bytes {
        let mut shifted = vec![0u8];
        shifted.extend_from_slice(bytes);
        Bytes::from(shifted).slice(1..)
    }

    #[test]
    fn values_survive_every_dtype_that_can_represent_them() {
        let values: Vec<f32> = (0..3000).map(|i| (i % 200) as f32 * 0.5).collect();
        for (own, wire, slots) in DType::ALL
            .into_iter()
            .flat_map(|own| DType::ALL.map(|wire| (own, wire)))
            .flat_map(|(own, wire)| DType::ALL.map(|slots| (own, wire, slots)))
        {
            let own_bytes = unaligned(&Values::from(values.clone()).encode(0..3000, own));
            let sent = Values::new(own_bytes, own).unwrap().encode(5..2500, wire);
            let mut bytes = vec![0u8; 2495 * slots.size() + 1];
            Slots::new(&mut bytes[1..], slots).unwrap().decode(&unaligned(&sent), wire);
            let received = Values::new(Bytes::from(bytes).slice(1..), slots).unwrap();
            assert_eq!((received.len(), received.dtype()), (2495, slots));
            let mut out = vec![0.0; 2495];
            Slots::from(&mut out).decode(&received.encode(0..2495, DType::F32), DType::F32);
            assert_eq!(out, values[5..2500], "{own} -> {wire} -> {slots}");
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let values = Values::from(vec![1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0]);
        let bf16 = values.encode(0..2, DType::Bf16);
        assert_eq!(bf16, [0x80, 0x3f, 0x82, 0x3f].as_slice());
    }

    #[test]
    fn values_of_the_same_dtype_are_not_copied_and_keep_every_bit() {
        let values = vec![1.0f32; 8];
        let address = values.as_ptr() as usize;
        assert_eq!(Values::from(values).encode(2..4, DType::F32).as_ptr() as usize, address + 8);
        for dtype in DType::ALL {
            let bytes: Bytes = (0..=255u8).rev().collect::<Vec<_>>().into();
            let sent =
                Values::new(bytes.clone(), dtype).unwrap().encode(0..256 / dtype.size(), dtype);
            assert_eq!(sent.as_ptr(), bytes.as_ptr());
            let mut out = [0u8; 256];
            Slots::new(&mut out, dtype).unwrap().decode(&sent, dtype);
            assert_eq!(out.as_slice(), bytes);
        }
    }

    #[test]
    fn an_incomplete_element_is_refused() {
        for dtype in DType::ALL {
            assert!(matches!(
                Values::new(Bytes::from_static(&[0; 5]), dtype),
                Err(Error::Invalid { .. })
            ));
            assert!(matches!(Slots::new(&mut [0; 5], dtype), Err(Error::Invalid { .. })));
        }
    }

    #[test]
    fn slots_are_split_off_from_the_front() {
        let mut out = vec![0.0; 3];
        let mut slots = Slots::from(&mut out);
        slots.split_off(1).decode(&1f32.to_le_bytes(), DType::F32);
        assert_eq!(slots.len(), 2);
        slots.decode(&[2f32.to_le_bytes(), 3f32.to_le_bytes()].concat(), DType::F32);
        assert_eq!(out, [1.0, 2.0, 3.0]);
    }
}
