//! Counts of the outcomes of calls, by RPC.

use std::collections::BTreeMap;

use crate::{judge::Verdict, schema::Rpc};

/// The RPCs that need the role `admin`.
const FOR_OPERATORS: [&str; 3] = ["/CordonServer", "/DrainServer", "/EvictRank"];

/// The counts of one RPC.
#[derive(Debug, Default, Clone)]
struct Count {
    calls: u64,
    answered: u64,
    refused: u64,
    ended: u64,
    /// The numbers of errors, by name.
    errors: BTreeMap<String, u64>,
}

/// The counts of all RPCs.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<String, Count>);

impl Counts {
    pub(crate) fn new(calls: &[Rpc]) -> Self {
        Self(calls.iter().map(|rpc| (rpc.path.clone(), Count::default())).collect())
    }

    pub(crate) fn add(&mut self, path: &str, verdict: &Verdict) {
        let count = self.0.entry(path.to_owned()).or_default();
        count.calls += 1;
        match verdict {
            Verdict::Answered => count.answered += 1,
            Verdict::Refused(error) => {
                count.refused += 1;
                let name = format!("{error:?}");
                let name = name.split([' ', '{', '(']).next().unwrap_or_default().to_owned();
                *count.errors.entry(name).or_default() += 1;
            }
            Verdict::Ended | Verdict::Fault(_) => count.ended += 1,
        }
    }

    pub(crate) fn print(&self) {
        eprintln!("{:>9} {:>9} {:>9} {:>9}  call", "calls", "answered", "refused", "ended");
        for (path, Count { calls, answered, refused, ended, errors }) in &self.0 {
            eprintln!("{calls:9} {answered:9} {refused:9} {ended:9}  {path}");
            let errors: Vec<String> =
                errors.iter().map(|(name, number)| format!("{name} {number}")).collect();
            if !errors.is_empty() {
                eprintln!("{:41}{}", "", errors.join(", "));
            }
        }
        let total: u64 = self.0.values().map(|count| count.calls).sum();
        eprintln!("{total:9} calls in all");
    }

    /// Asserts that every RPC was called, and that some of its calls were accepted, which shows
    /// that the input passes the first checks. RPCs for operators are exempt: no caller has the
    /// role `admin`, because an operator could disturb the bystander. A rewind passes them when
    /// it looks for its checkpoint; random numbers almost never name one that exists.
    pub(crate) fn check(&self) {
        for (path, count) in &self.0 {
            assert!(count.calls > 0, "{path} was not called");
            let is_for_operators = FOR_OPERATORS.iter().any(|rpc| path.ends_with(rpc));
            let has_looked =
                path.ends_with("/RewindJob") && count.errors.contains_key("NoCheckpoint");
            let is_accepted = count.answered > 0 || has_looked;
            assert!(is_accepted || is_for_operators, "{path} has accepted no call");
        }
    }
}
