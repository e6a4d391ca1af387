//! Jobs that continue from a version of another job.

/// A version of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobVersion {
    /// The job's name.
    pub job: String,
    /// The id, which distinguishes the job from earlier and later jobs of the same name.
    pub job_id: u64,
    /// The version.
    pub version: u64,
}

/// How a new job continues from another job, its predecessor.
///
/// Tensors of the same name and shape begin with the predecessor's master weights. Where a tensor
/// trains in both jobs, and the predecessor's optimizer has every state tensor that the new one
/// has, its optimizer state and its number of applied steps are copied as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fork {
    /// The predecessor, at the version that is copied.
    pub from: JobVersion,
    /// `true` if optimizer state and step counts start as in a new run instead of being copied.
    pub fresh_state: bool,
}

/// The name of the job that continues from job `name`: "name.1" for "name", "name.2" for "name.1".
pub fn successor_name(name: &str) -> String {
    let numbered = name
        .rsplit_once('.')
        .and_then(|(base, number)| Some((base, number.parse::<u64>().ok()?.checked_add(1)?)));
    numbered.map_or_else(|| format!("{name}.1"), |(base, number)| format!("{base}.{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successors_are_numbered() {
        for (name, next) in [
            ("demo", "demo.1"),
            ("demo.1", "demo.2"),
            ("run/all.9", "run/all.10"),
            ("v1.x", "v1.x.1"),
            ("job.18446744073709551615", "job.18446744073709551615.1"),
        ] {
            assert_eq!(successor_name(name), next);
        }
    }
}
