//! The phases of a step, for tests that disturb it in each of them.

use std::{fmt, str::FromStr};

use zeroshard_client::{Attempt, Commit, Job, Result};

use crate::{synthetic, training};

/// How far a rank has come with a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It has the parameters, and has sent nothing.
    Begun,
    /// It has sent half of its gradients.
    HalfSent,
    /// It has sent all of its gradients.
    Sent,
    /// It waits for the decision.
    Voted,
    /// It has the report.
    Decided,
}

impl Phase {
    /// All phases in order.
    pub const ALL: [Self; 5] =
        [Self::Begun, Self::HalfSent, Self::Sent, Self::Voted, Self::Decided];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|phase| phase.to_string() == text);
        found.ok_or_else(|| format!("{text:?} is not one of {:?}", Self::ALL))
    }
}

/// Begins `step`, and sends the gradients that a rank has sent in `phase`.
///
/// # Errors
/// Those of a pull and a push.
pub async fn begin(job: &Job, step: u64, phase: Phase) -> Result<Attempt> {
    training::pull(job, step).await?;
    let attempt = job.attempt(step)?;
    let mut gradients = synthetic::gradients(&job.spec().manifest, job.rank(), step);
    let sent = match phase {
        Phase::Begun => 0,
        Phase::HalfSent => gradients.len() / 2,
        Phase::Sent | Phase::Voted | Phase::Decided => gradients.len(),
    };
    gradients.truncate(sent);
    if !gradients.is_empty() {
        attempt.push(gradients).await?;
    }
    Ok(attempt)
}

/// Continues an attempt that [`begin`] has returned: sends the remaining gradients and commits.
///
/// # Errors
/// Those of a push and a commit.
pub async fn finish(job: &Job, attempt: &Attempt, phase: Phase) -> Result<()> {
    let mut gradients = synthetic::gradients(&job.spec().manifest, job.rank(), attempt.step());
    let rest = match phase {
        Phase::Begun => gradients,
        Phase::HalfSent => gradients.split_off(gradients.len() / 2),
        Phase::Sent | Phase::Voted | Phase::Decided => Vec::new(),
    };
    if !rest.is_empty() {
        attempt.push(rest).await?;
    }
    attempt.commit(Commit::default()).await.map(drop)
}
