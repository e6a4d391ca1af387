//! Lines of a job.

use std::ops::Range;

use zeroshard_model::{Error, Line, Result};

use crate::pb;

impl From<&Range<u64>> for pb::BatchRange {
    fn from(&Range { start: begin, end }: &Range<u64>) -> Self {
        Self { begin, end }
    }
}

impl From<pb::BatchRange> for Range<u64> {
    fn from(pb::BatchRange { begin, end }: pb::BatchRange) -> Self {
        begin..end
    }
}

impl From<&Line> for pb::Line {
    fn from(line: &Line) -> Self {
        Self { number: line.number, skips: line.skips().iter().map(Into::into).collect() }
    }
}

impl TryFrom<pb::Line> for Line {
    type Error = Error;

    fn try_from(pb::Line { number, skips }: pb::Line) -> Result<Self> {
        if number == u64::MAX {
            return Err(Error::invalid("number of the line", number, "lower"));
        }
        Self::new(number, skips.into_iter().map(Range::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_survives_the_wire() {
        let line = Line::new(3, [5..7, 9..12]).unwrap();
        assert_eq!(Line::try_from(pb::Line::from(&line)), Ok(line));
    }

    #[test]
    fn an_invalid_line_is_refused() {
        let reversed = pb::BatchRange { begin: 2, end: 1 };
        for line in [
            pb::Line { number: u64::MAX, skips: Vec::new() },
            pb::Line { number: 0, skips: vec![reversed] },
        ] {
            assert!(matches!(Line::try_from(line), Err(Error::Invalid { .. })));
        }
    }
}
