//! `zsctl steps` shows which rank sent how large a gradient.

use std::{collections::BTreeMap, time::Duration};

use serde_json::json;
use zeroshard_client::{Cluster, Contribution, Result, StepContributions};

use crate::table::{ago, table};

/// The number of contributions that are printed without `--all`.
const SHOWN: usize = 10;

/// Flags of `zsctl steps`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// The step [default: the last one]. Servers keep only the last steps
    #[arg(long)]
    step: Option<u64>,
    /// Print all contributions, not only the ten largest
    #[arg(long)]
    all: bool,
}

/// One rank's contributions to all tensors.
struct OfRank<'a> {
    squares: f64,
    hash: u64,
    largest: &'a Contribution,
}

/// Prints the contributions to a step.
///
/// # Errors
/// Those of [`Cluster::contributions`].
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<()> {
    let Arguments { job, step, all } = arguments;
    let found = cluster.contributions(job, *step).await?;
    if json {
        for Contribution { tensor, rank, norm, hash } in &found.contributions {
            let arrived = found.arrived.get(rank).map(Duration::as_secs_f64);
            let line = json!({
                "event": "contribution", "job": job, "step": found.step, "tensor": tensor,
                "rank": rank, "norm": norm, "hash": format!("{hash:016x}"),
                "arrived_seconds": arrived,
            });
            say!("{line}");
        }
        return Ok(());
    }
    say!("step {} of job {job:?}: gradients as the ranks sent them\n", found.step);
    if found.contributions.is_empty() {
        say!("no rank had a gradient");
        return Ok(());
    }
    say!("{}\n", by_rank(&found));
    say!("{}", by_tensor(&found.contributions, *all));
    Ok(())
}

/// Returns a table with a row for each rank.
fn by_rank(found: &StepContributions) -> comfy_table::Table {
    let mut ranks = BTreeMap::<u32, OfRank<'_>>::new();
    for one in &found.contributions {
        let of = OfRank { squares: 0.0, hash: 0, largest: one };
        let of = ranks.entry(one.rank).or_insert(of);
        of.squares += one.norm * one.norm;
        of.hash = of.hash.wrapping_add(one.hash);
        if one.norm.total_cmp(&of.largest.norm).is_gt() {
            of.largest = one;
        }
    }
    let mut rows = table(&["RANK", "NORM", "HASH", "ARRIVED AFTER", "LARGEST TENSOR"]);
    for (rank, OfRank { squares, hash, largest }) in ranks {
        rows.add_row(vec![
            rank.to_string(),
            number(squares.sqrt()),
            format!("{hash:016x}"),
            found.arrived.get(&rank).map_or(String::new(), |&since| ago(since)),
            format!("{} ({})", largest.tensor, number(largest.norm)),
        ]);
    }
    rows
}

/// Returns a table of the largest contributions, or of `all` contributions in manifest order.
fn by_tensor(contributions: &[Contribution], all: bool) -> comfy_table::Table {
    let mut shown: Vec<&Contribution> = contributions.iter().collect();
    if !all {
        shown.sort_by(|a, b| b.norm.total_cmp(&a.norm));
        shown.truncate(SHOWN);
    }
    let mut rows = table(&["TENSOR", "RANK", "NORM", "HASH"]);
    for Contribution { tensor, rank, norm, hash } in shown {
        rows.add_row(vec![tensor.clone(), rank.to_string(), number(*norm), format!("{hash:016x}")]);
    }
    rows
}

/// Formats a norm with four digits.
fn number(norm: f64) -> String {
    match norm {
        norm if norm != 0.0 && !(1e-3..1e5).contains(&norm) => format!("{norm:.3e}"),
        norm => format!("{norm:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(tensor: &str, rank: u32, norm: f64) -> Contribution {
        Contribution { tensor: tensor.to_owned(), rank, norm, hash: 1 }
    }

    #[test]
    fn tables_show_ranks_and_the_largest_contributions() {
        let mut contributions: Vec<_> = (0..12).map(|i| one("w", 0, f64::from(i))).collect();
        contributions.push(one("huge", 3, 12_345_678.0));
        let text = by_tensor(&contributions, false).to_string();
        let first = text.lines().nth(1).unwrap();
        assert!(first.contains("huge") && first.contains("1.235e7"), "{text}");
        assert_eq!(text.lines().count(), 1 + SHOWN);
        assert_eq!(by_tensor(&contributions, true).to_string().lines().count(), 14);
        let arrived = BTreeMap::from([(3, Duration::from_millis(20))]);
        let found = StepContributions { step: 1, contributions, arrived };
        let text = by_rank(&found).to_string();
        assert!(text.contains("huge (1.235e7)") && text.contains("20 ms"), "{text}");
    }
}
