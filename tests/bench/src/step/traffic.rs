//! Counts the bytes that a step transfers, without running it: the tensors, the placement and the
//! shares are those of a real job, so that clusters of any size can be compared with the formulas.
//! Payload only; messages and headers are not counted.

use serde_json::{Value, json};
use zeroshard_coordinator::placement::{Zones, place};
use zeroshard_model::{JobSpec, Placement, Server};

use super::{Error, Level};
use crate::table::Table;

/// Bytes of a gradient or a parameter: f32 in all systems, so that they can be compared.
const BYTES: u64 = 4;

/// Payload bytes of one step between ranks and servers.
struct Traffic {
    /// The gradients that each server receives. For each pull it sends as many bytes, because ranks
    /// pull the shares that they push.
    servers: Vec<u64>,
    /// The gradients that each rank sends to the servers.
    ranks: Vec<u64>,
}

/// Prints the traffic of `spec` without groups and with its groups, then that of other systems.
pub(super) fn run(spec: &JobSpec, servers: u32, level: Level, json: bool) -> Result<(), Error> {
    let fields = ["system", "group", "of", "bytes", "min", "median", "max", "formula"];
    let mut table = Table::new(json, &fields);
    for group_size in [1, spec.group_size] {
        let spec = JobSpec { group_size, ..spec.clone() };
        spec.validate()?;
        for row in rows(&spec, servers, level)? {
            table.row(row);
        }
    }
    for row in others(spec.manifest.parameters(), u64::from(spec.world)) {
        table.row(row);
    }
    table.finish();
    Ok(())
}

/// Places the slices as the coordinator does with new servers.
fn placement(spec: &JobSpec, servers: u32) -> Result<Placement, Error> {
    let server = |id| Server { id, incarnation: 1, address: String::new() };
    let live: Vec<_> = (0..u64::from(servers)).map(server).collect();
    let weights: Vec<_> = spec.required_by_slice().iter().map(|slice| slice.bytes).collect();
    Ok(place(None, &live, &Zones::new(), &weights, 1)?)
}

fn count(spec: &JobSpec, servers: u32) -> Result<Traffic, Error> {
    let placement = placement(spec, servers)?;
    let mut traffic =
        Traffic { servers: vec![0; servers as usize], ranks: vec![0; spec.world as usize] };
    for tensor in 0..spec.manifest.tensors().len() {
        let contributions = spec.contributions(tensor);
        for index in spec.manifest.slices_of(tensor) {
            let slice = &spec.manifest.slices()[index];
            for pushed in contributions.pushes(index as u32, slice).iter() {
                let bytes = pushed.elements.numel() as u64 * BYTES;
                traffic.servers[placement.primary(index)] += bytes * pushed.ranks.len() as u64;
                pushed.ranks.iter().for_each(|&rank| traffic.ranks[rank as usize] += bytes);
            }
        }
    }
    Ok(traffic)
}

fn rows(spec: &JobSpec, servers: u32, level: Level) -> Result<Vec<Value>, Error> {
    let Traffic { servers: at_servers, ranks } = count(spec, servers)?;
    let (group, world) = (u64::from(spec.group_size), u64::from(spec.world));
    let bytes = spec.manifest.parameters() * BYTES;
    let pulls = if level == Level::PGOs { 2 } else { 1 };
    // Each rank sends the others their shares of its gradients, and its own share of the parameters
    // after each pull. It receives as much.
    let in_group = |own: &u64| bytes - own + pulls * (group - 1) * own;
    let expected_in_group = bytes * (group - 1) / group * (1 + pulls);
    let (per_server, per_rank) = (bytes * world / (u64::from(servers) * group), bytes / group);
    let exchanged = ranks.iter().map(in_group).collect();
    let sent: Vec<u64> = at_servers.iter().map(|bytes| pulls * bytes).collect();
    let pulled: Vec<u64> = ranks.iter().map(|bytes| pulls * bytes).collect();
    let row = |of: &str, what: &str, counted: Vec<u64>, formula: u64| {
        let (min, median, max) = spread(counted);
        json!({
            "bench": "step-traffic", "system": format!("ZeroShard {level}"), "group": group,
            "of": of, "bytes": what, "min": min, "median": median, "max": max, "formula": formula,
        })
    };
    Ok(vec![
        row("server", "received from ranks", at_servers, per_server),
        row("server", "sent to ranks", sent, pulls * per_server),
        row("rank", "sent to servers", ranks, per_rank),
        row("rank", "received from servers", pulled, pulls * per_rank),
        row("rank", "sent in the group", exchanged, expected_in_group),
    ])
}

fn spread(mut counted: Vec<u64>) -> (u64, u64, u64) {
    counted.sort_unstable();
    (counted[0], counted[counted.len() / 2], counted[counted.len() - 1])
}

/// The bytes that a rank sends to other ranks, and receives, in systems without servers.
///
/// ZeRO (arXiv:1910.02054, section 7): a reduce-scatter of the gradients and an all-gather of the
/// parameters, and in stage 3 another all-gather for the backward pass. FSDP (arXiv:2304.11277,
/// section 3) makes the same three with full sharding. In each of them a rank of a ring of N sends
/// (N-1)/N of the elements.
fn others(parameters: u64, world: u64) -> Vec<Value> {
    let systems = [("DeepSpeed ZeRO 2", 2), ("DeepSpeed ZeRO 3", 3), ("FSDP", 3)];
    let row = |(system, collectives): (&str, u64)| {
        json!({
            "bench": "step-traffic", "system": system, "of": "rank", "bytes": "sent to ranks",
            "formula": collectives * parameters * BYTES * (world - 1) / world,
        })
    };
    systems.map(row).into()
}
