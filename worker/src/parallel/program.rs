//! The operations of a rank in a mode, in order: a program that can be printed.

use std::fmt;

use serde::Serialize;
use zeroshard_proto::TensorBox;

use super::world::Call;

/// The mode of a [`super::DistModel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Computes the loss, and changes the parameters.
    Train,
    /// Computes the loss.
    Eval,
    /// Computes outputs.
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

/// Whose program it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// This rank's.
    Dist,
    /// That of one process with the whole model.
    Serial,
}

/// When it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// At every call.
    Main,
    /// Once, before.
    Startup,
}

/// One thing that a rank does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Initial values go to the servers.
    Upload(Part),
    /// Parameters come from the servers.
    Pull(Part),
    /// The module runs forward.
    Forward {
        /// Its type.
        module: String,
    },
    /// The loss is computed.
    Loss,
    /// Gradients are computed.
    Backward,
    /// Ranks exchange data.
    Collective(Call),
    /// Gradients go to the servers.
    Push(Part),
    /// The step is decided and applied, with this optimizer.
    Commit {
        /// Its name.
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
    /// Payload.
    pub bytes: u64,
}

/// The operations of a mode, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The mode.
    pub mode: Mode,
    /// Whose.
    pub scope: Scope,
    /// When.
    pub kind: Kind,
    /// In order.
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
