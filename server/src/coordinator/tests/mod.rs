//! The coordinator over the wire.

mod service;
mod wire;

use std::time::Duration;

use bytes::Bytes;
use zeroshard_coordinator::{
    calls::{Create, Join, Reply},
    cluster::Cluster,
    commands::{About, Command, OpenJob, ServerEvent},
    decision::{Decision, Figures, Report, Update},
    events::{Action, Event},
    gradient::{Absent, Norm, Overflow},
    ids::{Caller, JobRef, Lease, Link, Now},
    memberships::{Change, Peer},
    placement::Zones,
    plan::Plan,
    succession::Source,
};
use zeroshard_model::{Attempt, Error, JobSpec, Manifest, Result, Server, Succession, TensorSpec};

/// The id of the job.
const JOB: u64 = 0x7007;
const WAIT: Duration = Duration::from_secs(60);

/// Two trained tensors of one slice each, and a frozen tensor between them.
fn spec(world: u32) -> JobSpec {
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    let manifest =
        Manifest::new(vec![TensorSpec::new("a", [3]), frozen, TensorSpec::new("b", [4])]).unwrap();
    JobSpec { world, ..JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()]) }
}

fn creation(spec: JobSpec) -> Box<Create> {
    Box::new(Create { spec, succession: None, restore: None, quota: None })
}

/// The job, as its members and servers name it.
fn job() -> JobRef {
    JobRef { name: "job".into(), id: JOB }
}
