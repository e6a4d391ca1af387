//! `zsctl status`.

use comfy_table::Table;
use serde_json::json;
use zeroshard_client::{JobStatus, ServerStatus, Status};

use crate::table::{human, table};

/// Prints servers and jobs.
#[expect(clippy::print_stdout, reason = "the program's output")]
pub(crate) fn print(status: &Status, json: bool) {
    if json {
        status.servers.iter().for_each(|server| println!("{}", server_json(server)));
        status.jobs.iter().for_each(|job| println!("{}", job_json(job)));
    } else {
        println!("{}\n\n{}", servers(&status.servers), jobs(&status.jobs));
    }
}

fn servers(servers: &[ServerStatus]) -> Table {
    let mut table = table(&[
        "SERVER",
        "ADDRESS",
        "SLICES",
        "MASTER",
        "STATE",
        "GRADIENTS",
        "PUBLISHED",
        "PARKED",
        "FREE",
        "ZONE",
    ]);
    for status in servers {
        let bytes = [
            status.master_bytes,
            status.state_bytes,
            status.accumulator_bytes,
            status.published_bytes,
            status.parked_bytes,
        ];
        let server = &status.server;
        let head = [server.id.to_string(), server.address.clone(), status.slices.to_string()];
        let zone = if status.zone.is_empty() { "-".to_owned() } else { status.zone.clone() };
        let left = |capacity: u64| human(capacity.saturating_sub(status.assigned_bytes));
        let free = status.capacity_bytes.map_or("no limit".to_owned(), left);
        table.add_row(head.into_iter().chain(bytes.map(human)).chain([free, zone]));
    }
    table
}

fn jobs(jobs: &[JobStatus]) -> Table {
    let mut table =
        table(&["JOB", "VERSION", "EPOCH", "WORKERS", "PARAMETERS", "TENSORS", "SLICES", "STATE"]);
    for job in jobs {
        let state = match (&job.failure, job.version) {
            (Some(failure), _) => format!("failed: {failure}"),
            (_, None) => "waiting for initial parameters".to_owned(),
            _ => "ok".to_owned(),
        };
        table.add_row([
            job.name.clone(),
            job.version.map_or("-".to_owned(), |version| version.to_string()),
            job.epoch.to_string(),
            format!("{}/{}", job.joined.len(), job.world),
            job.parameters.to_string(),
            job.tensors.to_string(),
            job.slices.to_string(),
            state,
        ]);
    }
    table
}

fn server_json(status: &ServerStatus) -> serde_json::Value {
    json!({
        "event": "server", "id": status.server.id, "address": status.server.address,
        "zone": status.zone, "slices": status.slices,
        "master_bytes": status.master_bytes, "state_bytes": status.state_bytes,
        "accumulator_bytes": status.accumulator_bytes, "published_bytes": status.published_bytes,
        "parked_bytes": status.parked_bytes, "capacity_bytes": status.capacity_bytes,
        "assigned_bytes": status.assigned_bytes,
    })
}

fn job_json(job: &JobStatus) -> serde_json::Value {
    json!({
        "event": "job", "name": job.name, "version": job.version, "epoch": job.epoch, "world": job.world,
        "joined": job.joined, "parameters": job.parameters, "tensors": job.tensors, "slices": job.slices,
        "failure": job.failure,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_largest_unit_that_fits() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(5 << 40), "5.0 TiB");
        assert_eq!(human(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn a_failed_job_shows_its_reason() {
        let job = JobStatus {
            name: "a".into(),
            id: 1,
            epoch: 2,
            world: 1,
            joined: Vec::new(),
            version: None,
            parameters: 3,
            tensors: 1,
            slices: 1,
            resting: Vec::new(),
            failure: Some("server 2 is gone".into()),
        };
        assert!(jobs(std::slice::from_ref(&job)).to_string().contains("failed: server 2 is gone"));
        assert_eq!(job_json(&job)["failure"], "server 2 is gone");
    }
}
