//! `zsctl doctor`: checks the connections from this machine to a cluster.

use std::{
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use zeroshard_client::{Cluster, Measured, Options, Result};
use zeroshard_model::{
    Server,
    version::{self, VERSION},
};

use crate::{
    PROBLEM,
    path::{Path, probe},
    table::{human, table},
};

/// The clock difference above which a problem is reported.
const CLOCK_LIMIT: Duration = Duration::from_secs(2);

/// Flags of `zsctl doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of bytes to receive from each shard server, at most 256 MiB
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    bytes: u64,
}

/// The results of the checks of one process.
#[derive(Debug, Default)]
struct Finding {
    role: &'static str,
    address: String,
    path: Option<Path>,
    version: Option<String>,
    /// The time by which its clock is ahead of the local clock, in milliseconds.
    ahead_ms: Option<i64>,
    measured: Option<Measured>,
    problems: Vec<String>,
}

/// Checks the connections, and prints the results.
///
/// # Errors
/// [`zeroshard_client::Error::Invalid`] for an invalid address or token.
pub(crate) async fn run(
    arguments: &Arguments,
    address: &str,
    options: Options,
    json: bool,
) -> Result<ExitCode> {
    let limit = options.timeout;
    let mut findings = Vec::new();
    for address in address.split(',') {
        let mut finding = Finding::new("coordinator", address.trim());
        finding.dial(limit).await;
        findings.push(finding);
    }
    match Cluster::connect(address, options).await {
        Ok(cluster) => {
            let status = cluster.status().await?;
            // With several coordinators, the status comes from the leader. Its address is not
            // known, so the status is shown for the first reachable coordinator.
            let leader = findings.iter_mut().find(|finding| finding.path.is_some());
            if let Some(leader) = leader {
                leader.compare(status.version, status.unix_ms, Duration::ZERO);
            }
            for server in status.servers {
                findings.push(examine(&cluster, &server.server, arguments.bytes, limit).await);
            }
        }
        Err(error) => findings[0].problems.push(error.to_string()),
    }
    let problems: Vec<String> = findings.iter().flat_map(Finding::lines).collect();
    if json {
        findings.iter().for_each(|finding| say!("{}", finding.json()));
    } else {
        say!("{}", rows(&findings));
        match problems.is_empty() {
            true => say!("\nno problems found; zsctl has version {VERSION}"),
            false => say!("\n{}", problems.join("\n")),
        }
    }
    match problems.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::from(PROBLEM)),
    }
}

/// Measures a shard server.
async fn examine(cluster: &Cluster, server: &Server, bytes: u64, limit: Duration) -> Finding {
    let mut finding = Finding::new("shard", &server.address);
    finding.dial(limit).await;
    if finding.path.is_none() {
        return finding;
    }
    if let Err(error) = finding.measure(cluster, server, bytes).await {
        finding.problems.push(error.to_string());
    }
    finding
}

impl Finding {
    fn new(role: &'static str, address: &str) -> Self {
        Self { role, address: address.to_owned(), ..Self::default() }
    }

    async fn dial(&mut self, limit: Duration) {
        match probe(&self.address, limit).await {
            Ok(path) => self.path = Some(path),
            Err(error) => self.problems.push(format!("it cannot be reached from here: {error}")),
        }
    }

    async fn measure(&mut self, cluster: &Cluster, server: &Server, bytes: u64) -> Result<()> {
        // The first call opens the connection, and the second one measures the latency.
        cluster.measure(server, 0).await?;
        let Measured { version, unix_ms, latency, .. } = cluster.measure(server, 0).await?;
        self.compare(version, unix_ms, latency);
        let measured = cluster.measure(server, bytes).await?;
        self.measured = Some(Measured { latency, ..measured });
        Ok(())
    }

    /// Compares the version and the clock with those of this program. The server read its clock
    /// about half of `latency` ago.
    fn compare(&mut self, version: String, unix_ms: u64, latency: Duration) {
        if let Err(error) = version::check("zsctl", VERSION, &version) {
            self.problems.push(error.to_string());
        }
        let here = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let here = here.saturating_sub(latency / 2).as_millis();
        let ahead = i64::try_from(unix_ms)
            .unwrap_or(i64::MAX)
            .saturating_sub(i64::try_from(here).unwrap_or(i64::MAX));
        if unix_ms != 0 && u128::from(ahead.unsigned_abs()) > CLOCK_LIMIT.as_millis() {
            let expected = "synchronise the clocks, for example with chrony";
            self.problems
                .push(format!("its clock differs from the local clock by {ahead} ms; {expected}"));
        }
        self.version = Some(version);
        self.ahead_ms = (unix_ms != 0).then_some(ahead);
    }

    /// The throughput of one stream in bytes per second.
    fn throughput(&self) -> Option<f64> {
        let measured = self.measured.as_ref().filter(|measured| measured.bytes > 0)?;
        Some(measured.bytes as f64 / measured.took.as_secs_f64().max(f64::MIN_POSITIVE))
    }

    fn lines(&self) -> impl Iterator<Item = String> {
        self.problems.iter().map(|problem| format!("{} {}: {problem}", self.role, self.address))
    }

    fn json(&self) -> Value {
        json!({
            "event": "checked", "role": self.role, "address": self.address,
            "reachable": self.path.is_some(), "version": self.version, "clock_ahead_ms": self.ahead_ms,
            "connect_seconds": self.path.map(|path| path.connect.as_secs_f64()),
            "mtu": self.path.and_then(|path| path.mtu),
            "latency_seconds": self.measured.as_ref().map(|of| of.latency.as_secs_f64()),
            "bytes_per_second": self.throughput(), "problems": self.problems,
        })
    }
}

fn rows(findings: &[Finding]) -> comfy_table::Table {
    let mut table = table(&[
        "ROLE",
        "ADDRESS",
        "REACHABLE",
        "VERSION",
        "CLOCK",
        "LATENCY",
        "MTU (ABOUT)",
        "ONE STREAM",
    ]);
    let none = || "-".to_owned();
    let ms = |duration: Duration| format!("{:.2} ms", duration.as_secs_f64() * 1e3);
    for finding in findings {
        let latency = finding.measured.as_ref().map(|of| of.latency);
        table.add_row([
            finding.role.to_owned(),
            finding.address.clone(),
            if finding.path.is_some() { "yes" } else { "no" }.to_owned(),
            finding.version.clone().unwrap_or_else(none),
            finding.ahead_ms.map_or_else(none, |ahead| format!("{ahead:+} ms")),
            latency.or(finding.path.map(|path| path.connect)).map_or_else(none, ms),
            finding.path.and_then(|path| path.mtu).map_or_else(none, |mtu| mtu.to_string()),
            finding.throughput().map_or_else(none, |rate| format!("{}/s", human(rate as u64))),
        ]);
    }
    table
}
