//! Errors of distributed tensors and layers.

use std::fmt;

use thiserror::Error;

use crate::collectives;

/// An error of a distributed tensor, layer or model.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// Invalid arguments, such as a mesh with the wrong number of dimensions or a placement along
    /// an unknown dimension, and errors of the cluster.
    #[error(transparent)]
    Invalid(#[from] zeroshard_model::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
    /// No layer matches a key of a plan.
    #[error("plan key {key:?} matches no layer; the layers are {layers:?}")]
    UnmatchedKey {
        /// The key.
        key: String,
        /// All layers.
        layers: Vec<String>,
    },
    /// A style does not support the type of a layer.
    #[error("{style} does not support layer {layer:?}, which is {kind}; it supports {expected}")]
    Unsupported {
        /// The style.
        style: String,
        /// The layer's path; empty for the root.
        layer: String,
        /// The layer's type.
        kind: String,
        /// The types that the style supports.
        expected: &'static str,
    },
    /// A layer is already distributed.
    #[error("layer {layer:?} is already parallel: apply one style or `shard` call to each layer")]
    AlreadyParallel {
        /// The layer's path.
        layer: String,
    },
    /// A mode needs a loss or an optimizer that the model does not have.
    #[error("mode {mode:?} needs {missing}: pass it to `to_static`")]
    MissingPart {
        /// The mode.
        mode: &'static str,
        /// The missing part.
        missing: &'static str,
    },
    /// A parameter has no gradient on a rank.
    #[error(
        "parameter {parameter:?} has no gradient on rank {rank}: the forward pass did not use it; \
         set `find_unused_parameters` if that is intended"
    )]
    UnusedParameter {
        /// The parameter's path.
        parameter: String,
        /// The rank.
        rank: u32,
    },
}

impl Error {
    pub(crate) fn internal(cause: impl Into<String>) -> Self {
        Self::Invalid(zeroshard_model::Error::Internal { cause: cause.into() })
    }

    pub(crate) fn invalid(
        what: impl Into<String>,
        found: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Invalid(zeroshard_model::Error::invalid(what, found, expected))
    }

    pub(crate) fn refused(sentence: impl fmt::Display) -> Self {
        Self::Invalid(zeroshard_model::Error::refused(sentence))
    }
}

/// The result of an operation on distributed tensors, layers or models.
pub type Result<T, E = Error> = std::result::Result<T, E>;
