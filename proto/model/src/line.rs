//! Lines tell versions with equal numbers apart: a job that returns to a checkpoint makes the
//! numbers after it again.
//!
//! ```text
//! line 0:  98  99  100  101  102 ... 120 (abandoned)
//!                   |
//! line 1:          100  101  102 ...
//! ```
//!
//! Each return begins a new line. The id of the job, the line and the number identify a version.

use std::{fmt, ops::Range, str::FromStr};

use crate::{Error, Result};

/// The maximum number of skipped ranges. Adjacent ranges count as one.
const MAX_SKIPS: usize = 1000;

/// A line of a job: its number, and the batches that its steps skip.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Line {
    /// The number of returns to a checkpoint before the line began, by this job and by the jobs
    /// that it continues.
    pub number: u64,
    /// The skipped batches. INVARIANT: ranges are not empty, ascend, and have gaps between them.
    skips: Vec<Range<u64>>,
}

/// A version of a job on one of its lines. Its text is `120` on line 0, and `120@3` on line 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LineVersion {
    /// The number of steps before it, including steps without an update.
    pub version: u64,
    /// The line.
    pub line: u64,
}

/// Identifies a line among all jobs of one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobLine {
    /// The id of the job.
    pub job_id: u64,
    /// The number of the line.
    pub line: u64,
}

impl Line {
    /// Creates a line that skips these batches. Ranges may overlap, be empty, and have any order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a range ends before it begins, or if more than 1,000 ranges are left.
    pub fn new(number: u64, skips: impl IntoIterator<Item = Range<u64>>) -> Result<Self> {
        let mut ranges: Vec<Range<u64>> = skips.into_iter().collect();
        if let Some(Range { start, end }) = ranges.iter().find(|range| range.start > range.end) {
            let expected = "a range that does not end before it begins";
            return Err(Error::invalid("skipped batches", format!("{start}..{end}"), expected));
        }
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable_by_key(|range| range.start);
        let mut skips: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match skips.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => skips.push(range),
            }
        }
        if skips.len() > MAX_SKIPS {
            let expected = format!("at most {MAX_SKIPS}");
            return Err(Error::invalid("number of skipped ranges", skips.len(), expected));
        }
        Ok(Self { number, skips })
    }

    /// Changes the number.
    pub fn numbered(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// Returns the skipped batches, as ascending ranges with gaps between them.
    pub fn skips(&self) -> &[Range<u64>] {
        &self.skips
    }

    /// Returns the number of the batch that a step uses.
    pub fn batch(&self, step: u64) -> u64 {
        let mut batch = step;
        for range in &self.skips {
            if batch < range.start {
                break;
            }
            batch = batch.saturating_add(range.end - range.start);
        }
        batch
    }

    /// Creates the line `number`, which begins at `version` of this one. It skips what this line
    /// skips, and the batches in `skip`.
    ///
    /// # Errors
    /// [`Error::Refused`] if a step before `version` has used one of these batches;
    /// [`Error::Invalid`] as for [`Line::new`].
    pub fn next(&self, number: u64, version: u64, skip: &[Range<u64>]) -> Result<Self> {
        // You may name a batch again that this line already skips after its last used one.
        let first = version.checked_sub(1).map_or(0, |last| self.batch(last).saturating_add(1));
        if let Some(Range { start, end }) = skip.iter().find(|range| range.start < first) {
            return Err(Error::refused(format!(
                "batches {start} to {} cannot be skipped: the steps before version {version} were \
                 made with the batches before {first}; skip from {first} on, or return to an \
                 earlier version",
                end.saturating_sub(1)
            )));
        }
        Self::new(number, self.skips.iter().chain(skip).cloned())
    }
}

impl fmt::Display for LineVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { version, line: 0 } => write!(f, "{version}"),
            Self { version, line } => write!(f, "{version}@{line}"),
        }
    }
}

/// Parses a version such as `120`, or `120@3` with its line.
///
/// # Errors
/// [`Error::Invalid`].
pub fn parse_version(text: &str) -> Result<(u64, Option<u64>)> {
    let (version, line) = match text.split_once('@') {
        Some((version, line)) => (version, Some(line)),
        None => (text, None),
    };
    match (version.parse(), line.map(u64::from_str).transpose()) {
        (Ok(version), Ok(line)) => Ok((version, line)),
        _ => Err(Error::invalid("version", format!("{text:?}"), "a number such as 120, or 120@1")),
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges of batches")]
mod tests {
    use super::*;

    fn line(skips: &[Range<u64>]) -> Line {
        Line::new(1, skips.iter().cloned()).unwrap()
    }

    #[test]
    fn steps_leave_out_skipped_batches() {
        let line = line(&[12..15, 10..12, 20..21, 7..7]);
        assert_eq!(line.skips(), [10..15, 20..21]);
        let batches: Vec<u64> = (8..18).map(|step| line.batch(step)).collect();
        assert_eq!(batches, [8, 9, 15, 16, 17, 18, 19, 21, 22, 23]);
    }

    #[test]
    fn a_line_skips_what_the_one_before_skips() {
        let next = line(&[100..120]).next(2, 90, &[95..96, 120..130]).unwrap();
        assert_eq!((next.number, next.skips()), (2, &[95..96, 100..130][..]));
    }

    #[test]
    fn batches_of_steps_that_stand_are_not_skipped() {
        let before = line(&[10..20]);
        assert_eq!(before.batch(15), 25);
        let refused = before.next(2, 15, &[24..30]).unwrap_err();
        assert!(refused.to_string().contains("skip from 25 on"), "{refused}");
        assert!(before.next(2, 15, &[25..30]).is_ok());
        assert!(before.next(2, 0, &[0..3]).is_ok());
        // The caller repeats its request, then widens it.
        assert_eq!(before.next(2, 10, &[10..20]).unwrap().skips(), [10..20]);
        assert_eq!(before.next(2, 10, &[10..30]).unwrap().skips(), [10..30]);
    }

    #[test]
    fn ranges_are_bounded_in_number() {
        let many = |count: u64| Line::new(0, (0..count).map(|range| 2 * range..2 * range + 1));
        assert!(many(1000).is_ok());
        assert!(matches!(many(1001), Err(Error::Invalid { .. })));
        #[expect(clippy::reversed_empty_ranges, reason = "this is what is refused")]
        let reversed = 3..2;
        assert!(matches!(Line::new(0, [reversed]), Err(Error::Invalid { .. })));
    }

    #[test]
    fn versions_are_read_as_they_are_written() {
        for (of, text) in [((120, 0), "120"), ((120, 3), "120@3")] {
            let (version, line) = of;
            assert_eq!(LineVersion { version, line }.to_string(), text);
        }
        assert_eq!(parse_version("120").unwrap(), (120, None));
        assert_eq!(parse_version("120@0").unwrap(), (120, Some(0)));
        for invalid in ["", "@1", "1@", "1@-1", "a"] {
            assert!(parse_version(invalid).is_err(), "{invalid:?}");
        }
    }
}
