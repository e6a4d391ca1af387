//! Fields that manifests and claims store in the same form.

use std::ops::Range;

use zeroshard_model::{Line, Result};

/// Returns whether a field is not stored, because it is 0.
pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Converts the batches that a line skips to (begin, end) pairs, as files store them.
pub(crate) fn stored_skips(line: &Line) -> Vec<(u64, u64)> {
    line.skips().iter().map(|range| (range.start, range.end)).collect()
}

/// Converts a number and stored pairs to a line.
///
/// # Errors
/// [`Error::Invalid`](zeroshard_model::Error::Invalid) as for [`Line::new`].
pub(crate) fn read_line(number: u64, skips: &[(u64, u64)]) -> Result<Line> {
    Line::new(number, skips.iter().map(|&(start, end)| Range { start, end }))
}
