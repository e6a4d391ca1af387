//! `zsctl plan`: the memory and the traffic of a job that does not exist yet.

use std::{cmp::Reverse, collections::BinaryHeap, path::PathBuf, process::ExitCode};

use clap::Args;
use serde_json::{Value, json};
use zeroshard_client::{Options, Result, Wire};
use zeroshard_model::{DType, Error, JobSpec, Manifest, Optimizer, Policy, TensorSpec, size};

use crate::{
    PROBLEM, shapes,
    table::{human, table},
};

const GIB: f64 = (1u64 << 30) as f64;

/// The model, and how it is trained.
#[derive(Debug, Args)]
pub(crate) struct Estimate {
    #[command(flatten)]
    model: Model,
    /// Optimizer, such as adamw, sgd or lamb, with its default hyperparameters
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    optimizer: Optimizer,
    /// Element type of the parameters: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    dtype: DType,
    /// Encoding of gradients on the network, as in zeroshard.init(wire=): f32, bf16, f16 or int8.
    /// Parameters are encoded alike, but as f32 with int8
    #[arg(long, value_name = "ENCODING", default_value = "f32")]
    wire: Wire,
    /// Level: os, os_g or p_g_os
    #[arg(long, value_name = "LEVEL", default_value = "os_g",
        value_parser = ["os", "os_g", "p_g_os"])]
    level: String,
    /// Number of workers
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: u32,
    /// Number of workers that add their gradients before they send them
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=256))]
    group: u32,
    /// Number of shard servers
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65_536))]
    servers: u32,
    /// Number of servers that hold each slice
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=64))]
    replicas: u32,
    /// Memory of each shard server for slices, such as 64GiB; a number alone is in GiB. The plan
    /// then says whether the job fits, and the exit code is 3 if it does not. `zsctl status` shows
    /// what the servers of a cluster have free
    #[arg(long, value_name = "SIZE", value_parser = gibibytes)]
    memory: Option<f64>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Model {
    /// Number of parameters, such as 7B, 124M or 7e9, as a single tensor
    #[arg(long, value_name = "N", value_parser = parameters)]
    parameters: Option<u64>,
    /// Safetensors file, or directory with such files, whose headers have the shapes
    #[arg(long, value_name = "PATH")]
    safetensors: Option<PathBuf>,
    /// config.json of Hugging Face (gpt2, llama, mistral or qwen2), or its directory
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
}

/// Bytes of a job.
#[derive(Debug, PartialEq)]
struct Figures {
    parameters: u64,
    /// The bytes of each slice, the largest first.
    slices: Vec<u64>,
    /// The bytes on each server, the largest first.
    servers: Vec<u64>,
    /// The memory of a worker for parameters and gradients, without activations and buffers.
    worker: u64,
    /// The traffic of a worker in a step: sent, and received.
    pushed: u64,
    pulled: u64,
    /// What a server gets from the others of its slices in a step, on average.
    replicated: u64,
}

/// Prints the plan.
///
/// # Errors
/// [`Error::Invalid`] for a model that cannot be read, or numbers that do not fit together.
pub(crate) fn run(plan: &Estimate, json: bool) -> Result<ExitCode> {
    let figures = plan.figures()?;
    if json {
        say!("{}", plan.json(&figures));
    } else {
        say!("{}", plan.table(&figures));
        if let Some(verdict) = plan.verdict(&figures) {
            say!("\n{verdict}");
        }
    }
    match plan.fits(&figures) {
        Some(false) => Ok(ExitCode::from(PROBLEM)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Reads a number of parameters: 7000000000, 7e9 or 7B.
fn parameters(text: &str) -> Result<u64, String> {
    let expected = || format!("{text:?} is not a whole number of parameters, such as 7B or 7e9");
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let units = [('K', 1e3), ('M', 1e6), ('B', 1e9), ('G', 1e9), ('T', 1e12)];
    let unit = |&(unit, _): &(char, f64)| text.to_ascii_uppercase().ends_with(unit);
    let (digits, factor) = match units.iter().find(|of| unit(of)) {
        Some((_, factor)) => (&text[..text.len() - 1], *factor),
        None => (text, 1.0),
    };
    let number = digits.trim().parse::<f64>().map_err(|_| expected())? * factor;
    match (1.0..1e18).contains(&number) && number.fract() == 0.0 {
        true => Ok(number as u64),
        false => Err(expected()),
    }
}

/// Reads a size in GiB: 64, 0.5 or 64GiB.
fn gibibytes(text: &str) -> Result<f64, String> {
    let size = match text.parse::<f64>() {
        Ok(number) => Some(number),
        Err(_) => size::parse(text).map(|bytes| bytes as f64 / GIB),
    };
    size.filter(|size| size.is_finite() && *size > 0.0).ok_or_else(|| {
        format!("{text:?} is not a size; expected {}, or a number of GiB", size::EXPECTED)
    })
}

impl Estimate {
    fn figures(&self) -> Result<Figures> {
        if !self.ranks.is_multiple_of(self.group) {
            let expected = format!("a divisor of --ranks, {}", self.ranks);
            return Err(Error::invalid("--group", self.group, expected));
        }
        if self.replicas > self.servers {
            let expected = format!("at most --servers, {}", self.servers);
            return Err(Error::invalid("--replicas", self.replicas, expected));
        }
        let spec = self.spec()?;
        let mut slices: Vec<u64> =
            spec.required_by_slice().into_iter().map(|required| required.bytes).collect();
        slices.sort_unstable_by(|a, b| b.cmp(a));
        let numels = spec.manifest.tensors().iter().map(TensorSpec::numel);
        let (parameters, element) = (numels.clone().sum::<u64>(), self.dtype.size() as u64);
        let largest = numels.max().unwrap_or_default();
        let worker = match self.level.as_str() {
            "os" => 2 * parameters * element,
            "os_g" => parameters * element,
            // A module, and the one that is fetched meanwhile.
            _ => (2 * largest).min(parameters) * element,
        };
        let encoded = |wire: Wire| wire.bytes(parameters as usize) as u64;
        // Ranks of a group push sums, which are f32. At p_g_os, backward fetches parameters again.
        let pushed = if self.group > 1 { 4 * parameters } else { encoded(self.wire) };
        let pulled = encoded(Options::default().wire(self.wire).wire_of_parameters());
        let passes = if self.level == "p_g_os" { 2 } else { 1 };
        let group = u64::from(self.group);
        Ok(Figures {
            parameters,
            servers: self.spread(&slices, self.servers),
            slices,
            worker,
            pushed: pushed / group,
            pulled: passes * pulled / group,
            replicated: 4 * parameters * u64::from(self.replicas - 1) / u64::from(self.servers),
        })
    }

    /// The job, as the SDKs would create it.
    fn spec(&self) -> Result<JobSpec> {
        let Model { parameters, safetensors, config } = &self.model;
        let shapes = match (parameters, safetensors, config) {
            (_, Some(path), _) => shapes::of_safetensors(path)?,
            (_, _, Some(path)) => shapes::of_config(path)?,
            (parameters, ..) => vec![("model".to_owned(), vec![parameters.unwrap_or_default()])],
        };
        let policy = match self.optimizer.needs_whole_tensors() {
            true => Policy::Whole,
            false => Policy::Elementwise,
        };
        let tensor = |(name, shape)| TensorSpec {
            dtype: self.dtype,
            policy,
            ..TensorSpec::new(name, shape)
        };
        let manifest = Manifest::new(shapes.into_iter().map(tensor).collect())?;
        let groups = vec![self.optimizer];
        let replicas = self.replicas;
        Ok(JobSpec { world: self.ranks, replicas, ..JobSpec::new("plan", manifest, groups) })
    }

    /// The bytes on each server, if each slice is on the servers that have the fewest bytes.
    fn spread(&self, slices: &[u64], servers: u32) -> Vec<u64> {
        let mut least: BinaryHeap<Reverse<u64>> =
            std::iter::repeat_n(Reverse(0), servers as usize).collect();
        for slice in slices {
            let owners: Vec<_> = (0..self.replicas).filter_map(|_| least.pop()).collect();
            least.extend(owners.into_iter().map(|Reverse(bytes)| Reverse(bytes + slice)));
        }
        let mut servers: Vec<u64> = least.into_iter().map(|Reverse(bytes)| bytes).collect();
        servers.sort_unstable_by(|a, b| b.cmp(a));
        servers
    }

    /// The smallest number of servers with `free` bytes each that have room for the job; `None` if
    /// a slice is larger.
    fn servers_needed(&self, figures: &Figures, free: u64) -> Option<u32> {
        let all = figures.servers.iter().sum::<u64>().div_ceil(free.max(1));
        let lowest = u32::try_from(all).ok()?.max(self.replicas);
        // Slices do not fill servers completely.
        (lowest..lowest.checked_mul(2)?)
            .find(|&servers| self.spread(&figures.slices, servers)[0] <= free)
    }

    /// What a server receives from all workers in a step, and what it sends to them.
    fn links(&self, figures: &Figures) -> [u64; 2] {
        let of_server = |bytes: u64| {
            (u128::from(bytes) * u128::from(self.ranks) / u128::from(self.servers)) as u64
        };
        [of_server(figures.pushed), of_server(figures.pulled)]
    }

    fn table(&self, figures: &Figures) -> comfy_table::Table {
        let mut table = table(&["", "BYTES", ""]);
        let [received, sent] = self.links(figures);
        let all: u64 = figures.servers.iter().sum();
        let exact = |bytes: u64| format!("{bytes}");
        let mut row = |what: &str, bytes: u64| {
            table.add_row([what.to_owned(), human(bytes), exact(bytes)]);
        };
        row("all servers: slices", all);
        row("largest server: slices", figures.servers[0]);
        row("worker: parameters and gradients", figures.worker);
        row("worker: sent in a step", figures.pushed);
        row("worker: received in a step", figures.pulled);
        row("server: received from workers in a step", received);
        row("server: sent to workers in a step", sent);
        row("server: received from servers in a step", figures.replicated);
        table
    }

    /// Returns whether the job fits; `None` without `--memory`.
    fn fits(&self, figures: &Figures) -> Option<bool> {
        self.memory.map(|memory| figures.servers[0] as f64 <= memory * GIB)
    }

    fn verdict(&self, figures: &Figures) -> Option<String> {
        let free = (self.memory? * GIB) as u64;
        let largest = figures.servers[0];
        if largest <= free {
            return Some(format!("fits: the largest server has {} left", human(free - largest)));
        }
        let mut remedies = Vec::new();
        if let Some(servers) = self.servers_needed(figures, free) {
            remedies.push(format!("{servers} servers"));
        }
        remedies.push(format!("{} for each of {} servers", human(largest), self.servers));
        if self.replicas > 1 {
            remedies.push("fewer replicas".to_owned());
        }
        Some(format!(
            "does not fit: the largest server needs {}, and has {}; it would fit with {}",
            human(largest),
            human(free),
            remedies.join(", or with ")
        ))
    }

    fn json(&self, figures: &Figures) -> Value {
        let [received, sent] = self.links(figures);
        let fits = self.fits(figures);
        json!({
            "event": "plan", "parameters": figures.parameters, "fits": fits,
            "servers_bytes": figures.servers.iter().sum::<u64>(),
            "largest_server_bytes": figures.servers[0],
            "worker_bytes": figures.worker,
            "worker_sent_bytes": figures.pushed, "worker_received_bytes": figures.pulled,
            "server_received_bytes": received, "server_sent_bytes": sent,
            "server_replicated_bytes": figures.replicated,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        plan: Estimate,
    }

    fn plan(flags: &str) -> Estimate {
        Cli::parse_from(["plan"].into_iter().chain(flags.split(' '))).plan
    }

    #[test]
    fn memory_and_traffic_are_those_of_the_formulas() {
        let plan = plan("--parameters 1000000000 --ranks 8 --servers 4 --dtype bf16 --level os");
        let figures = plan.figures().unwrap();
        // Master weights, two states, gradient sum, and bf16 parameters.
        assert_eq!(figures.servers.iter().sum::<u64>(), 18_000_000_000);
        let slice = 18 * (4 << 20);
        assert!(figures.servers[0] - figures.servers[3] <= slice);
        assert_eq!(
            (figures.worker, figures.pushed, figures.pulled),
            (4_000_000_000, 4_000_000_000, 4_000_000_000)
        );
        assert_eq!(plan.links(&figures), [8_000_000_000, 8_000_000_000]);
    }

    #[test]
    fn the_traffic_follows_the_encoding_on_the_wire() {
        let traffic = |flags: &str| {
            let figures = plan(&format!("--parameters 128000 {flags}")).figures().unwrap();
            (figures.pushed, figures.pulled)
        };
        assert_eq!(traffic("--dtype bf16"), (512_000, 512_000));
        assert_eq!(traffic("--wire bf16"), (256_000, 256_000));
        assert_eq!(
            traffic("--wire int8"),
            (132_000, 512_000),
            "a scale of 4 bytes for 128 elements"
        );
    }

    #[test]
    fn groups_divide_the_traffic_and_replicas_multiply_the_memory() {
        let alone = plan("--parameters 1000000 --ranks 4 --servers 2").figures().unwrap();
        let grouped = plan("--parameters 1000000 --ranks 4 --servers 2 --group 4 --replicas 2");
        let grouped = grouped.figures().unwrap();
        assert_eq!(grouped.pushed * 4, alone.pushed);
        assert_eq!(grouped.servers.iter().sum::<u64>(), 2 * alone.servers.iter().sum::<u64>());
        assert_eq!(grouped.replicated, 2_000_000);
    }

    #[test]
    fn a_job_that_does_not_fit_gets_the_numbers_with_which_it_would() {
        let plan = plan("--parameters 1000000000 --servers 2 --memory 4");
        let verdict = plan.verdict(&plan.figures().unwrap()).unwrap();
        assert!(
            verdict.contains("does not fit") && verdict.contains("with 4 servers"),
            "{verdict}"
        );
        let larger = self::plan("--parameters 1000000000 --servers 2 --memory 8");
        assert!(larger.verdict(&larger.figures().unwrap()).unwrap().starts_with("fits"));
    }

    #[test]
    fn the_size_of_a_slice_limits_what_fits() {
        // LAMB has a slice for each tensor: 16 GB of a billion parameters fit on no smaller server.
        let plan = plan("--parameters 1000000000 --optimizer lamb --servers 4 --memory 8");
        let verdict = plan.verdict(&plan.figures().unwrap()).unwrap();
        assert!(!verdict.contains("with 5 servers") && verdict.contains("14.9 GiB"), "{verdict}");
    }

    #[test]
    fn numbers_that_do_not_fit_together_are_refused() {
        for flags in ["--ranks 4 --group 3", "--servers 2 --replicas 3"] {
            let refused = plan(&format!("--parameters 9 {flags}")).figures();
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{flags}");
        }
    }
}
