//! `zs-bench`: benchmarks. Every subcommand measures its baselines in the same run, and prints a
//! table, or with `--json` one object per line. `chart` draws these objects.

mod chart;
mod checkpoint;
mod control;
mod follow;
mod kernels;
mod machine;
mod neighbours;
mod optimizer;
mod recovery;
mod sample;
mod step;
mod table;
mod talk;
mod tiers;
mod torch;
mod transfer;
mod wire;

use clap::{Parser, Subcommand};

/// The same allocator as in the server, where the reason is documented.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about, version)]
struct Arguments {
    /// Print one JSON object per line instead of a table.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    Transfer(transfer::Options),
    Optimizer(optimizer::Options),
    Kernels(kernels::Options),
    Wire(wire::Options),
    Step(step::Options),
    Checkpoint(checkpoint::Options),
    Recovery(recovery::Options),
    Control(control::Options),
    Neighbours(neighbours::Options),
    Tiers(tiers::Options),
    Follow(follow::Options),
    Torch(torch::Options),
    Chart(chart::Options),
    #[command(hide = true)]
    StepWorker(step::WorkerOptions),
    #[command(hide = true)]
    ServeRaw(transfer::RawOptions),
    #[command(hide = true)]
    NeighboursWorker(neighbours::WorkerOptions),
    #[command(hide = true)]
    FollowReader(follow::ReaderOptions),
    #[command(hide = true)]
    ServePlain,
}

/// The error of a benchmark, which ends the program.
type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> std::process::ExitCode {
    let Arguments { json, bench } = Arguments::parse();
    let result: Result<(), Error> = match bench {
        Bench::Transfer(options) => transfer::run(&options, json),
        Bench::Optimizer(options) => optimizer::run(&options, json).map_err(Into::into),
        Bench::Kernels(options) => kernels::run(&options, json),
        Bench::Wire(options) => wire::run(&options, json),
        Bench::Step(options) => step::run(&options, json),
        Bench::Checkpoint(options) => checkpoint::run(&options, json),
        Bench::Recovery(options) => recovery::run(&options, json),
        Bench::Control(options) => control::run(&options, json),
        Bench::Neighbours(options) => neighbours::run(&options, json),
        Bench::Tiers(options) => tiers::run(&options, json),
        Bench::Follow(options) => follow::run(&options, json),
        Bench::Torch(options) => torch::run(&options, json),
        Bench::Chart(options) => chart::run(&options).map_err(Into::into),
        Bench::StepWorker(options) => step::run_worker(&options),
        Bench::ServeRaw(options) => transfer::serve_raw(&options),
        Bench::NeighboursWorker(options) => neighbours::run_worker(&options),
        Bench::FollowReader(options) => follow::run_reader(&options),
        Bench::ServePlain => transfer::serve_plain(),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zs-bench: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
