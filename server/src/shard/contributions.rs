//! The contributions to a step, in messages.

use std::time::Duration;

use zeroshard_loops::tally::Tally;
use zeroshard_proto::pb;
use zeroshard_shard::job::StepContributions;

/// The message with the contributions to a step.
pub(super) fn message(step: &StepContributions) -> pb::ContributionsResponse {
    let contribution = |(&(tensor, rank), tally): (&(u32, u32), &Tally)| pb::Contribution {
        tensor,
        rank,
        sum_of_squares: tally.squares,
        hash: tally.hash,
    };
    let arrival = |(&rank, since): (&u32, &Duration)| pb::Arrival {
        rank,
        microseconds: since.as_micros().try_into().unwrap_or(u64::MAX),
    };
    pb::ContributionsResponse {
        contributions: step.figures.iter().map(contribution).collect(),
        arrivals: step.arrived.iter().map(arrival).collect(),
    }
}
