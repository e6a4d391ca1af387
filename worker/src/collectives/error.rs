//! Errors of collectives.

use std::fmt;

use thiserror::Error;

/// The operation in which an error occurred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The rank that waited.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// The ranks of the group.
    pub group: Vec<u32>,
    /// The operation, with its sizes.
    pub operation: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, peer, group, operation } = self;
        write!(f, "rank {rank} and rank {peer} in {operation} among ranks {group:?}")
    }
}

/// An error of a collective.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// A message of a peer did not arrive before the deadline.
    #[error(
        "{at}: no message within {waited_ms} ms{}",
        instead.as_ref().map(|other| format!("; the peer has sent {other}")).unwrap_or_default()
    )]
    Timeout {
        /// The operation that waited.
        at: Place,
        /// The deadline in milliseconds.
        waited_ms: u64,
        /// Another operation for which the peer has sent a message.
        instead: Option<String>,
    },
    /// A peer is lost, or has failed.
    #[error("{at}: the peer is lost: {cause}")]
    Lost {
        /// The operation that waited.
        at: Place,
        /// The cause.
        cause: String,
    },
    /// Two ranks called different operations, or the same operation with different sizes or texts.
    #[error(
        "{at}: rank {} calls {}, rank {} calls {theirs}; all ranks must make the same calls",
        at.rank, at.operation, at.peer
    )]
    Disagreement {
        /// The operation of this rank.
        at: Place,
        /// The operation of the peer.
        theirs: String,
    },
    /// NCCL, or the GPU, has failed.
    #[error("rank {rank} in {operation}: NCCL: {cause}")]
    Nccl {
        /// This rank.
        rank: u32,
        /// The operation, with its sizes.
        operation: String,
        /// The cause.
        cause: String,
    },
    /// Invalid arguments, peers that cannot be reached, and an invalid token.
    #[error(transparent)]
    Cluster(#[from] zeroshard_model::Error),
}

impl Error {
    /// An invalid argument.
    pub(crate) fn invalid(
        what: impl Into<String>,
        found: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Cluster(zeroshard_model::Error::invalid(what, found, expected))
    }

    /// An invalid argument, with a sentence of its own.
    pub(crate) fn refused(sentence: impl fmt::Display) -> Self {
        Self::Cluster(zeroshard_model::Error::refused(sentence))
    }
}

/// The result of a collective.
pub type Result<T, E = Error> = std::result::Result<T, E>;
