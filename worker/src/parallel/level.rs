//! The levels of ZeRO, named as in Paddle's `group_sharded_parallel`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A level of ZeRO. It determines how long a worker holds parameters and gradients. The optimizer
/// state is on the servers at every level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// The worker holds all parameters always, and all gradients until the end of a step.
    Os,
    /// The worker holds all parameters always; each gradient is sent and freed when it is ready.
    OsG,
    /// The worker holds parameters while they are used; each gradient is sent and freed when it is
    /// ready.
    PGOs,
}

impl Level {
    /// All levels.
    pub const ALL: [Level; 3] = [Level::Os, Level::OsG, Level::PGOs];

    /// The name of the level in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Os => "os",
            Level::OsG => "os_g",
            Level::PGOs => "p_g_os",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for an unknown level; contains its name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown level {0:?}: expected one of os, os_g, p_g_os")]
pub struct UnknownLevel(pub String);

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(name: &str) -> Result<Self, UnknownLevel> {
        Self::ALL
            .into_iter()
            .find(|level| level.name() == name)
            .ok_or_else(|| UnknownLevel(name.to_owned()))
    }
}
