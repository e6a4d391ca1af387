//! The operations of a model in one mode, as a list that can be printed.

use std::fmt;

use serde::Serialize;
use zeroshard_model::TensorBox;

use super::world::Call;

/// The mode of a [`super::DistModel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Computes the loss and updates the parameters.
    Train,
    /// Computes the loss.
    Eval,
    /// Computes the outputs.
    Predict,
}

impl Mode {
    /// "train", "eval", "predict".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Eval => "eval",
            Self::Predict => "predict",
        }
    }
}

/// The process that a program describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// This rank.
    Dist,
    /// A single process with the whole model.
    Serial,
}

/// The time at which a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// In every call.
    Main,
    /// Once, before the first call.
    Startup,
}

/// An operation in a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Uploads initial values to the servers.
    Upload(Part),
    /// Pulls parameters from the servers.
    Pull(Part),
    /// Runs the forward pass of the module.
    Forward {
        /// The type of the module.
        module: String,
    },
    /// Computes the loss.
    Loss,
    /// Computes the gradients.
    Backward,
    /// Runs a collective with other ranks.
    Collective(Call),
    /// Pushes gradients to the servers.
    Push(Part),
    /// Commits the step, which the servers apply.
    Commit {
        /// The name of the optimizer.
        optimizer: String,
    },
}

/// A box of a tensor that is transferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The tensor's name.
    pub tensor: String,
    /// The box.
    pub bounds: TensorBox,
    /// The size of the payload in bytes.
    pub bytes: u64,
}

/// The operations of a model in one mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The mode.
    pub mode: Mode,
    /// The process that executes the operations.
    pub scope: Scope,
    /// The time at which they are executed.
    pub kind: Kind,
    /// The operations, in order of execution.
    pub operations: Vec<Operation>,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, scope, kind, operations } = self;
        let scope = if *scope == Scope::Dist { "dist" } else { "serial" };
        let kind = if *kind == Kind::Main { "main" } else { "startup" };
        writeln!(f, "{scope} {kind} program, {}", mode.name())?;
        for (number, operation) in operations.iter().enumerate() {
            writeln!(f, "{number:4}  {operation}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upload(part) => write!(f, "upload {part}"),
            Self::Pull(part) => write!(f, "pull {part}"),
            Self::Forward { module } => write!(f, "forward {module}"),
            Self::Loss => write!(f, "loss"),
            Self::Backward => write!(f, "backward"),
            Self::Collective(Call { name, group, bytes }) => {
                write!(f, "{name} among {group:?}, {bytes} bytes")
            }
            Self::Push(part) => write!(f, "push {part}"),
            Self::Commit { optimizer } => write!(f, "commit {optimizer}"),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, bounds, bytes } = self;
        let ranges: Vec<String> = bounds
            .offset
            .iter()
            .zip(&bounds.size)
            .map(|(offset, size)| format!("{offset}:{}", offset + size))
            .collect();
        write!(f, "{tensor}[{}], {bytes} bytes", ranges.join(", "))
    }
}
