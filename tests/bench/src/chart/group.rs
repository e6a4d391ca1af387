//! Rows of the same subject, from several runs.

use crate::sample::median;

/// Rows with equal keys, and that key.
pub(super) type Groups<'a, K, T> = Vec<(K, Vec<&'a T>)>;

/// Returns the rows with equal keys, in the order in which their keys appear first.
pub(super) fn grouped<'a, T: 'a, K: PartialEq>(
    rows: impl IntoIterator<Item = &'a T>,
    key: impl Fn(&T) -> K,
) -> Groups<'a, K, T> {
    let mut groups: Groups<'a, K, T> = Vec::new();
    for row in rows {
        let key = key(row);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((key, vec![row])),
        }
    }
    groups
}

/// Returns the median of the rows that have the value.
pub(super) fn median_of<T>(rows: &[&T], value: impl Fn(&T) -> Option<f64>) -> Option<f64> {
    let samples: Vec<f64> = rows.iter().filter_map(|row| value(row)).collect();
    (!samples.is_empty()).then(|| median(samples))
}
