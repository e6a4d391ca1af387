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

mod buckets;
mod call;
mod cluster;
mod connect;
mod credentials;
mod exchange;
mod job;
mod local;
mod measure;
mod norms;
mod operate;
mod part;
mod pin;
mod pull;
mod push;
mod retry;
mod schedule;
mod shards;
mod state;
mod status;
mod step;
mod values;

use std::time::Duration;

pub use buckets::Buckets;
pub use cluster::{Cluster, CreateJob, Description};
pub use credentials::CredentialFlags;
pub use exchange::{Exchange, Piece, Sums};
pub use job::{Attempt, Job};
pub use measure::Measured;
pub use norms::Norms;
pub use operate::{Drained, Stays};
pub use part::StatePart;
pub use pin::{Pin, Pinned};
pub use pull::Target;
pub use push::TensorData;
pub use schedule::Schedule;
pub use shards::Traffic;
pub use status::{
    Advice, JobOnServer, JobState, JobStatus, JobWait, MissingServer, ServerStatus, SlowRank,
    Status, Trouble,
};
pub use step::{Absent, Commit, Overflow, Reduced, Rested, StepReport};
pub use values::{Slots, Values};
pub use zeroshard_model::{Error, Result, TensorId};
pub use zeroshard_net::trace;

use zeroshard_model::DType;
use zeroshard_net::{Token, transport::tls::Tls};

/// The options of a connection to a cluster.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The element type of parameters and gradients on the wire.
    pub wire: DType,
    /// The payload of one message, in bytes. It does not change any result.
    pub chunk_bytes: usize,
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
            wire: DType::F32,
            chunk_bytes: 1 << 20,
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
    pub fn wire(self, wire: DType) -> Self {
        Self { wire, ..self }
    }

    /// Sets [`Self::chunk_bytes`], which is 1 MiB by default.
    #[must_use]
    pub fn chunk_bytes(self, chunk_bytes: usize) -> Self {
        Self { chunk_bytes, ..self }
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
