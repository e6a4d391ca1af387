//! The dtype in which servers keep the optimizer state of a job.

use std::{fmt, str::FromStr};

use super::Optimizer;
use crate::{DType, geometry::blocks::TILE};

/// The dtype of the optimizer state on the servers. On the wire and in checkpoints, state is
/// always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum StateDType {
    /// 4 bytes for each element.
    #[default]
    F32,
    /// 1 byte for each element, which is a [`Code`], and 1 byte for each [`TILE`] elements, which
    /// is their common exponent. A step rounds the new state stochastically, by a generator that
    /// depends only on the number of applied steps, the tensor and the element.
    Int8,
}

/// The meaning of the byte of an element of 8-bit state. Both are small floats without inf and NaN,
/// relative to the exponent of their tile, and have an offset, so that code 0 is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// A sign, 3 bits of exponent and 4 bits of mantissa, for averages of gradients.
    Signed,
    /// 5 bits of exponent and 3 bits of mantissa, for averages of squares: the resolution of their
    /// roots, by which steps divide, is that of 4 bits. A positive value does not become 0.
    Positive,
}

impl StateDType {
    /// All dtypes of optimizer state.
    pub const ALL: [StateDType; 2] = [StateDType::F32, StateDType::Int8];

    /// The name that flags, Python and messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Int8 => "int8",
        }
    }

    /// The size of a state tensor of `numel` elements in bytes.
    pub const fn bytes(self, numel: usize) -> usize {
        match self {
            Self::F32 => numel * DType::F32.size(),
            Self::Int8 => numel + numel.div_ceil(TILE),
        }
    }
}

impl fmt::Display for StateDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for an unknown dtype of optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown state_dtype {0:?}; it must be one of f32, int8")]
pub struct UnknownStateDType(pub String);

impl FromStr for StateDType {
    type Err = UnknownStateDType;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| UnknownStateDType(name.to_owned()))
    }
}

impl Optimizer {
    /// The codes of the state tensors with [`StateDType::Int8`], in the order of
    /// [`Optimizer::state`]: none for SGD without momentum, which has no state. `None` if the
    /// optimizer cannot have 8-bit state.
    pub const fn state_codes(&self) -> Option<&'static [Code]> {
        match self {
            Self::Sgd(sgd) if sgd.momentum == 0.0 => Some(&[]),
            Self::Sgd(_) | Self::Lion(_) => Some(&[Code::Signed]),
            Self::Adam(adam) if !adam.amsgrad => Some(&[Code::Signed, Code::Positive]),
            Self::AdamW(adamw) if !adamw.amsgrad => Some(&[Code::Signed, Code::Positive]),
            Self::Average(_) => Some(&[]),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{Adam, Sgd};

    #[test]
    fn names_parse_back_and_the_error_lists_them() {
        for dtype in StateDType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        let error = "bf16".parse::<StateDType>().unwrap_err().to_string();
        assert!(StateDType::ALL.iter().all(|dtype| error.contains(dtype.name())), "{error}");
    }

    #[test]
    fn a_tile_has_one_byte_more_than_elements() {
        assert_eq!(StateDType::Int8.bytes(0), 0);
        assert_eq!(StateDType::Int8.bytes(1), 2);
        assert_eq!(StateDType::Int8.bytes(TILE), TILE + 1);
        assert_eq!(StateDType::Int8.bytes(TILE + 1), TILE + 3);
        assert_eq!(StateDType::F32.bytes(3), 12);
    }

    #[test]
    fn optimizers_with_codes_have_one_for_each_state_tensor() {
        let momentum = Optimizer::Sgd(Sgd { momentum: 0.9, ..Sgd::default() });
        let all = Optimizer::defaults().into_iter().chain([momentum]);
        let coded: Vec<Optimizer> = all.filter(|of| of.state_codes().is_some()).collect();
        for optimizer in &coded {
            assert_eq!(optimizer.state_codes().unwrap().len(), optimizer.state().len());
        }
        let names: Vec<&str> = coded.iter().map(Optimizer::name).collect();
        assert_eq!(names, ["sgd", "adam", "adamw", "lion", "average", "sgd"]);
        let amsgrad = Optimizer::Adam(Adam { amsgrad: true, ..Adam::default() });
        assert_eq!(amsgrad.state_codes(), None);
    }
}
