//! The client SDK: the only code that dials a cluster's servers on behalf of a training program.
//!
//! ```no_run
//! # async fn example() -> zeroshard_model::Result<()> {
//! use zeroshard_client::{Cluster, Commit, Options, Target, TensorData};
//! use zeroshard_model::{JobSpec, Manifest, TensorSpec};
//!
//! let cluster = Cluster::connect("127.0.0.1:7400", Options::default()).await?;
//! let manifest = Manifest::new(vec![TensorSpec::new("weight", [1024, 1024])])?;
//! cluster.create_job(&JobSpec::new("mine", manifest, vec!["adamw".parse().unwrap()])).await?;
//! let job = cluster.join("mine", 0).await?;
//! let tensor = job.tensor("weight")?;
//! job.initialise(vec![TensorData::new(tensor, vec![0.1; 1024 * 1024])]).await?;
//! let mut weight = vec![0.0; 1024 * 1024];
//! for step in 0..10 {
//!     job.pull(step, vec![Target::new(tensor, &mut weight)]).await?;
//!     let gradient = weight.iter().map(|w| 2.0 * w).collect::<Vec<f32>>();
//!     let attempt = job.attempt(step)?;
//!     attempt.push(vec![TensorData::new(tensor, gradient)]).await?;
//!     let report = attempt.commit(Commit::default()).await?;
//!     assert_eq!(report.version, step + 1);
//! }
//! # Ok(()) }
//! ```
//!
//! On a runtime with several threads, transfers are fastest in a task (`tokio::spawn`), which can
//! share a thread with its connection. The future of `block_on` or `#[tokio::main]` runs on another
//! thread, which each message has to wake.

mod array;
mod buckets;
mod call;
mod capture;
mod cluster;
mod connect;
mod contributions;
mod credentials;
mod exchange;
mod follow;
mod hash;
mod job;
mod local;
mod measure;
mod operate;
mod pin;
mod pull;
mod push;
mod retry;
mod schedule;
mod shards;
mod state;
mod state_selector;
mod status;
mod step;
mod values;
mod window;
mod windows;

use std::time::Duration;

pub use array::Array;
pub use buckets::Buckets;
pub use capture::{Capture, CapturedStep};
pub use cluster::{Cluster, CreateJob, Description};
pub use contributions::{Contribution, StepContributions};
pub use credentials::CredentialFlags;
pub use exchange::{Exchange, Piece, Sums};
pub use follow::{Copied, Follow, FollowedValues, FollowedVersion, Follower};
pub use hash::hashes;
pub use job::{Attempt, Job};
pub use measure::Measured;
pub use operate::{Drained, Stays};
pub use pin::{Pin, Pinned};
pub use pull::Target;
pub use push::TensorData;
pub use schedule::Schedule;
pub use shards::Traffic;
pub use state::combined_hash;
pub use state_selector::StateSelector;
pub use status::{
    Advice, JobOnServer, JobState, JobStatus, JobWait, MissingServer, ServerStatus, SlowRank,
    Status, Trouble,
};
pub use step::{Absent, Commit, Overflow, Reduced, Rested, StepReport};
pub use values::{Slots, Values};
pub use windows::Transport;
pub use zeroshard_model::{Error, Result, TensorId};
pub use zeroshard_net::trace;
pub use zeroshard_proto::Wire;
pub use zeroshard_shm::{Pane, SHARED_FROM};

use zeroshard_model::DType;
use zeroshard_net::{Token, transport::tls::Tls};

/// The options of a connection to a cluster.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The encoding of gradients on the wire. Initial values, optimizer state and new values of
    /// tensors are f32 always. In a job with groups the ranks of a group exchange gradients as
    /// [`Wire::decoded`], and push sums as f32, or as int8.
    pub wire: Wire,
    /// The encoding of parameters on the wire, for ranks and readers. `None`: that of gradients, or
    /// f32 if gradients are int8. Buffers are f32 always, and what is not trained is never int8.
    pub parameter_wire: Option<Wire>,
    /// The payload of one message, in bytes. It does not change any result.
    pub chunk_bytes: usize,
    /// How parameters and gradients reach servers. It does not change any result. `None`: as the
    /// environment variable `ZEROSHARD_TRANSPORT` says (`auto`, `grpc` or `shm`), or `auto`.
    pub transport: Option<Transport>,
    /// The time limit of one operation, including all its retries and waits. It may be longer than
    /// the servers' own limit for a wait, because the client then sends the call again.
    pub timeout: Duration,
    /// The time limit for the first answer of the coordinator.
    pub connect_timeout: Duration,
    /// The token of the cluster, which every call carries. `Debug` does not show it.
    pub token: Token,
    /// The TLS configuration of all connections; `None` without encryption.
    pub tls: Option<Tls>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            wire: DType::F32.into(),
            parameter_wire: None,
            chunk_bytes: 1 << 20,
            transport: None,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(10),
            token: Token::default(),
            tls: None,
        }
    }
}

impl Options {
    /// Sets [`Self::wire`], which is f32 by default.
    #[must_use]
    pub fn wire(self, wire: impl Into<Wire>) -> Self {
        Self { wire: wire.into(), ..self }
    }

    /// Sets [`Self::parameter_wire`]. By default parameters are encoded as gradients are, unless
    /// these are int8.
    #[must_use]
    pub fn parameter_wire(self, parameter_wire: Option<Wire>) -> Self {
        Self { parameter_wire, ..self }
    }

    /// The encoding of parameters: see [`Self::parameter_wire`].
    pub fn wire_of_parameters(&self) -> Wire {
        self.parameter_wire.unwrap_or(match self.wire {
            Wire::Int8 => DType::F32.into(),
            plain @ Wire::Plain(_) => plain,
        })
    }

    /// Sets [`Self::chunk_bytes`], which is 1 MiB by default.
    #[must_use]
    pub fn chunk_bytes(self, chunk_bytes: usize) -> Self {
        Self { chunk_bytes, ..self }
    }

    /// Sets [`Self::transport`], which the environment decides by default.
    #[must_use]
    pub fn transport(self, transport: Option<Transport>) -> Self {
        Self { transport, ..self }
    }

    /// Sets [`Self::timeout`], which is 60 s by default.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets [`Self::connect_timeout`], which is 10 s by default.
    #[must_use]
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self }
    }

    /// Sets [`Self::token`]. By default calls carry no token.
    #[must_use]
    pub fn token(self, token: Token) -> Self {
        Self { token, ..self }
    }

    /// Sets [`Self::tls`]. By default connections are not encrypted.
    #[must_use]
    pub fn tls(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }
}
