//! Values of tensors in host memory.

use std::ops::{Deref, DerefMut};

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, Shape, Tensor, TensorData};
use zeroshard_client::Values;
use zeroshard_model::DType;

/// The f32 values of a tensor in host memory, where its backend has put them. A GPU copies them to
/// pinned memory, from which they are sent; a `Vec` would be a second copy.
#[derive(Debug)]
pub struct HostValues(
    /// INVARIANT: f32.
    TensorData,
);

impl HostValues {
    /// Copies a tensor to host memory, and waits until it is there.
    pub fn of<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Self {
        Self(tensor.into_data().convert::<f32>())
    }

    /// The values of a tensor of this shape.
    pub(crate) fn into_data(self, shape: Shape) -> TensorData {
        TensorData { shape, ..self.0 }
    }
}

impl From<Vec<f32>> for HostValues {
    fn from(values: Vec<f32>) -> Self {
        let numel = values.len();
        Self(TensorData::new(values, [numel]))
    }
}

impl Deref for HostValues {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_slice().expect("the data is f32")
    }
}

impl DerefMut for HostValues {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.0.as_mut_slice().expect("the data is f32")
    }
}

/// Without a copy.
impl From<HostValues> for Values {
    fn from(values: HostValues) -> Self {
        let bytes = bytes::Bytes::from_owner(Owner(values.0.bytes));
        Self::new(bytes, DType::F32).expect("f32 values are whole elements")
    }
}

struct Owner(Bytes);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{AllocationProperty, DType as TensorDType};

    use super::*;

    #[test]
    fn values_in_pinned_memory_are_sent_from_there() {
        let pinned = bytes::Bytes::from(bytemuck::cast_slice::<f32, u8>(&[1.0, 2.0, 3.0]).to_vec());
        let address = pinned.as_ptr();
        let data = Bytes::from_shared(pinned, AllocationProperty::Pinned);
        let values = HostValues(TensorData::from_bytes(data, [3], TensorDType::F32));
        assert_eq!(*values, [1.0, 2.0, 3.0]);
        assert_eq!(values.as_ptr().cast(), address);
        assert_eq!(Owner(values.0.bytes).as_ref().as_ptr(), address);
    }
}
