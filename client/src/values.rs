//! Arrays of any dtype, for sending and receiving.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_loops::{
    Level,
    convert::{append, cast},
    int8::{self, Rounding},
};
use zeroshard_model::{DType, Error, Result};
use zeroshard_proto::{Wire, frame::Reference};
use zeroshard_shm::{Keeper, Pane, View};

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
        if dtype == self.dtype {
            return self.bytes.slice_ref(self.bytes_of(range));
        }
        let mut encoded = Vec::new();
        self.append(range, dtype, &mut encoded);
        encoded.into()
    }

    /// Encodes `range` like [`Self::encode`], at the end of `to`.
    pub(crate) fn append(&self, range: Range<usize>, dtype: DType, to: &mut Vec<u8>) {
        let bytes = self.bytes_of(range);
        match dtype == self.dtype {
            true => to.extend_from_slice(bytes),
            false => _ = append(Level::best(), bytes, self.dtype, to, dtype),
        }
    }

    /// Encodes `range` like [`Self::encode`], into `to`, which has this size.
    pub(crate) fn encode_into(&self, range: Range<usize>, dtype: DType, to: &mut [u8]) {
        convert(self.bytes_of(range), self.dtype, to, dtype);
    }

    /// Encodes `range` as tiles, into `to`, which has their size. Its first element is number
    /// `first` of the tensor, a multiple of [`int8::TILE`].
    pub(crate) fn encode_int8(
        &self,
        range: Range<usize>,
        first: u64,
        rounding: &Rounding,
        to: &mut [u8],
    ) {
        int8::encode(Level::best(), self.bytes_of(range), self.dtype, first, rounding, to);
    }

    fn bytes_of(&self, range: Range<usize>) -> &[u8] {
        let size = self.dtype.size();
        &self.bytes[range.start * size..range.end * size]
    }
}

/// The destination of values: an array of the caller.
#[derive(Debug)]
pub struct Slots<'a> {
    /// INVARIANT: whole elements, at any alignment.
    bytes: &'a mut [u8],
    dtype: DType,
    /// The pane in which the array is, if it is in one.
    pane: Option<Arc<Pane>>,
}

impl<'a> From<&'a mut [f32]> for Slots<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        let bytes = bytemuck::must_cast_slice_mut(values);
        Self { bytes, dtype: DType::F32, pane: None }
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
        Ok(Self { bytes, dtype, pane: None })
    }

    /// The same slots, which are the memory of a pane: values that a server on this host has in
    /// memory are shown in it, and not copied.
    ///
    /// # Errors
    /// [`Error::Refused`] if they are other memory.
    pub fn in_pane(self, pane: Arc<Pane>) -> Result<Self> {
        if self.bytes.as_ptr() as usize != pane.address() || self.bytes.len() != pane.len() {
            return Err(Error::refused("the room for values is not the memory of the pane"));
        }
        Ok(Self { pane: Some(pane), ..self })
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

    /// The memory of the slots, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.own();
        self.bytes
    }

    /// The same slots, for a while.
    pub(crate) fn reborrow(&mut self) -> Slots<'_> {
        Slots { bytes: self.bytes, dtype: self.dtype, pane: self.pane.clone() }
    }

    /// Splits off the first `count` slots.
    pub(crate) fn split_off(&mut self, count: usize) -> Self {
        let (first, rest) = std::mem::take(&mut self.bytes).split_at_mut(count * self.dtype.size());
        self.bytes = rest;
        Self { bytes: first, dtype: self.dtype, pane: self.pane.clone() }
    }

    /// Shows values, which a server keeps as long as `hold` exists, in the first slots. Returns
    /// `false` if the slots are not in a pane, or the values must be copied.
    pub(crate) fn show(
        &self,
        view: &Arc<View>,
        reference: Reference,
        wire: Wire,
        hold: &mut Option<Keeper>,
    ) -> bool {
        let Some(pane) = self.pane.as_ref().filter(|_| wire == self.dtype.into()) else {
            return false;
        };
        let start = self.bytes.as_ptr() as usize - pane.address();
        let range = start..start + reference.bytes as usize;
        let shown = pane.show(range, view, reference.at, hold);
        shown.inspect_err(|error| tracing::debug!(%error, "values are copied")).unwrap_or(false)
    }

    /// Fills the slots of `range` with little-endian elements of `dtype`, at any alignment.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are fewer slots, or another number of elements.
    pub fn fill(&mut self, range: Range<usize>, bytes: &[u8], dtype: DType) -> Result<()> {
        let (len, size, numel) = (self.len(), self.dtype.size(), range.len());
        if range.end > len || bytes.len() != numel * dtype.size() {
            let bytes = bytes.len();
            return Err(Error::refused(format!(
                "{bytes} bytes of {dtype} do not fill the elements {range:?} of {len}"
            )));
        }
        self.own();
        let slots = &mut self.bytes[range.start * size..range.end * size];
        convert(bytes, dtype, slots, self.dtype);
        Ok(())
    }

    /// Makes the slots memory of this process, to be written. If that fails, the kernel copies the
    /// pages that are written.
    fn own(&self) {
        if let Some(pane) = &self.pane {
            let start = self.bytes.as_ptr() as usize - pane.address();
            let _ = pane.own(start..start + self.bytes.len());
        }
    }

    /// Fills all slots with encoded elements, at any alignment. The number of elements equals the
    /// number of slots.
    pub(crate) fn decode(self, bytes: &[u8], wire: impl Into<Wire>) {
        self.own();
        match wire.into() {
            Wire::Plain(dtype) => convert(bytes, dtype, self.bytes, self.dtype),
            Wire::Int8 => int8::decode(Level::best(), bytes, self.bytes, self.dtype),
        }
    }
}

fn check_whole(what: &str, bytes: usize, dtype: DType) -> Result<()> {
    if bytes.is_multiple_of(dtype.size()) {
        return Ok(());
    }
    let expected = format!("a multiple of {} bytes", dtype.size());
    Err(Error::invalid(format!("{what} of {dtype}"), format!("{bytes} bytes"), expected))
}

/// Converts the elements of `src` to `to`, through f32, rounded to nearest even. `dst` has the same
/// number of elements.
fn convert(src: &[u8], from: DType, dst: &mut [u8], to: DType) {
    match from == to {
        true => dst.copy_from_slice(src),
        false => _ = cast(Level::best(), src, from, dst, to),
    }
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
    fn int8_is_encoded_from_and_decoded_to_every_dtype() {
        // The scale of a tile is at most 1.
        let numbers: Vec<f32> = (0..3000).map(|i| ((i * 7) % 255 - 127) as f32).collect();
        for (own, slots) in DType::ALL.into_iter().flat_map(|own| DType::ALL.map(|to| (own, to))) {
            let bytes = unaligned(&Values::from(numbers.clone()).encode(0..3000, own));
            let values = Values::new(bytes, own).unwrap();
            let mut tiles = vec![0; Wire::Int8.bytes(2872)];
            let rounding = Rounding::of_gradient(0, 0, 0, 0);
            values.encode_int8(128..3000, 128, &rounding, &mut tiles);
            let mut bytes = vec![0u8; 2872 * slots.size() + 1];
            let to = Slots::new(&mut bytes[1..], slots).unwrap();
            to.decode(&unaligned(&tiles), Wire::Int8);
            let received = Values::new(Bytes::from(bytes).slice(1..), slots).unwrap();
            let mut out = vec![0.0; 2872];
            Slots::from(&mut out).decode(&received.encode(0..2872, DType::F32), DType::F32);
            for (number, out) in numbers[128..].iter().zip(out) {
                assert!((number - out).abs() <= 1.0, "{own} to {slots}: {number} {out}");
            }
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
