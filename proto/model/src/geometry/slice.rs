//! Slices of a tensor.

/// Consecutive elements of one tensor: the unit of ownership and movement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceSpec {
    /// The index of the tensor that owns the storage.
    pub tensor: usize,
    /// The first element, relative to the flattened tensor.
    pub offset: usize,
    /// The number of elements; at least 1.
    pub numel: usize,
}
