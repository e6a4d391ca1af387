//! Tensors and dtypes in messages.

use zeroshard_model::{DType, Error, Policy, Result, TensorLayout, TensorSpec};

use crate::pb;

impl From<&TensorSpec> for pb::Tensor {
    fn from(tensor: &TensorSpec) -> Self {
        Self {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: pb::Dtype::from(tensor.dtype).into(),
            frozen: tensor.frozen,
            buffer: tensor.buffer,
            alias_of: tensor.alias_of.clone(),
            group: tensor.group,
            policy: match tensor.policy {
                Policy::Elementwise => pb::Policy::Elementwise,
                Policy::Whole => pb::Policy::Whole,
            }
            .into(),
            no_clip: tensor.no_clip,
            replaced_by: tensor.replaced_by,
            layout: tensor.layout.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<pb::Tensor> for TensorSpec {
    type Error = Error;

    fn try_from(message: pb::Tensor) -> Result<Self> {
        let what = |field: &str| format!("{field} of tensor {:?}", message.name);
        let dtype = dtype(message.dtype)
            .ok_or_else(|| Error::invalid(what("dtype"), message.dtype, "f32, bf16 or f16"))?;
        let policy = match pb::Policy::try_from(message.policy) {
            Ok(pb::Policy::Unspecified | pb::Policy::Elementwise) => Policy::Elementwise,
            Ok(pb::Policy::Whole) => Policy::Whole,
            Err(_) => {
                return Err(Error::invalid(what("policy"), message.policy, "ELEMENTWISE or WHOLE"));
            }
        };
        Ok(Self {
            dtype,
            policy,
            name: message.name,
            shape: message.shape,
            frozen: message.frozen,
            buffer: message.buffer,
            alias_of: message.alias_of,
            group: message.group,
            no_clip: message.no_clip,
            replaced_by: message.replaced_by,
            layout: message.layout.map(TensorLayout::try_from).transpose()?,
        })
    }
}

impl From<DType> for pb::Dtype {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
        }
    }
}

/// The dtype of an enum number in a message; `None` if unspecified or unknown.
pub fn dtype(number: i32) -> Option<DType> {
    match pb::Dtype::try_from(number).ok()? {
        // Int8 is an encoding of the data plane, and no dtype of a tensor.
        pb::Dtype::Unspecified | pb::Dtype::Int8 => None,
        pb::Dtype::F32 => Some(DType::F32),
        pb::Dtype::Bf16 => Some(DType::Bf16),
        pb::Dtype::F16 => Some(DType::F16),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tensors_survive_the_wire(shape in prop::collection::vec(0u64..9, 0..4), frozen: bool, no_clip: bool, group in 0u32..9, replaced_by: Option<u32>) {
            let spec = TensorSpec { frozen, no_clip, group, replaced_by, dtype: DType::Bf16, ..TensorSpec::new("t", shape) };
            prop_assert_eq!(TensorSpec::try_from(pb::Tensor::from(&spec)).unwrap(), spec);
        }
    }
}
