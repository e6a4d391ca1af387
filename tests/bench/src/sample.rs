//! Statistics of repeated measurements.

/// The median of `samples` (the upper one of two).
pub(crate) fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// The quantile of `samples` for this fraction.
pub(crate) fn quantile(mut samples: Vec<f64>, part: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * part).round() as usize]
}
