//! The element types of parameters, gradients and the wire.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An element type. Every type converts to `F32` without loss; master weights and optimizer state
/// are always `F32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl DType {
    /// All element types, in the order in which messages list them.
    pub const ALL: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

    /// The size of an element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// The name that flags, manifests and messages use.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for an unknown dtype name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype {0:?}; it must be one of f32, bf16, f16")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        DType::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_serde_writes_the_same_names() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("{:?}", dtype.name()));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_and_the_error_lists_the_valid_names() {
        let error = "float16".parse::<DType>().unwrap_err();
        assert_eq!(error, UnknownDType("float16".into()));
        for dtype in DType::ALL {
            assert!(error.to_string().contains(dtype.name()));
        }
    }
}
