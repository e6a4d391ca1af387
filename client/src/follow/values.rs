//! The values of a follower that has no arrays of its own.

use std::collections::BTreeMap;

use zeroshard_model::{DType, Result, TensorId};

use super::Follower;
use crate::{Slots, Target};

/// The values of all followed tensors, in host memory.
#[derive(Debug, Default)]
pub struct FollowedValues(BTreeMap<usize, (DType, Vec<u8>)>);

impl FollowedValues {
    /// Allocates zeros for the tensors of a follower, or for their boxes.
    pub fn new(follower: &Follower) -> Self {
        let zeros = |tensor: usize| {
            let dtype = follower.dtype_of(tensor);
            (dtype, vec![0; follower.numel_of(tensor) * dtype.size()])
        };
        let tensors = follower.tensors().into_iter();
        Self(tensors.map(|tensor| (tensor, zeros(tensor))).collect())
    }

    /// Returns the arrays for [`Follower::apply`].
    ///
    /// # Errors
    /// Those of [`Slots::new`], which does not occur for whole elements.
    pub fn targets(&mut self) -> Result<Vec<Target<'_>>> {
        let mut targets = Vec::with_capacity(self.0.len());
        for (&tensor, (dtype, bytes)) in &mut self.0 {
            let data = Slots::new(&mut bytes[..], *dtype)?;
            targets.push(Target { tensor: TensorId::new(tensor), bounds: None, data });
        }
        Ok(targets)
    }

    /// Returns the dtype and the little-endian bytes of a tensor that owns its storage, or `None`
    /// if it is not followed.
    pub fn get(&self, tensor: usize) -> Option<(DType, &[u8])> {
        self.0.get(&tensor).map(|(dtype, bytes)| (*dtype, &bytes[..]))
    }

    /// Returns the dtype and the bytes of all tensors, by index.
    pub fn iter(&self) -> impl Iterator<Item = (usize, DType, &[u8])> {
        self.0.iter().map(|(tensor, (dtype, bytes))| (*tensor, *dtype, &bytes[..]))
    }
}
