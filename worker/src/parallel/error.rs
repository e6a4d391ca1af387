//! What can go wrong with distributed tensors and layers.

use std::fmt;

use thiserror::Error;

use crate::collectives;

/// Why something could not be distributed, or did not go on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// What was asked for cannot be: a mesh of the wrong rank, a placement along a dimension that
    /// is not there, ...
    #[error(transparent)]
    Invalid(#[from] zeroshard_proto::Error),
    /// An operation among the ranks.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
    /// A key of a plan that no layer matches.
    #[error("plan key {key:?} matches no layer; the layers are {layers:?}")]
    UnmatchedKey {
        /// The key.
        key: String,
        /// All layers.
        layers: Vec<String>,
    },
    /// A style for a layer of a type that it does not know.
    #[error("{style} cannot be applied to layer {layer:?}, which is {kind}; it is for {expected}")]
    Unsupported {
        /// The style.
        style: String,
        /// The layer's path; empty: the root.
        layer: String,
        /// The layer's type.
        kind: String,
        /// What the style is for.
        expected: &'static str,
    },
    /// A layer that is distributed already.
    #[error("layer {layer:?} is parallel already: a layer is made so once")]
    AlreadyParallel {
        /// The layer's path.
        layer: String,
    },
    /// A mode whose parts are missing.
    #[error("mode {mode:?} needs {missing}, which this model was made without")]
    MissingPart {
        /// The mode.
        mode: &'static str,
        /// What it needs.
        missing: &'static str,
    },
    /// A parameter that has no gradient on this rank.
    #[error(
        "parameter {parameter:?} has no gradient on rank {rank}: the forward pass did not use it. Say \
         `find_unused_parameters` if that is meant"
    )]
    UnusedParameter {
        /// The parameter's path.
        parameter: String,
        /// The rank.
        rank: u32,
    },
}

impl Error {
    pub(crate) fn invalid(
        what: impl Into<String>,
        found: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Invalid(zeroshard_proto::Error::invalid(what, found, expected))
    }
}

/// The result of something distributed.
pub type Result<T, E = Error> = std::result::Result<T, E>;
