//! The steps of each job, and the last events of the cluster, for the status page. The state
//! machine does not read them.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use zeroshard_model::Attempt;

use crate::{operators::metrics_view::Waits, vocabulary::ids::Now};

/// The maximum number of points of a curve.
const POINTS: usize = 240;

/// The number of recent steps from which the current rate and phases are computed.
const RECENT: usize = 32;

/// The maximum number of events.
const EVENTS: usize = 100;

/// The maximum length of an event in bytes. Events may contain text that clients have sent.
const MAX_EVENT: usize = 600;

/// The results of a decided step.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The version that the step has produced.
    pub version: u64,
    /// The attempt that was decided.
    pub attempt: Attempt,
    /// The time of the decision before it, or at which the job could make its first step.
    pub began: Now,
    /// `true` if the step was applied; otherwise it was skipped.
    pub applied: bool,
    /// The mean loss of the ranks; `None` unless every rank has reported a loss.
    pub loss: Option<f64>,
    /// The norm of the mean gradient, before clipping. It is not finite after an overflow.
    pub norm: f64,
    pub waits: Waits,
}

/// The steps of a job since this coordinator started. The curve covers all steps with a bounded
/// number of points: when it is full, pairs of neighbouring points are merged.
#[derive(Debug, Clone)]
pub struct History {
    /// The points of the curve, by ascending version.
    points: Vec<Point>,
    /// The number of steps in each point. The last point may have fewer.
    stride: u64,
    recent: VecDeque<Recent>,
    /// The time at which the last step was decided.
    last: Option<Now>,
    pub applied: u64,
    pub skipped: u64,
    pub aborted: u64,
}

impl Default for History {
    fn default() -> Self {
        let (points, recent) = (Vec::new(), VecDeque::new());
        Self { points, stride: 1, recent, last: None, applied: 0, skipped: 0, aborted: 0 }
    }
}

/// A point of the curve: the means of consecutive steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Point {
    /// The version that the last of the steps has produced.
    pub version: u64,
    steps: u64,
    /// The time from each step to the next.
    seconds: Mean,
    loss: Mean,
    norm: Mean,
}

/// The mean of the finite values.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn of(value: Option<f64>) -> Self {
        match value.filter(|value| value.is_finite()) {
            Some(sum) => Self { sum, count: 1 },
            None => Self::default(),
        }
    }

    fn add(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
    }

    fn get(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

impl Point {
    fn add(&mut self, next: Self) {
        self.version = next.version;
        self.steps += next.steps;
        self.seconds.add(next.seconds);
        self.loss.add(next.loss);
        self.norm.add(next.norm);
    }

    /// The mean loss; `None` if no step had one.
    pub fn loss(&self) -> Option<f64> {
        self.loss.get()
    }

    /// The mean of the norms that are finite.
    pub fn norm(&self) -> Option<f64> {
        self.norm.get()
    }

    /// Steps per second.
    pub fn rate(&self) -> Option<f64> {
        self.seconds.get().filter(|&seconds| seconds > 0.0).map(|seconds| 1.0 / seconds)
    }
}

/// The durations of the phases of one step.
#[derive(Debug, Clone, Copy)]
struct Recent {
    since: Now,
    /// From the previous decision to the first commit.
    work: Duration,
    ranks: Duration,
    servers: Duration,
}

/// The mean durations of the phases of the last steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phases {
    /// From the previous decision to the first commit: pulls, computation and pushes of the fastest
    /// rank.
    pub work: Duration,
    /// From the first to the last commit.
    pub ranks: Duration,
    /// From the last commit to the decision.
    pub servers: Duration,
}

impl History {
    /// Adds a step that was decided at `now`. Drops later steps that the job has undone by
    /// returning to a checkpoint.
    pub fn add(&mut self, step: &Step, now: Now) {
        match step.applied {
            true => self.applied += 1,
            false => self.skipped += 1,
        }
        let is_undone = |last: &&Point| last.version >= step.version;
        while self.points.last().as_ref().is_some_and(is_undone) {
            self.points.pop();
        }
        let took = self.last.map(|last| now.saturating_sub(last));
        let point = Point {
            version: step.version,
            steps: 1,
            seconds: Mean::of(took.map(|took| took.as_secs_f64())),
            loss: Mean::of(step.loss),
            norm: Mean::of(Some(step.norm)),
        };
        match self.points.last_mut().filter(|last| last.steps < self.stride) {
            Some(last) => last.add(point),
            None => self.points.push(point),
        }
        if self.points.len() > POINTS {
            self.halve();
        }
        if let (Some(took), Some(since)) = (took, self.last) {
            let Waits { ranks, servers, .. } = step.waits;
            let work = took.saturating_sub(ranks + servers);
            self.recent.truncate(RECENT - 1);
            self.recent.push_front(Recent { since, work, ranks, servers });
        }
        self.last = Some(now);
    }

    fn halve(&mut self) {
        self.stride *= 2;
        let pairs = self.points.chunks(2).map(|pair| {
            let mut sum = pair[0];
            pair[1..].iter().for_each(|next| sum.add(*next));
            sum
        });
        self.points = pairs.collect();
    }

    /// The curve.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The number of steps in each point of the curve.
    pub fn stride(&self) -> u64 {
        self.stride
    }

    /// The current number of steps per second. It decreases while a job makes no steps.
    pub fn rate(&self, now: Now) -> Option<f64> {
        let since = self.recent.back()?.since;
        let seconds = now.saturating_sub(since).as_secs_f64();
        (seconds > 0.0).then(|| self.recent.len() as f64 / seconds)
    }

    /// The phases of the last steps.
    pub fn phases(&self) -> Option<Phases> {
        let steps = u32::try_from(self.recent.len()).ok().filter(|&steps| steps > 0)?;
        let mean =
            |of: fn(&Recent) -> Duration| self.recent.iter().map(of).sum::<Duration>() / steps;
        Some(Phases {
            work: mean(|step| step.work),
            ranks: mean(|step| step.ranks),
            servers: mean(|step| step.servers),
        })
    }

    /// The time since the last step.
    pub fn idle(&self, now: Now) -> Option<Duration> {
        self.last.map(|last| now.saturating_sub(last))
    }
}

/// The severity of an event, which is the level of its log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Severity {
    /// Part of normal operation.
    #[default]
    Info,
    /// The cluster has lost something, and continues without it or tries again.
    Warning,
    /// A job cannot continue: an operator has to act.
    Error,
}

impl Severity {
    /// All severities, ascending.
    pub const ALL: [Self; 3] = [Self::Info, Self::Warning, Self::Error];

    /// The name on the status page.
    pub fn label(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// An event of the cluster.
#[derive(Debug, Clone)]
pub struct Happened {
    pub at: SystemTime,
    pub severity: Severity,
    pub text: String,
}

/// The last events.
#[derive(Debug, Default)]
pub struct Journal(VecDeque<Happened>);

impl Journal {
    pub fn add(&mut self, severity: Severity, mut text: String) {
        if text.len() > MAX_EVENT {
            text.truncate(text.floor_char_boundary(MAX_EVENT));
            text.push('…');
        }
        if self.0.len() == EVENTS {
            // Events of normal operation give way first: a job that saves often would otherwise
            // hide the loss of a server.
            let oldest = self.0.iter().rposition(|of| of.severity == Severity::Info);
            self.0.remove(oldest.unwrap_or(EVENTS - 1));
        }
        self.0.push_front(Happened { at: SystemTime::now(), severity, text });
    }

    /// The last events that have at least this severity, newest first.
    pub fn newest(&self, least: Severity) -> Vec<Happened> {
        self.0.iter().filter(|of| of.severity >= least).cloned().collect()
    }

    /// The number of the last events that have at least this severity.
    pub fn count(&self, least: Severity) -> usize {
        self.0.iter().filter(|of| of.severity >= least).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(version: u64, loss: f64) -> Step {
        let ms = Duration::from_millis;
        let waits = Waits { lateness: Vec::new(), ranks: ms(20), servers: ms(30) };
        let attempt = Attempt::first(1, version - 1);
        Step {
            version,
            attempt,
            began: Now::ZERO,
            applied: true,
            loss: Some(loss),
            norm: 2.0,
            waits,
        }
    }

    /// A job with these versions, one every 100 ms.
    fn history(versions: std::ops::RangeInclusive<u64>) -> (History, Now) {
        let mut history = History::default();
        let mut now = Duration::from_secs(5);
        for version in versions {
            now += Duration::from_millis(100);
            history.add(&step(version, version as f64), now);
        }
        (history, now)
    }

    #[test]
    fn a_long_job_has_a_bounded_curve_from_its_first_step_to_its_last() {
        let (history, _) = history(1..=100_000);
        assert!((POINTS / 2..=POINTS).contains(&history.points.len()));
        assert_eq!(history.points.iter().map(|point| point.steps).sum::<u64>(), 100_000);
        assert_eq!(history.points.last().unwrap().version, 100_000);
        let first = &history.points[0];
        assert_eq!(
            first.loss(),
            Some((1..=history.stride).sum::<u64>() as f64 / history.stride as f64)
        );
        for point in history.points() {
            let rate = point.rate().unwrap();
            assert!((rate - 10.0).abs() < 1e-6 && point.norm() == Some(2.0), "{rate}");
        }
    }

    #[test]
    fn the_phases_of_a_step_add_up_and_the_rate_of_a_job_that_stands_still_decreases() {
        let (history, now) = history(1..=50);
        let ms = Duration::from_millis;
        let phases = history.phases().unwrap();
        assert_eq!(phases, Phases { work: ms(50), ranks: ms(20), servers: ms(30) });
        assert!((history.rate(now).unwrap() - 10.0).abs() < 1e-6);
        assert!(history.rate(now + ms(60_000)).unwrap() < 1.0);
        assert_eq!(history.idle(now + ms(7)), Some(ms(7)));
    }

    #[test]
    fn steps_after_the_checkpoint_to_which_a_job_returns_are_dropped() {
        let (mut history, now) = history(1..=20);
        history.add(&step(11, 0.5), now + Duration::from_secs(1));
        let versions: Vec<u64> = history.points().iter().map(|point| point.version).collect();
        assert_eq!(versions, (1..=11).collect::<Vec<_>>());
        assert_eq!(history.points().last().unwrap().loss(), Some(0.5));
    }

    #[test]
    fn a_step_without_a_loss_or_a_finite_norm_leaves_a_gap() {
        let mut history = History::default();
        let overflow = Step { applied: false, loss: None, norm: f64::NAN, ..step(1, 0.0) };
        history.add(&overflow, Duration::from_secs(1));
        let point = history.points()[0];
        assert_eq!((point.loss(), point.norm(), point.rate()), (None, None, None));
        assert_eq!((history.applied, history.skipped, history.phases()), (0, 1, None));
    }

    #[test]
    fn the_journal_keeps_the_newest_events_and_a_bounded_part_of_each() {
        let mut journal = Journal::default();
        for number in 0..EVENTS + 5 {
            journal.add(Severity::Info, format!("{number} {}", "ä".repeat(MAX_EVENT)));
        }
        let newest = journal.newest(Severity::Info);
        assert_eq!(newest.len(), EVENTS);
        assert!(newest[0].text.starts_with("104 ") && newest[0].text.len() <= MAX_EVENT + 3);
    }

    #[test]
    fn the_journal_keeps_warnings_longer_than_events_of_normal_operation() {
        let mut journal = Journal::default();
        journal.add(Severity::Warning, "a server was lost".to_owned());
        for number in 0..3 * EVENTS {
            journal.add(Severity::Info, format!("version {number} is saved"));
        }
        assert_eq!(journal.newest(Severity::Info).len(), EVENTS);
        let warnings = journal.newest(Severity::Warning);
        assert_eq!(warnings.len(), 1);
        assert!(journal.newest(Severity::Error).is_empty());
        for number in 0..2 * EVENTS {
            journal.add(Severity::Error, format!("job {number} failed"));
        }
        assert_eq!(journal.newest(Severity::Error).len(), EVENTS);
    }
}
