//! Statistics of repeated measurements.

/// The median of `samples` (the upper one of two).
pub(crate) fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
