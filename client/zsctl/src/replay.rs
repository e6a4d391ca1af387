//! `zsctl replay` applies a captured step again, with the arithmetic of the servers, and compares
//! the hashes.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use serde_json::json;
use zeroshard_client::{Error, Result, combined_hash};
use zeroshard_kernels::{Backend, Cpu, gpu, loops::Level};
use zeroshard_model::Optimizer;
use zeroshard_proto::{convert::optimizers, pb};
use zeroshard_shard::{
    device::Device,
    replay::{Replay, Replayed},
    slice::Apply,
};

use crate::{PROBLEM, capture::INDEX, table::table};
use file::{Index, Messages};

mod file;

/// The number of slices that are printed without `--all`.
const SHOWN: usize = 10;

/// Flags of `zsctl replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Directory that `zsctl capture` has written
    directory: PathBuf,
    /// Device that computes: `cpu`, or a GPU such as `cuda:0`
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: String,
    /// Instruction set of the CPU: `avx512`, `avx2` or `baseline` [default: the fastest one]
    #[arg(long, value_name = "LEVEL")]
    level: Option<String>,
    /// Print all slices, not only the first ten
    #[arg(long)]
    all: bool,
}

/// A replayed slice.
struct Row {
    slice: u32,
    tensor: String,
    /// The hash after the step.
    expected: Vec<u8>,
    found: Vec<u8>,
    /// What differs from what the servers recorded, for people.
    differs: Vec<String>,
}

/// A replayed step.
struct Step {
    /// The slices that train, by index.
    rows: Vec<Row>,
    /// The hash of the whole state, if it was captured.
    state_hash: Option<String>,
    /// The step was applied and not skipped.
    is_applied: bool,
}

/// Replays a captured step. The exit code is 3 if a hash differs.
///
/// # Errors
/// [`Error::Storage`]; [`Error::Refused`] and [`Error::Invalid`] for a malformed or incomplete
/// capture, and for a device or an instruction set that this machine lacks.
pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<ExitCode> {
    let Arguments { directory, device, level, all } = arguments;
    let index = Index::read(directory)?;
    let level = level.as_deref().map(level_of).transpose()?;
    let (step, device) = match (device.as_str(), level) {
        ("cpu", level) => {
            let level = level.unwrap_or_else(Level::best);
            (replay(directory, &index, Cpu::at(level))?, format!("the CPU ({})", name_of(level)))
        }
        (_, Some(_)) => {
            return Err(Error::refused("--level is for the CPU; leave out --level or --device"));
        }
        (name, None) => {
            let number = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
            let expected = "cpu, or cuda: with the number of a GPU";
            let number = number.ok_or_else(|| Error::invalid("--device", name, expected))?;
            (replay(directory, &index, gpu(number)?)?, name.to_owned())
        }
    };
    match json {
        true => show_json(&index, &step, &device),
        false => show(&index, &step, &device, *all),
    }
    let is_equal = step.rows.iter().all(Row::is_equal) && step.state_hash == index.state_hash;
    Ok(if is_equal { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM) })
}

/// The instruction set with a name, if this machine has it.
fn level_of(name: &str) -> Result<Level> {
    let levels = Level::all();
    let names: Vec<String> = levels.iter().map(|&level| name_of(level)).collect();
    let found = names.iter().position(|one| one == name);
    let invalid = || Error::invalid("--level", name, format!("one of {}", names.join(", ")));
    Ok(levels[found.ok_or_else(invalid)?])
}

fn name_of(level: Level) -> String {
    format!("{:?}", level.isa()).to_lowercase()
}

/// Replays all slices, one after the other.
fn replay<B: Backend>(directory: &Path, index: &Index, backend: B) -> Result<Step> {
    let device = Device::new(Arc::new(backend), None);
    // The slices that do not train keep their content.
    let (mut rows, mut digests, mut is_applied) = (Vec::new(), BTreeMap::new(), false);
    for server in 0..index.servers as usize {
        let (mut messages, step) = Messages::open(directory, server)?;
        let decision = Decision::of(index, step)?;
        is_applied = decision.update.is_some();
        while let Some((recorded, content)) = messages.next_slice(&index.spec)? {
            let number = recorded.slice;
            let digest = match content {
                None => recorded.after.to_vec(),
                Some(content) => {
                    let replayed = decision.replay(index).run(&device, number, &content)?;
                    rows.push(Row::new(index, &recorded, &replayed));
                    replayed.after.to_vec()
                }
            };
            digests.insert(number, digest);
        }
    }
    if digests.len() as u64 != index.slices {
        return Err(Error::refused(format!(
            "{} has {} of {} slices, so a file is incomplete; copy the directory again, or capture \
             another step",
            directory.display(),
            digests.len(),
            index.slices
        )));
    }
    rows.sort_by_key(|row| row.slice);
    let hash = || combined_hash(index.step + 1, digests.values().map(|digest| &digest[..]));
    let state_hash = index.state_hash.as_ref().map(|_| hash());
    Ok(Step { rows, state_hash, is_applied })
}

/// The decision about the step, as the servers got it.
struct Decision {
    groups: Vec<Optimizer>,
    /// `None`: the step was skipped.
    update: Option<pb::Update>,
}

impl Decision {
    fn of(index: &Index, step: pb::CapturedStep) -> Result<Self> {
        if step.step != index.step {
            let expected = format!("that of {INDEX}, {}", index.step);
            return Err(Error::invalid("step of a captured server", step.step, expected));
        }
        let groups = step.update.as_ref().map(|update| update.groups.clone()).unwrap_or_default();
        Ok(Self { groups: optimizers(groups)?, update: step.update })
    }

    fn replay<'a>(&'a self, index: &'a Index) -> Replay<'a> {
        let apply = |update: &'a pb::Update| Apply {
            groups: &self.groups,
            coefficient: update.coefficient,
            unclipped: update.unclipped,
            gradient_factors: &update.gradient_factors,
        };
        Replay { spec: &index.spec, step: index.step, apply: self.update.as_ref().map(apply) }
    }
}

impl Row {
    fn new(index: &Index, recorded: &pb::CapturedSlice, replayed: &Replayed) -> Self {
        let manifest = &index.spec.manifest;
        // The replay has checked the number.
        let tensor = manifest.tensor_of(recorded.slice as usize).name.clone();
        let mut differs = Vec::new();
        if recorded.before != replayed.before[..] {
            differs.push("state before the step".to_owned());
        }
        let hashes = |rank, hash| (rank, hash);
        let recorded_hashes = recorded.contributions.iter().map(|one| hashes(one.rank, one.hash));
        let expected: BTreeMap<u32, u64> = recorded_hashes.collect();
        let found = replayed.figures.iter().map(|one| hashes(one.rank, one.tally.hash));
        let found: BTreeMap<u32, u64> = found.collect();
        let ranks: BTreeSet<&u32> = expected.keys().chain(found.keys()).collect();
        let other = ranks.into_iter().filter(|rank| expected.get(rank) != found.get(rank));
        differs.extend(other.map(|rank| format!("gradient of rank {rank}")));
        if recorded.sum_of_squares.to_bits() != replayed.sum_of_squares.to_bits() {
            differs.push("norm of the sum".to_owned());
        }
        let (expected, found) = (recorded.after.to_vec(), replayed.after.to_vec());
        if expected != found {
            differs.push("state after the step".to_owned());
        }
        Self { slice: recorded.slice, tensor, expected, found, differs }
    }

    fn is_equal(&self) -> bool {
        self.differs.is_empty()
    }
}

/// Prints a line for each slice, and one for the step.
fn show_json(index: &Index, step: &Step, device: &str) {
    let (job, number) = (&index.spec.name, index.step);
    for row in &step.rows {
        let line = json!({
            "event": "slice", "slice": row.slice, "tensor": row.tensor, "differs": row.differs,
            "expected": hex(&row.expected), "found": hex(&row.found),
        });
        say!("{line}");
    }
    let differing = step.rows.iter().filter(|row| !row.is_equal()).count();
    let line = json!({
        "event": "replayed", "job": job, "step": number, "device": device,
        "applied": step.is_applied, "slices": step.rows.len(), "differing": differing,
        "expected": index.state_hash, "found": step.state_hash,
    });
    say!("{line}");
}

/// Prints a table of slices, those that differ first, and a summary.
fn show(index: &Index, step: &Step, device: &str, all: bool) {
    let mut rows: Vec<&Row> = step.rows.iter().collect();
    rows.sort_by_key(|row| row.is_equal());
    let differing = rows.iter().filter(|row| !row.is_equal()).count();
    let shown = if all { rows.len() } else { rows.len().min(SHOWN) };
    let mut lines = table(&["SLICE", "TENSOR", "EXPECTED", "FOUND", "DIFFERS"]);
    for row in &rows[..shown] {
        let (expected, found) = (short(&row.expected), short(&row.found));
        let differs = row.differs.join(", ");
        lines.add_row(vec![row.slice.to_string(), row.tensor.clone(), expected, found, differs]);
    }
    let was = if step.is_applied { "" } else { ", which was skipped" };
    let (job, number) = (&index.spec.name, index.step);
    say!("step {number} of job {job:?}{was}, applied again by {device}\n");
    say!("{lines}\n");
    if shown < rows.len() {
        say!("{} more slices; --all prints them\n", rows.len() - shown);
    }
    match differing {
        0 => say!("all {} slices have the hash that the servers recorded", rows.len()),
        differing => say!("{differing} of {} slices differ", rows.len()),
    }
    if let Some((expected, found)) = index.state_hash.as_ref().zip(step.state_hash.as_ref()) {
        let version = number + 1;
        match expected == found {
            true => say!("`zsctl hash` of version {version}: {found}"),
            false => say!("`zsctl hash` of version {version} was {expected}, and is {found}"),
        }
    }
}

fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first digits of a hash.
fn short(hash: &[u8]) -> String {
    hex(&hash[..hash.len().min(8)])
}
