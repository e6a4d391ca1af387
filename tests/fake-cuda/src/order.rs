//! The order of operations: which of them happen before others, whenever they run.
//!
//! Streams have vector clocks. An operation comes after everything that its stream has waited for,
//! and after everything that the program had waited for when it enqueued the operation. This
//! follows from the calls alone, so an ordering that only the schedule provides is not one.

use std::{ops::Range, sync::Arc};

use crate::fault::{Fault, Kind};

/// For each stream, the number of its operations that are known to be complete.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn of(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, stream: usize, count: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = count;
    }

    /// Adds what another clock knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        for (stream, count) in other.0.iter().enumerate() {
            if *count > self.of(stream) {
                self.set(stream, *count);
            }
        }
    }
}

/// An operation in the order of operations.
#[derive(Debug)]
pub(crate) struct Stamp {
    /// The number of the stream.
    pub(crate) stream: usize,
    /// What comes before the operation, and the operation itself.
    pub(crate) clock: Clock,
    /// The name of the operation and of its stream, for messages.
    pub(crate) name: String,
}

impl Stamp {
    /// Returns whether the other operation happens before this one, or is this one.
    fn is_after(&self, other: &Stamp) -> bool {
        self.clock.of(other.stream) >= other.clock.of(other.stream)
    }
}

/// The accesses to an allocation that later ones have to be ordered with.
#[derive(Debug, Default)]
pub(crate) struct History(Vec<Access>);

#[derive(Debug)]
struct Access {
    range: Range<u64>,
    is_write: bool,
    stamp: Arc<Stamp>,
}

impl History {
    /// Adds an access to bytes of `memory`. Returns the race with an earlier access, if there is
    /// one.
    pub(crate) fn add(
        &mut self,
        range: Range<u64>,
        is_write: bool,
        stamp: &Arc<Stamp>,
        memory: &str,
    ) -> Option<Fault> {
        let race = self.0.iter().find(|earlier| {
            let overlap = earlier.range.start < range.end && range.start < earlier.range.end;
            overlap && (is_write || earlier.is_write) && !stamp.is_after(&earlier.stamp)
        });
        let fault = race.map(|earlier| {
            let verb = |is_write: bool| if is_write { "writes" } else { "reads" };
            let what = format!(
                "{} {} bytes {range:?} of {memory}, {} {} bytes {:?}, and no event orders them",
                stamp.name,
                verb(is_write),
                earlier.stamp.name,
                verb(earlier.is_write),
                earlier.range,
            );
            Fault { kind: Kind::Race, what }
        });
        // What races with an access that is dropped here also races with the new one.
        self.0.retain(|earlier| {
            let is_inside = range.start <= earlier.range.start && earlier.range.end <= range.end;
            let is_covered = is_inside && (is_write || !earlier.is_write);
            !(is_covered && stamp.is_after(&earlier.stamp))
        });
        self.0.push(Access { range, is_write, stamp: stamp.clone() });
        fault
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation of a stream after others.
    fn stamp(stream: usize, tick: u64, after: &[&Arc<Stamp>]) -> Arc<Stamp> {
        let mut clock = Clock::default();
        after.iter().for_each(|earlier| clock.join(&earlier.clock));
        clock.set(stream, tick);
        Arc::new(Stamp { stream, clock, name: format!("operation {tick} of stream {stream}") })
    }

    #[test]
    fn only_unordered_accesses_of_the_same_bytes_with_a_write_race() {
        let write = stamp(0, 1, &[]);
        for (range, is_write, is_ordered, races) in [
            (0..8, false, false, true),
            (0..8, true, false, true),
            (0..8, false, true, false),
            (8..16, true, false, false),
        ] {
            let mut history = History::default();
            assert_eq!(history.add(0..8, true, &write, "memory"), None);
            let after: &[_] = if is_ordered { &[&write] } else { &[] };
            let race = history.add(range, is_write, &stamp(1, 1, after), "memory");
            assert_eq!(race.is_some(), races, "{race:?}");
        }
    }

    #[test]
    fn reads_do_not_race_and_each_is_remembered() {
        let mut history = History::default();
        let reads = [stamp(0, 1, &[]), stamp(1, 1, &[])];
        for read in &reads {
            assert_eq!(history.add(0..8, false, read, "memory"), None);
        }
        let write = stamp(2, 1, &[&reads[1]]);
        let race = history.add(4..5, true, &write, "memory").unwrap();
        assert!(race.what.contains("operation 1 of stream 0"), "{race}");
    }

    #[test]
    fn ordered_accesses_are_forgotten() {
        let mut history = History::default();
        let mut last = stamp(0, 1, &[]);
        for tick in 2..100 {
            assert_eq!(history.add(0..8, tick % 2 == 0, &last, "memory"), None);
            last = stamp(0, tick, &[&last]);
        }
        assert!(history.0.len() <= 2);
    }
}
