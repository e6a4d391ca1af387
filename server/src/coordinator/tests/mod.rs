//! The coordinator over the wire.

mod service;
mod wire;

use std::time::Duration;

use bytes::Bytes;
use zeroshard_coordinator::{
    cluster::Cluster,
    placement::{Zones, fork::Source, plan::Plan},
    state::memberships::{Change, Peer},
    vocabulary::{
        calls::{Create, Join, Reply},
        commands::{About, Command, OpenJob, ServerEvent},
        decision::{Decision, Figures, Report, Update},
        events::{Action, Event},
        gradient::{Absent, Largest, Norm, Overflow},
        ids::{Caller, JobRef, Lease, Link, Now},
    },
};
use zeroshard_model::{
    Attempt, Error, Fork, JobSpec, Manifest, RecentSteps, Result, Server, TensorSpec,
};

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
    Box::new(Create { spec, fork: None, restore: None, quota: None })
}

/// The job, as its members and servers name it.
fn job() -> JobRef {
    JobRef { name: "job".into(), id: JOB }
}
