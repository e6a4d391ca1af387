//! The figures of servers and jobs for the metrics.

use std::{collections::BTreeMap, time::Duration};

use super::{
    cluster::Cluster,
    state::{Job, Phase},
};
use crate::metrics::{JobFigures, JobState};

/// The weight of a step in the average lateness of a rank.
const WEIGHT: f64 = 0.1;

/// How much later than the first rank each rank commits, on average over the last steps.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    /// In seconds, of the ranks that took part in the last step.
    mean: BTreeMap<u32, f64>,
    slowest: Option<(u32, f64)>,
}

impl Lateness {
    /// Adds a step: how much later than the first rank each of its ranks has committed.
    pub(super) fn add(&mut self, step: &[(u32, Duration)]) {
        let mean = |&(rank, late): &(u32, Duration)| {
            let late = late.as_secs_f64();
            let mean = self.mean.get(&rank).map_or(late, |mean| mean + WEIGHT * (late - mean));
            (rank, mean)
        };
        self.mean = step.iter().map(mean).collect();
        let ranks = self.mean.iter().filter(|_| step.len() > 1);
        let slowest = ranks.max_by(|(_, a), (_, b)| a.total_cmp(b));
        self.slowest = slowest.map(|(&rank, &mean)| (rank, mean));
    }

    /// The rank with the highest average, and that average in seconds; `None` in a job with one
    /// rank, and before the first step.
    pub(crate) fn slowest(&self) -> Option<(u32, f64)> {
        self.slowest
    }

    /// At most `count` ranks with the highest averages, highest first. Empty for a job with one
    /// rank.
    pub(super) fn latest(&self, count: usize) -> Vec<(u32, f64)> {
        let ranks = self.mean.iter().filter(|_| self.mean.len() > 1);
        let mut ranks: Vec<_> = ranks.map(|(&rank, &mean)| (rank, mean)).collect();
        ranks.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        ranks.truncate(count);
        ranks
    }
}

impl Phase {
    pub(super) fn shown(&self) -> JobState {
        match self {
            Self::Waiting { interrupted: Some(_), .. }
            | Self::Opening { interrupted: Some(_), .. } => JobState::Restoring,
            Self::Waiting { interrupted: None, .. } => JobState::Waiting,
            Self::Opening { interrupted: None, .. } => JobState::Opening,
            Self::Open(_) => JobState::Open,
            Self::Recovering(_) => JobState::Recovering,
            Self::Failed { .. } => JobState::Failed,
        }
    }
}

impl Job {
    pub(super) fn figures(&self) -> JobFigures {
        let open = match &self.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        JobFigures {
            state: self.phase.shown(),
            epoch: self.epoch,
            version: open.and_then(|open| open.version),
            workers: open.map_or(0, |open| open.members.len()),
            degraded: open.map_or(0, |open| open.degraded_slices(&self.spec)),
            broken_links: open.map_or(0, |open| open.links.number()),
            slowest: open.and_then(|open| open.lateness.slowest()),
        }
    }
}

impl Cluster {
    /// The numbers of connected and of missing servers, and the figures of each job.
    pub(crate) fn figures(&self) -> (usize, usize, impl Iterator<Item = (&str, JobFigures)>) {
        let jobs = self.jobs.iter().map(|(name, job)| (name.as_str(), job.figures()));
        (self.servers.len(), self.missing.len(), jobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(late: &[(u32, u64)]) -> Vec<(u32, Duration)> {
        late.iter().map(|&(rank, ms)| (rank, Duration::from_millis(ms))).collect()
    }

    #[test]
    fn the_slowest_rank_is_the_one_that_is_late_in_most_steps() {
        let mut lateness = Lateness::default();
        for _ in 0..20 {
            lateness.add(&step(&[(0, 0), (1, 5), (2, 100)]));
        }
        lateness.add(&step(&[(0, 0), (1, 300), (2, 0)]));
        let (rank, seconds) = lateness.slowest().unwrap();
        assert!(rank == 2 && (0.08..0.1).contains(&seconds), "rank {rank}: {seconds}");
    }

    #[test]
    fn a_rank_that_has_left_is_forgotten_and_one_rank_alone_is_not_late() {
        let mut lateness = Lateness::default();
        lateness.add(&step(&[(0, 0), (1, 100)]));
        assert_eq!(lateness.slowest().map(|(rank, _)| rank), Some(1));
        lateness.add(&step(&[(0, 0)]));
        assert_eq!(lateness.slowest(), None);
    }
}
