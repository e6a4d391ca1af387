//! State tensors that have a value for each row or column. They are kept so, and transferred in the
//! shape of their parameter.

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Elements, Result, optimizer::StateShape};

use crate::tier::Array;

/// Reads `elements` of a parameter from a state tensor of `shape`, as little-endian bytes of
/// `dtype`.
///
/// # Errors
/// Those of [`Array::read`].
pub(super) fn repeat<B: Backend>(
    backend: &B,
    shape: StateShape,
    state: &Array<B>,
    elements: &Elements,
    dtype: DType,
) -> Result<Bytes> {
    let values = state.read(backend, 0..state.numel(backend), dtype)?;
    let size = dtype.size();
    let mut bytes = Vec::with_capacity(elements.numel() * size);
    for (segment, first) in elements.runs().flat_map(|run| shape.segments(run)) {
        let repeats = matches!(shape, StateShape::Rows { .. });
        let (length, times) = if repeats { (1, segment.len()) } else { (segment.len(), 1) };
        let values = &values[first * size..(first + length) * size];
        (0..times).for_each(|_| bytes.extend_from_slice(values));
    }
    Ok(bytes.into())
}

/// Stores the values of `elements` of a parameter in a state tensor of `shape`. Of the values of a
/// row, or of a column, which are equal, one is kept.
pub(super) fn store<B: Backend>(
    backend: &B,
    shape: StateShape,
    state: &mut B::Buffer,
    elements: &Elements,
    (bytes, dtype): (&[u8], DType),
) -> Result<()> {
    if shape == StateShape::Elements {
        backend.store(state, elements.clone(), bytes, dtype)?;
        return Ok(());
    }
    let mut start = 0;
    for (segment, first) in elements.runs().flat_map(|run| shape.segments(run)) {
        let length = if matches!(shape, StateShape::Rows { .. }) { 1 } else { segment.len() };
        let values = &bytes[start * dtype.size()..(start + length) * dtype.size()];
        backend.store(state, first..first + length, values, dtype)?;
        start += segment.len();
    }
    Ok(())
}
