//! `zs-bench`: measured comparisons. Every subcommand prints a table, or with `--json` one object a line, and measures its
//! baselines in the same run.

use clap::{Parser, Subcommand};

mod optimizer;

#[derive(Parser)]
#[command(about, version)]
struct Arguments {
    /// Print one JSON object a line instead of a table.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    Optimizer(optimizer::Options),
}

fn main() -> std::process::ExitCode {
    let Arguments { json, bench } = Arguments::parse();
    let result: Result<(), Box<dyn std::error::Error>> = match bench {
        Bench::Optimizer(options) => optimizer::run(&options, json).map_err(Into::into),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zs-bench: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
