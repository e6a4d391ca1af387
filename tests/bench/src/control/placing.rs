//! Measures the placement of a large job's slices.

use std::{hint::black_box, time::Instant};

use serde_json::json;
use zeroshard_coordinator::{
    cluster::Cluster,
    placement::{Zones, free_memory::FreeMemory, plan::Plan},
    vocabulary::{
        calls::Create,
        commands::About,
        events::{Action, Event, Placing},
        ids::{Caller, Now},
    },
};
use zeroshard_model::{JobSpec, Server, memory::Capacity};

use super::{
    Options,
    driver::{joined, server},
    jobs::large,
};
use crate::{Error, sample::median, table::Table};

/// The number of zones of the servers, of which each slice gets two.
const ZONES: u64 = 8;
/// The longest time that a placement should take, in seconds.
const GOAL: f64 = 1.0;

/// A placement that is measured.
struct Case {
    name: &'static str,
    replicas: u32,
    zones: Zones,
    free_memory: FreeMemory,
}

/// Prints the time of each kind of placement.
pub(super) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let fields = [
        "placement",
        "slices",
        "servers",
        "replicas",
        "seconds",
        "largest_seconds",
        "goal_seconds",
    ];
    let live: Vec<Server> = (1..=u64::from(options.servers)).map(server).collect();
    let mut table = Table::new(json, &fields);
    for case in cases(options, &live)? {
        let mut seconds = Vec::new();
        for _ in 0..options.repeat {
            // A new specification: the slices are cut when they are first used.
            let spec = spec(options, case.replicas)?;
            let start = Instant::now();
            let plan = Plan::within(&spec, &live, &case.zones, &case.free_memory)?;
            seconds.push(start.elapsed().as_secs_f64());
            black_box(plan);
        }
        table.row(json!({
            "bench": "control-placement", "placement": case.name, "slices": options.slices,
            "servers": options.servers, "replicas": case.replicas,
            "seconds": median(seconds.clone()),
            "largest_seconds": seconds.into_iter().fold(0.0, f64::max), "goal_seconds": GOAL,
        }));
    }
    table.finish();
    Ok(())
}

fn spec(options: &Options, replicas: u32) -> Result<JobSpec, Error> {
    Ok(JobSpec { replicas, min_servers: replicas, ..large(options)? })
}

fn cases(options: &Options, live: &[Server]) -> Result<Vec<Case>, Error> {
    let none = (Zones::new(), FreeMemory::default());
    let zone = |server: &Server| (server.id, format!("zone-{}", server.id % ZONES));
    let zones: Zones = live.iter().map(zone).collect();
    let free_memory = free_memory(spec(options, 1)?, live)?;
    let case = |name, replicas, (zones, free_memory)| Case { name, replicas, zones, free_memory };
    Ok(vec![
        case("balanced", 1, none.clone()),
        case("replicas-in-zones", 2, (zones, none.1)),
        case("within-memory", 1, (none.0, free_memory)),
    ])
}

/// The memory of servers on which `spec` cannot be balanced: the first one has half of a fair
/// share, and the others have two.
fn free_memory(spec: JobSpec, live: &[Server]) -> Result<FreeMemory, Error> {
    let share = spec.required_with_replicas().bytes / live.len() as u64;
    let mut cluster = Cluster::default();
    for server in live {
        let bytes = if server.id == 1 { share / 2 } else { share * 2 };
        let capacity = Some(Capacity { bytes, memory: bytes });
        let about = About { capacity, ..About::default() };
        cluster.handle(joined(server.id, server.clone(), about), Now::ZERO);
    }
    let create = Box::new(Create { spec, fork: None, restore: None, quota: None });
    let event = Event::Create { caller: Caller(1), job_id: 1, create, wait: Now::MAX };
    let placing = cluster.handle(event, Now::ZERO).into_iter().find_map(|action| match action {
        Action::Place(Placing { free_memory, .. }) => Some(free_memory),
        _ => None,
    });
    placing.ok_or_else(|| "the job was not placed".into())
}
