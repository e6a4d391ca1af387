//! What can go wrong among workers.

use std::fmt;

use thiserror::Error;

/// Where an operation stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Who waited.
    pub rank: u32,
    /// For whom.
    pub peer: u32,
    /// Who took part.
    pub group: Vec<u32>,
    /// In what, with its sizes.
    pub operation: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, peer, group, operation } = self;
        write!(f, "rank {rank} and rank {peer} in {operation} among ranks {group:?}")
    }
}

/// Why an operation did not end well.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// A peer did not do its part in time.
    #[error("{at}: nothing came within {waited_ms} ms{}", instead.as_ref().map(|other| format!("; it sent {other}")).unwrap_or_default())]
    Timeout {
        /// Where.
        at: Place,
        /// How long.
        waited_ms: u64,
        /// What the peer had sent that nobody has asked for.
        instead: Option<String>,
    },
    /// A peer is gone, or gave up.
    #[error("{at}: the peer cannot do its part: {cause}")]
    Lost {
        /// Where.
        at: Place,
        /// What was heard of it.
        cause: String,
    },
    /// Two ranks called different operations, or the same with different sizes or texts.
    #[error("{at}: they disagree: rank {} says {}, rank {} says {theirs}; every rank must say the same", at.rank, at.operation, at.peer)]
    Disagreement {
        /// Where; its operation is this rank's.
        at: Place,
        /// The peer's.
        theirs: String,
    },
    /// What was asked for cannot be; addresses that nobody answers at; a token that no call can
    /// carry.
    #[error(transparent)]
    Cluster(#[from] zeroshard_proto::Error),
}

impl Error {
    /// An argument that is wrong.
    pub(crate) fn invalid(
        what: impl Into<String>,
        found: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Cluster(zeroshard_proto::Error::invalid(what, found, expected))
    }
}

/// The result of an operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
