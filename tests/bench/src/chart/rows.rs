//! Reads the rows that `zs-bench --json` printed.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::text;
use crate::machine::Machine;

/// Benchmarks that have rows without a panel.
const NOT_SHOWN: [&str; 10] = [
    "checkpoint",
    "control",
    "control-placement",
    "control-step",
    "neighbours",
    "recovery",
    "step-traffic",
    "tiers",
    "transfers",
    "wire",
];

/// A file that cannot be read, or is not a list of results of one machine.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "cannot read {}: {source}; give files with the output of zs-bench --json",
        file.display()
    )]
    Read { file: PathBuf, source: io::Error },
    #[error(
        "{at} is not a JSON row of zs-bench; give only what zs-bench --json prints on standard \
         output"
    )]
    NotRow { at: At },
    #[error("{at}: invalid row of {bench}: {reason}; measure again with this version of zs-bench")]
    Row { at: At, bench: String, reason: String },
    #[error(
        "{at} was measured on another machine or with another version ({found}) than the rows \
         before it ({expected}); draw a chart of each"
    )]
    OtherMachine { at: At, found: String, expected: String },
}

/// A line of a file.
#[derive(Debug, Clone)]
pub(crate) struct At {
    file: PathBuf,
    line: usize,
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A finite number above zero.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "f64")]
pub(super) struct Positive(pub(super) f64);

impl TryFrom<f64> for Positive {
    type Error = String;

    fn try_from(number: f64) -> Result<Self, String> {
        match number.is_finite() && number > 0.0 {
            true => Ok(Self(number)),
            false => Err(format!("{number} is not a positive number")),
        }
    }
}

/// A row of `zs-bench torch`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Torch {
    #[serde(flatten)]
    pub(super) workload: Workload,
    pub(super) rounds: u32,
    pub(super) system: String,
    pub(super) level: Option<String>,
    pub(super) clip: Option<String>,
    pub(super) transport: Option<String>,
    pub(super) wire: Option<String>,
    pub(super) parameter_wire: Option<String>,
    pub(super) seconds: Positive,
    pub(super) ratio_ddp: Option<Positive>,
    pub(super) ratio_floor: Option<Positive>,
    pub(super) rank0_peak_mib: Option<u64>,
    pub(super) rank1_peak_mib: Option<u64>,
    pub(super) gpu_peak_mib: Option<u64>,
    pub(super) servers_peak_mib: Option<u64>,
}

/// What the systems of `zs-bench torch` train. Only steps of the same workload are comparable.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Workload {
    pub(super) model: String,
    pub(super) layers: u64,
    pub(super) width: u64,
    pub(super) params: u64,
    pub(super) ranks: u64,
    pub(super) device: String,
    pub(super) dtype: String,
}

/// A row of `zs-bench step`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Step {
    #[serde(flatten)]
    pub(super) case: Case,
    pub(super) level: String,
    pub(super) transport: String,
    pub(super) wire: String,
    pub(super) parameter_wire: String,
    pub(super) seconds: Positive,
}

/// The workload of `zs-bench step`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Case {
    pub(super) params: u64,
    pub(super) tensors: u64,
    pub(super) workers: u64,
    pub(super) servers: u64,
    pub(super) replicas: u64,
    pub(super) dtype: String,
    pub(super) state_dtype: String,
}

/// A row of `zs-bench transfer`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Transfer {
    /// `pull` or `push`.
    pub(super) bench: String,
    pub(super) bytes: u64,
    pub(super) connections: u64,
    pub(super) transport: String,
    pub(super) gbps: Positive,
    pub(super) ratio_raw_tcp: Positive,
    /// Only with TLS.
    pub(super) raw_tls_gbps: Option<Positive>,
}

/// A row of `zs-bench optimizer`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Optimizer {
    pub(super) optimizer: String,
    pub(super) state_dtype: String,
    pub(super) threads: u64,
    pub(super) gparams_per_s: Positive,
    pub(super) ratio_memory: Option<Positive>,
    /// Another implementation than that of ZeroShard's servers.
    pub(super) system: Option<String>,
}

/// A row of `zs-bench kernels`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Kernel {
    pub(super) kernel: String,
    pub(super) gparams_per_s: Positive,
    pub(super) ratio_copy: Positive,
}

/// The rows of all files, by benchmark.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) torch: Vec<Torch>,
    pub(super) transfers: Vec<Transfer>,
    pub(super) steps: Vec<Step>,
    pub(super) optimizers: Vec<Optimizer>,
    pub(super) kernels: Vec<Kernel>,
    /// The benchmarks without a panel, with their first row and the number of rows.
    skipped: BTreeMap<String, (At, u64)>,
    /// The machine in the first row of each day.
    machines: BTreeMap<String, Machine>,
}

impl Rows {
    /// Reads JSON lines. Empty lines are permitted.
    pub(super) fn read(files: &[PathBuf]) -> Result<Self, Error> {
        let mut rows = Self::default();
        for file in files {
            let text = fs::read_to_string(file)
                .map_err(|source| Error::Read { file: file.clone(), source })?;
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            for (i, line) in lines {
                rows.add(line, At { file: file.clone(), line: i + 1 })?;
            }
        }
        Ok(rows)
    }

    fn add(&mut self, line: &str, at: At) -> Result<(), Error> {
        let row = serde_json::from_str::<Value>(line).ok();
        let bench = row.as_ref().and_then(|row| row["bench"].as_str());
        let (Some(row), Some(bench)) = (&row, bench) else { return Err(Error::NotRow { at }) };
        match bench {
            "torch" => self.torch.push(parsed(row, &at)?),
            // `transfer` also measures boxes, which are not compared with TCP.
            "pull" | "push" if row["of"].is_null() => self.transfers.push(parsed(row, &at)?),
            "step" => self.steps.push(parsed(row, &at)?),
            "optimizer" => self.optimizers.push(parsed(row, &at)?),
            "kernels" => self.kernels.push(parsed(row, &at)?),
            bench => {
                let (_, number) = self.skipped.entry(bench.to_owned()).or_insert((at, 0));
                *number += 1;
                return Ok(());
            }
        }
        self.measured_on(row, at)
    }

    /// Checks that all rows are of one machine and version.
    fn measured_on(&mut self, row: &Value, at: At) -> Result<(), Error> {
        #[derive(Deserialize)]
        struct Measured {
            machine: Machine,
        }
        let Measured { machine } = parsed(row, &at)?;
        let shown = |machine: &Machine| format!("{machine}, version {}", machine.version);
        match self.machines.values().next().map(shown) {
            Some(expected) if expected != shown(&machine) => {
                Err(Error::OtherMachine { at, found: shown(&machine), expected })
            }
            _ => {
                self.machines.entry(machine.date.clone()).or_insert(machine);
                Ok(())
            }
        }
    }

    /// `true` if there is no row to draw.
    pub(super) fn is_empty(&self) -> bool {
        self.machines.is_empty()
    }

    /// Names the rows that are not drawn.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.skipped.iter().map(|(bench, (at, number))| {
            let rows = text::count(*number, "row");
            let reason = match bench.as_str() {
                "pull" | "push" => "boxes have no panel",
                bench if NOT_SHOWN.contains(&bench) => "this benchmark has no panel",
                _ => "zs-bench has no such benchmark",
            };
            format!("not drawn: {rows} of {bench:?}, first in {at}: {reason}")
        })
    }

    /// The machine, such as "AMD EPYC, 2 cores, 24 GiB of memory".
    pub(super) fn machine(&self) -> String {
        self.machines.values().next().map(Machine::to_string).unwrap_or_default()
    }

    /// The version of ZeroShard.
    pub(super) fn version(&self) -> &str {
        self.machines.values().next().map_or("", |machine| &machine.version)
    }

    /// The day of the measurements, or the first and the last day.
    pub(super) fn date(&self) -> String {
        let mut days = self.machines.keys();
        match (days.next(), days.next_back()) {
            (Some(first), Some(last)) => format!("{first} to {last}"),
            (first, _) => first.cloned().unwrap_or_default(),
        }
    }
}

/// Converts a row.
fn parsed<T: DeserializeOwned>(row: &Value, at: &At) -> Result<T, Error> {
    T::deserialize(row).map_err(|error| {
        let bench = row["bench"].as_str().unwrap_or_default().to_owned();
        Error::Row { at: at.clone(), bench, reason: error.to_string() }
    })
}
