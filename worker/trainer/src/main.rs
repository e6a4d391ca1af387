//! The program `zeroshard-worker`.

use std::process::ExitCode;

use clap::Parser;
use zeroshard_trainer::{
    cli::{Cli, Command},
    launch,
};

fn main() -> ExitCode {
    let Command::Train(flags) = Cli::parse().command;
    match launch::run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zeroshard-worker: {error}");
            ExitCode::FAILURE
        }
    }
}
