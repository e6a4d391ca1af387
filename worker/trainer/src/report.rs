//! Reports the results of a run: as a table, a loss curve and a sample, or as the last line of
//! `--json`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use comfy_table::{Table, presets};
use serde::Serialize;

use super::chart::Chart;
use super::error::{Error, Result};
use super::plan::Plan;

/// The results of a run, on rank 0.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The number of steps that the job has taken.
    pub steps: u64,
    /// The loss of each step of this run (the mean over the ranks) in nats per character.
    pub train: Vec<(u64, f64)>,
    /// The held-out losses, each with the number of steps before the evaluation.
    pub held_out: Vec<(u64, f64)>,
    /// The number of steps that were skipped because of inf or NaN.
    pub skipped: u64,
    /// The number of times that a step was aborted and run again.
    pub aborted: u64,
    /// The number of parameters of the model.
    pub parameters: usize,
    /// The loss of a model that knows only the frequency of each character.
    pub unigram_entropy: f64,
    /// The hash of the job's state.
    pub state_hash: String,
    /// The maximum number of parameter and gradient bytes that this worker held at once.
    pub peak_bytes: usize,
    /// The number of parameter bytes that this worker received.
    pub pulled_bytes: u64,
    /// The number of gradient bytes that this worker sent.
    pub pushed_bytes: u64,
    /// The time from the first step to the last evaluation.
    pub elapsed: Duration,
    /// The number of characters on which all workers trained in that time.
    pub tokens: u64,
    /// The prompt of the sample.
    pub prompt: String,
    /// The generated text.
    pub sample: String,
}

/// The last line of `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// The number of steps that the job has taken.
    pub steps: u64,
    /// The loss of the last step in nats per character.
    pub train_loss: f64,
    /// The held-out loss at the end in nats per character.
    pub eval_loss: f64,
    /// The loss of a model that knows only the frequency of each character.
    pub unigram_entropy: f64,
    /// The hash of the job's state.
    pub state_hash: String,
    /// The time from the first step to the last evaluation in seconds.
    pub seconds: f64,
    /// The level of ZeRO.
    pub level: &'static str,
    /// The maximum number of parameter and gradient bytes that worker 0 held at once.
    pub peak_bytes: usize,
    /// The number of parameter bytes that worker 0 received.
    pub pulled_bytes: u64,
    /// The number of gradient bytes that worker 0 sent.
    pub pushed_bytes: u64,
    /// The number of characters per second of all workers together.
    pub tokens_per_s: f64,
    /// The number of steps that were skipped because of inf or NaN.
    pub skipped: u64,
    /// The number of times that a step was aborted and run again.
    pub aborted: u64,
}

impl Summary {
    /// Creates the summary of a run.
    pub fn new(plan: &Plan, outcome: &Outcome) -> Self {
        let last = |points: &[(u64, f64)]| points.last().map_or(f64::NAN, |point| point.1);
        let seconds = outcome.elapsed.as_secs_f64();
        Self {
            steps: outcome.steps,
            train_loss: last(&outcome.train),
            eval_loss: last(&outcome.held_out),
            unigram_entropy: outcome.unigram_entropy,
            state_hash: outcome.state_hash.clone(),
            seconds,
            level: plan.level.name(),
            peak_bytes: outcome.peak_bytes,
            pulled_bytes: outcome.pulled_bytes,
            pushed_bytes: outcome.pushed_bytes,
            tokens_per_s: outcome.tokens as f64 / seconds,
            skipped: outcome.skipped,
            aborted: outcome.aborted,
        }
    }
}

/// Writes `loss.svg` and `sample.txt` into a folder, which is created if it does not exist.
///
/// # Errors
/// [`Error::Report`].
pub fn write_files(folder: &Path, plan: &Plan, outcome: &Outcome) -> Result<()> {
    let points =
        |points: &[(u64, f64)]| points.iter().map(|&(step, loss)| (step as f64, loss)).collect();
    let chart = Chart {
        title: title(plan, outcome),
        train: points(&outcome.train),
        held_out: points(&outcome.held_out),
        unigram_entropy: outcome.unigram_entropy,
    };
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|cause| Error::Report { path, cause })
    };
    fs::create_dir_all(folder).map_err(|cause| Error::Report { path: folder.to_owned(), cause })?;
    write("loss.svg", chart.svg())?;
    write("sample.txt", format!("{}{}\n", outcome.prompt, outcome.sample))
}

/// Prints the table and the sample.
///
/// # Errors
/// [`Error::System`] if standard output is closed.
pub fn print(folder: &Path, plan: &Plan, outcome: &Outcome) -> Result<()> {
    let table = table(plan, &Summary::new(plan, outcome), outcome.parameters);
    let curve = folder.join("loss.svg");
    let mut out = io::stdout().lock();
    let mut write = || {
        writeln!(out, "{table}\n\nLoss curve: {}", curve.display())?;
        if !outcome.sample.is_empty() {
            writeln!(out, "Sample (after {:?}):\n\n{}", outcome.prompt, outcome.sample)?;
        }
        out.flush()
    };
    write().map_err(|cause| Error::System { doing: "write to standard output", cause })
}

fn title(plan: &Plan, outcome: &Outcome) -> String {
    let optimizer = plan.schedule.name();
    format!(
        "{:.2} M parameters, {optimizer}, {}, level {}",
        millions(outcome.parameters),
        plan.parallelism,
        plan.level
    )
}

fn millions(count: usize) -> f64 {
    count as f64 / 1e6
}

fn table(plan: &Plan, summary: &Summary, parameters: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let megabytes = |bytes: f64| format!("{:.2} MB", bytes / 1e6);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("model", format!("{:.2} M parameters, context {}", millions(parameters), plan.context()));
    row(
        "run",
        format!(
            "{} steps of {} windows, {}",
            summary.steps,
            plan.sharding.batch(),
            plan.parallelism
        ),
    );
    let parameter_wire = plan.options().wire_of_parameters();
    let wires = format!("gradients as {}, parameters as {parameter_wire}", plan.wire);
    row("level", format!("{}, {wires} on the wire", plan.level));
    row("optimizer", plan.schedule.to_string());
    row("training loss", format!("{:.4} nats/character", summary.train_loss));
    row("held-out loss", format!("{:.4} nats/character", summary.eval_loss));
    row("unigram entropy", format!("{:.4} nats/character", summary.unigram_entropy));
    row("held-out / unigram", format!("{:.3}", summary.eval_loss / summary.unigram_entropy));
    row("speed", format!("{:.0} tokens/s", summary.tokens_per_s));
    row("pulled by a worker", megabytes(summary.pulled_bytes as f64));
    row("pushed by a worker", megabytes(summary.pushed_bytes as f64));
    let all = (2 * size_of::<f32>() * parameters) as f64;
    let share = 100.0 * summary.peak_bytes as f64 / all;
    row(
        "peak of a worker",
        format!(
            "{}: {share:.0} % of all parameters and gradients",
            megabytes(summary.peak_bytes as f64)
        ),
    );
    if summary.skipped + summary.aborted > 0 {
        row(
            "steps not taken",
            format!("{} skipped (overflow), {} run again", summary.skipped, summary.aborted),
        );
    }
    row("state hash", summary.state_hash.clone());
    row("time", format!("{:.1} s", summary.seconds));
    table
}
