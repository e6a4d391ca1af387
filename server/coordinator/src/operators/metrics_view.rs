//! The figures of servers and jobs for the metrics.

use std::{collections::BTreeMap, time::Duration};

/// The state of a job, as operators see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    /// The job waits for shard servers, or for its placement.
    Waiting,
    /// Its servers allocate memory.
    Opening,
    /// Workers can join and train.
    Open,
    /// Its servers read its last checkpoint, because a server without a replica was lost.
    Restoring,
    /// The coordinator was restarted, and learns the job from its servers.
    Recovering,
    /// The job has ended with an error.
    Failed,
}

impl JobState {
    /// All states.
    pub const ALL: [Self; 6] =
        [Self::Waiting, Self::Opening, Self::Open, Self::Restoring, Self::Recovering, Self::Failed];

    /// The name of the state.
    pub fn label(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Opening => "opening",
            Self::Open => "open",
            Self::Restoring => "restoring",
            Self::Recovering => "recovering",
            Self::Failed => "failed",
        }
    }
}

/// The current figures of a job.
#[derive(Debug)]
pub struct JobMetrics {
    /// Its state.
    pub state: JobState,
    /// Its epoch.
    pub epoch: u64,
    /// Its version; `None` before it has one.
    pub version: Option<u64>,
    /// The number of ranks with a worker.
    pub workers: usize,
    /// The number of slices with too few replicas.
    pub degraded: usize,
    /// The number of pairs of a rank and a server that the rank cannot reach.
    pub broken_links: usize,
    /// The rank that has lately committed last, and by how many seconds on average.
    pub slowest: Option<(u32, f64)>,
}

/// The duration of a decided step's waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Waits {
    /// Of each rank after the first one that committed: the time between the two commits.
    pub lateness: Vec<Duration>,
    /// From the first to the last rank's commit.
    pub ranks: Duration,
    /// From the last rank's commit to the decision.
    pub servers: Duration,
}

/// The weight of a step in the average lateness of a rank.
const WEIGHT: f64 = 0.1;

/// How much later than the first rank each rank commits, on average over the last steps.
#[derive(Debug, Default)]
pub struct Lateness {
    /// In seconds, of the ranks that took part in the last step.
    mean: BTreeMap<u32, f64>,
    slowest: Option<(u32, f64)>,
}

impl Lateness {
    /// Adds a step: how much later than the first rank each of its ranks has committed.
    pub(crate) fn add(&mut self, step: &[(u32, Duration)]) {
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
    pub fn slowest(&self) -> Option<(u32, f64)> {
        self.slowest
    }

    /// At most `count` ranks with the highest averages, highest first. Empty for a job with one
    /// rank.
    pub(crate) fn latest(&self, count: usize) -> Vec<(u32, f64)> {
        let ranks = self.mean.iter().filter(|_| self.mean.len() > 1);
        let mut ranks: Vec<_> = ranks.map(|(&rank, &mean)| (rank, mean)).collect();
        ranks.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        ranks.truncate(count);
        ranks
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
