//! How the ranks of a job reach its servers: over shared memory, or with gRPC and why.

use zeroshard_client::{JobStatus, ServerStatus};

/// The transport of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Transport {
    /// The pairs of a rank and a server that share memory, and all pairs.
    pub(crate) shared: usize,
    pub(crate) pairs: usize,
    /// Servers that do not share memory with a rank that has asked for it, and why.
    pub(crate) reasons: Vec<(String, String)>,
}

impl Transport {
    pub(crate) fn of(job: &JobStatus, servers: &[ServerStatus]) -> Self {
        let mut transport = Self::default();
        for server in servers {
            let Some(held) = server.jobs.iter().find(|held| held.job == job.name) else { continue };
            transport.shared += held.windows as usize;
            transport.pairs += job.joined.len();
            let reason = held.no_window.clone().map(|why| (server.server.address.clone(), why));
            transport.reasons.extend(reason);
        }
        transport
    }

    /// A few words for a table.
    pub(crate) fn summary(&self) -> String {
        match self.shared {
            _ if self.pairs == 0 => "-".to_owned(),
            0 => "grpc".to_owned(),
            shared if shared >= self.pairs => "shm".to_owned(),
            shared => format!("shm {shared}/{}", self.pairs),
        }
    }

    /// A line about the servers that do not share memory, with the reason of one of them.
    pub(crate) fn note(&self, job: &str) -> Option<String> {
        let (server, why) = self.reasons.first()?;
        let others = match self.reasons.len() {
            1 => String::new(),
            all => format!(" and {} others", all - 1),
        };
        Some(format!("job {job:?} uses gRPC with server {server}{others}: no shared memory: {why}"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn many_servers_of_other_hosts_are_one_line() {
        let reasons = |count| (0..count).map(|i| (format!("host:{i}"), "elsewhere".to_owned()));
        let of = |count| Transport { shared: 1, pairs: 4, reasons: reasons(count).collect() };
        assert_eq!(of(0).note("a"), None);
        let one = "job \"a\" uses gRPC with server host:0: no shared memory: elsewhere";
        assert_eq!(of(1).note("a").as_deref(), Some(one));
        assert!(of(128).note("a").unwrap().contains("host:0 and 127 others: no shared memory"));
        assert_eq!(of(1).summary(), "shm 1/4");
    }
}
