//! The limits of a cluster that do not depend on its servers. A request beyond one of them is
//! refused with an error that names the limit, before the work that it asks for begins.
//!
//! Operators choose the number of jobs and of connections, and the memory for each purpose, with
//! flags of the servers.

use std::{ops::RangeInclusive, time::Duration};

/// The maximum number of elements of a job, so that no product or sum of sizes overflows.
pub const MAX_ELEMENTS: u64 = 1 << 44;
/// The maximum number of tensors of a job.
pub const MAX_TENSORS: usize = 1 << 20;
/// The maximum number of slices of a job.
pub const MAX_SLICES: usize = 1 << 24;
/// The maximum number of dimensions of a tensor.
pub const MAX_TENSOR_DIMS: usize = 64;
/// The maximum length of the name of a tensor or of a dimension of a mesh, in bytes.
pub const MAX_NAME: usize = 1024;
/// The maximum length of the name of a job, in bytes. Every error about the job contains it.
pub const MAX_JOB_NAME: usize = 200;
/// The longest name that an operator gives a shard server, in bytes.
pub const MAX_SERVER_NAME: usize = 256;
/// The maximum size of the specification of a job as a message, in bytes: about 500,000 tensors.
/// The description of a job for the next coordinator contains it, together with the placement.
pub const MAX_SPEC_BYTES: usize = 32 << 20;
/// The maximum number of workers of a job.
pub const MAX_WORLD: u32 = 65_536;
/// The maximum number of meshes of a job.
pub const MAX_MESHES: usize = 1024;
/// The maximum number of dimensions of a mesh.
pub const MAX_MESH_DIMS: usize = 32;
/// The maximum number of ranks in all meshes of a job together.
pub const MAX_MESH_RANKS: usize = 1 << 22;
/// The maximum number of parameter groups of a job.
pub const MAX_GROUPS: usize = 1024;
/// The maximum number of hyperparameters of a parameter group.
pub const MAX_HYPERPARAMETERS: usize = 64;
/// The maximum number of running averages of a job.
pub const MAX_AVERAGES: usize = 4;
/// The maximum length of the name of a running average, in bytes.
pub const MAX_AVERAGE_NAME: usize = 64;
/// The maximum number of ranks that add their gradients. Each push lists them.
pub const MAX_GROUP_SIZE: u32 = 256;
/// The maximum number of servers that hold a slice.
pub const MAX_REPLICAS: u32 = 64;
/// The maximum number of contributions to a step of a job. Each rank's part of each slice counts as
/// one.
pub const MAX_CONTRIBUTIONS: u64 = 1 << 27;
/// The allowed idle timeouts. The minimum leaves enough time to join a job after its creation.
pub const IDLE_TIMEOUTS: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(86_400 * 365);

/// The default of the maximum number of jobs of a cluster.
pub const MAX_JOBS: usize = 1000;
/// The default of the maximum number of connections to a server.
pub const MAX_CONNECTIONS: usize = 4096;
/// The maximum number of open calls of a server, on all of its connections.
pub const MAX_CALLS: usize = 65_536;
/// The maximum size of all requests that a server is receiving at the same time, in bytes, except
/// pushes and control streams, of which no whole stream is in memory. A server with little memory
/// has a lower limit.
pub const MAX_REQUEST_BYTES: u64 = 256 << 20;

// Each tensor has at most one slice that is not full.
const _: () =
    assert!(MAX_ELEMENTS as usize / crate::geometry::blocks::SLICE + MAX_TENSORS <= MAX_SLICES);
