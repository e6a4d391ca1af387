//! `zsctl completion`: scripts for completion in shells.

use clap::{CommandFactory, ValueEnum};
use clap_complete::{
    generate,
    shells::{Bash, Fish, Zsh},
};

/// Flags of `zsctl completion`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Shell that reads the output; for bash: `source <(zsctl completion bash)`
    shell: Shell,
}

/// A supported shell.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Prints the completion script.
pub(crate) fn run(arguments: &Arguments) {
    let (mut command, mut out) = (crate::Arguments::command(), Vec::new());
    match arguments.shell {
        Shell::Bash => generate(Bash, &mut command, "zsctl", &mut out),
        Shell::Zsh => generate(Zsh, &mut command, "zsctl", &mut out),
        Shell::Fish => generate(Fish, &mut command, "zsctl", &mut out),
    }
    say!("{}", String::from_utf8_lossy(&out).trim_end());
}
