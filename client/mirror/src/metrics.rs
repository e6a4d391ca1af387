//! The metrics of a mirror, in Prometheus' text format. `docs/reference/metrics.md` lists them.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::store::Mirrored;

/// The type and meaning of a metric.
struct Family {
    name: &'static str,
    kind: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
}

const VERSION: &str = "zeroshard_mirror_version";
const LAG: &str = "zeroshard_mirror_lag_versions";
const READERS: &str = "zeroshard_mirror_readers";
const SENT: &str = "zeroshard_mirror_sent_bytes_total";
const RECEIVED: &str = "zeroshard_mirror_received_bytes_total";
const COPIES: &str = "zeroshard_mirror_copies_total";
const BUILD: &str = "zeroshard_build_info";
const EXPIRY: &str = "zeroshard_certificate_expiry_timestamp_seconds";

/// The metrics of mirrors, in the order of their names.
const FAMILIES: [Family; 6] = [
    Family {
        name: COPIES,
        kind: "counter",
        labels: &["job", "reason"],
        help: "Number of full copies that the mirror has received, by reason: joined, behind, \
               rewound, differed or interrupted.",
    },
    Family {
        name: LAG,
        kind: "gauge",
        labels: &["job"],
        help: "Number of versions that the job had and the mirror did not have, when the mirror \
               last asked the coordinator. It asks every 5 s.",
    },
    Family {
        name: READERS,
        kind: "gauge",
        labels: &["job"],
        help: "Number of readers that wait for the next version at the mirror, or receive changes \
               or values.",
    },
    Family {
        name: RECEIVED,
        kind: "counter",
        labels: &["job"],
        help: "Bytes of changes and full copies that the mirror has received.",
    },
    Family {
        name: SENT,
        kind: "counter",
        labels: &["job", "kind"],
        help: "Bytes that the mirror has sent to readers: changes, and values of full copies \
               (copies).",
    },
    Family {
        name: VERSION,
        kind: "gauge",
        labels: &["job"],
        help: "Newest version of the job that readers get from the mirror.",
    },
];

/// Metrics of every process, which servers describe in the same words.
const OF_PROCESS: [Family; 2] = [
    Family {
        name: BUILD,
        kind: "gauge",
        labels: &["version", "role"],
        help: "1, with the version of the program and its role.",
    },
    Family {
        name: EXPIRY,
        kind: "gauge",
        labels: &[],
        help: "Time at which the certificate of this process expires, in seconds since 1970. Only \
               with TLS.",
    },
];

/// What the mirror counts.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    job: String,
    readers: AtomicU64,
    sent_changes: AtomicU64,
    sent_copies: AtomicU64,
    received: AtomicU64,
    copies: Mutex<BTreeMap<&'static str, u64>>,
    /// `None` until the coordinator has answered.
    lag: Mutex<Option<u64>>,
}

/// Counts a reader while its call lasts.
#[derive(Debug)]
pub(crate) struct Reader(Arc<Metrics>);

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Relaxed);
    }
}

impl Metrics {
    pub(crate) fn new(job: &str) -> Arc<Self> {
        Arc::new(Self { job: job.to_owned(), ..Self::default() })
    }

    /// Counts a reader.
    pub(crate) fn reader(self: &Arc<Self>) -> Reader {
        self.readers.fetch_add(1, Relaxed);
        Reader(self.clone())
    }

    /// Counts bytes of changes that were sent to a reader.
    pub(crate) fn sent_changes(&self, bytes: u64) {
        self.sent_changes.fetch_add(bytes, Relaxed);
    }

    /// Counts bytes of values that were sent to a reader.
    pub(crate) fn sent_copy(&self, bytes: u64) {
        self.sent_copies.fetch_add(bytes, Relaxed);
    }

    /// Counts a version.
    pub(crate) fn received(&self, version: &Mirrored) {
        self.received.fetch_add(version.bytes, Relaxed);
        if let Some(reason) = version.copied {
            let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
            *copies.entry(reason.name()).or_default() += 1;
        }
    }

    /// Shows how many versions of the job the mirror does not have.
    pub(crate) fn show_lag(&self, versions: u64) {
        *self.lag.lock().unwrap_or_else(PoisonError::into_inner) = Some(versions);
    }

    /// Returns all metrics. `version`: the one that readers get. `expiry`: the end of the
    /// certificate in seconds since 1970, with TLS.
    pub(crate) fn text(&self, version: Option<u64>, expiry: Option<i64>) -> String {
        let mut text = String::new();
        for family in FAMILIES.iter().chain(&OF_PROCESS) {
            let series = self.series(family.name, version, expiry);
            if series.is_empty() {
                continue;
            }
            let Family { name, kind, labels, help } = family;
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (values, number) in series {
                let pairs = labels.iter().zip(values).map(|(label, value)| {
                    let value = value.replace('\\', r"\\").replace('"', "\\\"");
                    format!("{label}=\"{}\"", value.replace('\n', "\\n"))
                });
                let pairs = pairs.collect::<Vec<_>>().join(",");
                let pairs = if labels.is_empty() { pairs } else { format!("{{{pairs}}}") };
                let _ = writeln!(text, "{name}{pairs} {number}");
            }
        }
        text
    }

    /// Returns the series of a family: the values of its labels, and the number.
    fn series(
        &self,
        name: &str,
        version: Option<u64>,
        expiry: Option<i64>,
    ) -> Vec<(Vec<&str>, i128)> {
        let job = self.job.as_str();
        let one = |number: Option<u64>| {
            number.into_iter().map(|number| (vec![job], number.into())).collect()
        };
        match name {
            VERSION => one(version),
            LAG => one(*self.lag.lock().unwrap_or_else(PoisonError::into_inner)),
            READERS => one(Some(self.readers.load(Relaxed))),
            RECEIVED => one(Some(self.received.load(Relaxed))),
            SENT => vec![
                (vec![job, "changes"], self.sent_changes.load(Relaxed).into()),
                (vec![job, "copies"], self.sent_copies.load(Relaxed).into()),
            ],
            COPIES => {
                let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
                copies.iter().map(|(&reason, &number)| (vec![job, reason], number.into())).collect()
            }
            BUILD => vec![(vec![env!("CARGO_PKG_VERSION"), "mirror"], 1)],
            EXPIRY => expiry.into_iter().map(|time| (Vec::new(), time.into())).collect(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use zeroshard_client::Copied;
    use zeroshard_model::LineVersion;

    use super::*;

    const BEGIN: &str =
        "<!-- The table is written by a test: see client/mirror/src/metrics.rs. -->\n\n";

    #[test]
    fn the_table_of_the_documentation_lists_all_metrics_of_mirrors() {
        let mut expected =
            "| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n".to_owned();
        for Family { name, kind, labels, help } in &FAMILIES {
            let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
            let unit = if name.ends_with("_bytes_total") { "bytes" } else { "" };
            let labels = labels.join(", ");
            writeln!(expected, "| `{name}` | {kind} | {labels} | {unit} | {help} |").unwrap();
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/metrics.md");
        let text = std::fs::read_to_string(&path).unwrap();
        let (before, found) = text.split_once(BEGIN).expect("the line before the table");
        if std::env::var_os("ZEROSHARD_WRITE_TABLE").is_some() {
            std::fs::write(&path, [before, BEGIN, &expected].concat()).unwrap();
        } else {
            assert_eq!(found, expected, "set ZEROSHARD_WRITE_TABLE=1 to write the table");
        }
    }

    #[test]
    fn series_have_the_labels_of_their_family_and_escaped_values() {
        let metrics = Metrics::new("a\"\\\n");
        let version = LineVersion { version: 4, line: 0 };
        metrics.received(&Mirrored { version, bytes: 70, copied: Some(Copied::Joined) });
        metrics.received(&Mirrored { version, bytes: 5, copied: None });
        metrics.sent_changes(3);
        metrics.show_lag(2);
        let reader = metrics.reader();
        for family in &FAMILIES {
            for (values, _) in metrics.series(family.name, Some(4), None) {
                assert_eq!(values.len(), family.labels.len(), "{}", family.name);
            }
        }
        let text = metrics.text(Some(4), Some(1_900_000_000));
        for line in [
            "zeroshard_mirror_version{job=\"a\\\"\\\\\\n\"} 4",
            "zeroshard_mirror_lag_versions{job=\"a\\\"\\\\\\n\"} 2",
            "zeroshard_mirror_readers{job=\"a\\\"\\\\\\n\"} 1",
            "zeroshard_mirror_received_bytes_total{job=\"a\\\"\\\\\\n\"} 75",
            "zeroshard_mirror_sent_bytes_total{job=\"a\\\"\\\\\\n\",kind=\"changes\"} 3",
            "zeroshard_mirror_copies_total{job=\"a\\\"\\\\\\n\",reason=\"joined\"} 1",
            "zeroshard_certificate_expiry_timestamp_seconds 1900000000",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        drop(reader);
        assert!(
            metrics.text(None, None).contains("zeroshard_mirror_readers{job=\"a\\\"\\\\\\n\"} 0")
        );
        assert!(!metrics.text(None, None).contains("zeroshard_mirror_version"));
    }
}
