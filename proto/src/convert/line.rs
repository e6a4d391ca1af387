//! Lines of a job.

use zeroshard_model::{Error, Line, Result};

use crate::pb;

impl From<&Line> for pb::Line {
    fn from(line: &Line) -> Self {
        let skips = line.skips().iter();
        let skips = skips.map(|range| pb::BatchRange { begin: range.start, end: range.end });
        Self { number: line.number, skips: skips.collect() }
    }
}

impl TryFrom<pb::Line> for Line {
    type Error = Error;

    fn try_from(pb::Line { number, skips }: pb::Line) -> Result<Self> {
        if number == u64::MAX {
            return Err(Error::invalid("number of the line", number, "lower"));
        }
        Self::new(number, skips.into_iter().map(|range| range.begin..range.end))
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
