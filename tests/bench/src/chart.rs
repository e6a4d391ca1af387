//! Draws the results of other benchmarks in one chart, and prints the table of the documents.

mod draw;
mod group;
mod markdown;
mod panels;
mod rows;
mod text;
mod tint;
mod torch;

#[cfg(test)]
mod tests;

use std::{fs, io, path::PathBuf};

use clap::Args;

use draw::Chart;
use rows::Rows;

/// Draw the results of torch, transfer, step, optimizer and kernels as one SVG file
///
/// Reads the JSON lines that these benchmarks printed with --json, from any number of runs and
/// files. The chart has a panel for each benchmark that is there, and names the machine, the date
/// and the version, which each row contains. If several rows measure the same subject, the chart
/// has their median. All rows must be of one machine and version.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Options {
    /// Files with the output of zs-bench --json
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write the chart to this SVG file
    #[arg(long, value_name = "SVG", required_unless_present = "table")]
    out: Option<PathBuf>,
    /// Print a Markdown table of step times and memory (rows of torch), with the machine above it,
    /// between two comments that mark where a newer table replaces it
    #[arg(long)]
    table: bool,
}

const EXAMPLE: &str = "\
Example:
  zs-bench --json torch --python .venv/bin/python > results.jsonl
  zs-bench --json transfer --boxes 0 >> results.jsonl
  zs-bench --json transfer --boxes 0 --transport shm >> results.jsonl
  for level in os os_g p_g_os; do zs-bench --json step --level $level; done >> results.jsonl
  zs-bench --json optimizer >> results.jsonl
  zs-bench chart results.jsonl --out chart.svg --table > table.md";

/// Why there is no chart.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Rows(#[from] rows::Error),
    #[error(
        "there is nothing to draw in the files; give the output of zs-bench --json torch, \
         transfer, step, optimizer or kernels"
    )]
    Nothing,
    #[error(
        "there are no step times for the table in the files; add the output of zs-bench --json \
         torch"
    )]
    NoTable,
    #[error(
        "cannot write {}: {source}; give a file in a folder that exists with --out",
        file.display()
    )]
    Write { file: PathBuf, source: io::Error },
}

#[expect(clippy::print_stdout, reason = "the program's output")]
pub(crate) fn run(options: &Options) -> Result<(), Error> {
    let rows = Rows::read(&options.files)?;
    rows.notes().for_each(|note| eprintln!("{note}"));
    if rows.is_empty() {
        return Err(Error::Nothing);
    }
    let table = options.table.then(|| markdown::table(&rows).ok_or(Error::NoTable)).transpose()?;
    if let Some(file) = &options.out {
        let (panels, notes) = panels::all(&rows);
        notes.iter().for_each(|note| eprintln!("{note}"));
        let title = format!("ZeroShard {}", rows.version());
        let subtitle = format!("Measured on {}, {}", rows.machine(), rows.date());
        let svg = Chart { title, subtitle, panels }.svg();
        fs::write(file, svg).map_err(|source| Error::Write { file: file.clone(), source })?;
    }
    if let Some(table) = table {
        println!("{table}");
    }
    Ok(())
}
