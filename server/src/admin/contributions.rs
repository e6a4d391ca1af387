//! The gradients of the last step on the page of a shard server: who sent what, how large, when.

use super::{
    cluster::left_out,
    html::{Text, count, duration, number},
    table::Table,
};
use crate::shard::overview::{JobOverview, LastStep, RankContribution};

/// The maximum number of jobs in the table.
const MAX_JOBS: usize = 12;

/// The gradients of the last step of each job.
const CONTRIBUTIONS: Table = Table {
    name: "contributions",
    columns: &[
        ("Job", "key name"),
        ("Step", "number"),
        ("Rank", "number"),
        ("Norm", "number"),
        ("Arrived", "number"),
        ("Largest tensor", "key name"),
        ("Its norm", "number"),
    ],
};

/// Draws the gradients of each job whose last step is recorded.
pub(super) fn section(html: &mut String, jobs: &[JobOverview]) {
    let recorded = jobs.iter().filter_map(|job| Some((job, job.last_step.as_ref()?)));
    let recorded: Vec<_> = recorded.collect();
    if recorded.is_empty() {
        return;
    }
    html.push_str(
        "<section aria-labelledby=contributions><h2 id=contributions>Gradients of the last \
         step</h2>",
    );
    CONTRIBUTIONS.begin(html);
    let shown = recorded.iter().take(MAX_JOBS);
    for (job, step) in shown.clone() {
        step.ranks.iter().for_each(|rank| row(html, (&job.name, step.step), rank));
    }
    CONTRIBUTIONS.end(html);
    let ranks = shown.map(|(_, LastStep { ranks, all_ranks, .. })| [ranks.len(), *all_ranks]);
    let [shown, all] = ranks.fold([0; 2], |[a, b], [c, d]| [a + c, b + d]);
    left_out(html, shown, all, "rank");
    left_out(html, recorded.len().min(MAX_JOBS), recorded.len(), "job");
    html.push_str(
        "<p class=note>As each rank has sent them to this server, the ranks of a job with the \
         largest gradients first. Arrived: the last gradient of the rank, after the first one of \
         all ranks. <code>zsctl steps</code> adds up all servers, and shows earlier steps.</p>\
         </section>",
    );
}

fn row(html: &mut String, (job, step): (&str, u64), of: &RankContribution) {
    let arrived = of.arrived.map(|after| format!("+{}", duration(after))).unwrap_or_default();
    let (tensor, norm) = &of.largest;
    CONTRIBUTIONS.row(
        html,
        &[
            &Text(job),
            &count(step),
            &of.rank,
            &number(of.norm),
            &arrived,
            &Text(tensor),
            &number(*norm),
        ],
    );
}
