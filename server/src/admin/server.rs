//! The status page of a shard server: its memory and its slices.

use std::fmt::Write as _;

use zeroshard_kernels::Usage;

use super::{
    charts::{Row, bar},
    cluster::{kinds, left_out, legend_of_kinds},
    contributions,
    html::{Text, bytes, count, duration, percent},
    jobs::map,
    table::Table,
};
use crate::shard::overview::{JobOverview, Limits, Overview};

/// The maximum number of jobs with a map of slices.
const MAX_MAPS: usize = 12;

/// The sections of the page of a shard server.
pub(super) fn sections(overview: &Overview) -> String {
    let mut html = String::new();
    memory(&mut html, overview);
    devices(&mut html, &overview.devices);
    jobs(&mut html, overview);
    contributions::section(&mut html, &overview.jobs);
    html
}

fn memory(html: &mut String, overview: &Overview) {
    let Overview { stats, limits, pinned, snapshots, tiers, .. } = overview;
    let &Limits { memory, .. } = limits;
    let parts = kinds(stats);
    let used = parts.iter().map(|(_, _, size)| size).sum::<f64>();
    html.push_str("<section aria-labelledby=memory><h2 id=memory>Memory of this server</h2>");
    let whole = if memory == u64::MAX { used } else { memory as f64 };
    let _ = write!(
        html,
        "<figure><figcaption><span>Slices and early gradients</span> <strong>{} {}</strong>\
         </figcaption>{}{}</figure>",
        bytes(used as u64),
        limit(memory),
        bar(&parts, whole),
        legend_of_kinds(),
    );
    let budgets = [
        ("early gradients", stats.parked_bytes, limits.parked),
        ("versions of readers", *pinned, limits.pinned),
        ("copies for saves", *snapshots, limits.snapshots),
    ];
    let tiers = tiers.iter().map(|&(tier, used, limit)| (tier, used, limit));
    html.push_str("<table class=bars><tbody>");
    for (name, used, limit) in budgets.into_iter().chain(tiers) {
        budget(html, name, used, limit);
    }
    html.push_str(
        "</tbody></table><p class=note>Budgets of the server, and the tiers that store the arrays \
         of slices.</p></section>",
    );
}

/// Draws a row with a bar that shows the used share of a budget.
fn budget(html: &mut String, name: &str, used: u64, limit: u64) {
    let (text, whole) = match limit {
        u64::MAX => (bytes(used), used),
        limit => {
            let share = percent(used, limit);
            (format!("{} of {} <small>{share}</small>", bytes(used), bytes(limit)), limit)
        }
    };
    let _ = write!(
        html,
        "<tr><th>{}<td>{}<td class=number>{text}",
        Text(name),
        bar(&[(1, bytes(used), used as f64)], whole as f64),
    );
}

fn limit(bytes: u64) -> String {
    match bytes {
        u64::MAX => String::new(),
        limit => format!("<small>of {}</small>", self::bytes(limit)),
    }
}

fn devices(html: &mut String, devices: &[(String, Option<Usage>)]) {
    let gpus: Vec<_> =
        devices.iter().filter_map(|(name, usage)| Some((name, usage.as_ref()?))).collect();
    if gpus.is_empty() {
        return;
    }
    html.push_str(
        "<section aria-labelledby=devices><h2 id=devices>Devices</h2><table class=bars><tbody>",
    );
    for (name, Usage { memory, uploaded, downloaded, kernels }) in gpus {
        match memory {
            Some((used, all)) => budget(html, name, *used, *all),
            None => {
                let _ = write!(html, "<tr><th>{}<td>lost<td>", Text(name));
            }
        }
        let _ = write!(
            html,
            "<tr><th><td colspan=2>{} copied to the device, {} copied from it, {} in kernels",
            bytes(*uploaded),
            bytes(*downloaded),
            duration(*kernels)
        );
    }
    html.push_str("</tbody></table></section>");
}

/// The table of jobs of which the server holds slices.
const HELD: Table = Table {
    name: "held",
    columns: &[
        ("Job", "key name"),
        ("Version", "number"),
        ("Epoch", "number"),
        ("Slices", "number"),
        ("Memory", "number"),
        ("Reduce", "number"),
        ("Decide", "number"),
        ("Apply", "number"),
        ("Waits for", "reason"),
    ],
};

fn jobs(html: &mut String, overview: &Overview) {
    html.push_str("<section aria-labelledby=held><h2 id=held>Slices of this server</h2>");
    if overview.jobs.is_empty() {
        html.push_str("<p class=empty>This server has no slices.</p></section>");
        return;
    }
    HELD.begin(html);
    overview.jobs.iter().for_each(|job| row(html, job));
    HELD.end(html);
    html.push_str(
        "<p class=note>Mean times of a step. Reduce: from the first \
         gradient to the last sum. Decide: from the report to the decision. Apply: the optimizer.\
         </p>",
    );
    left_out(html, overview.jobs.len(), overview.all_jobs, "job");
    let mapped = overview.jobs.iter().take(MAX_MAPS);
    let rows: Vec<(&str, Row<'_>)> = mapped.map(|job| (job.name.as_str(), slices(job))).collect();
    map(html, rows.iter().map(|(name, row)| (*name, row)));
    html.push_str("</section>");
}

fn slices(job: &JobOverview) -> Row<'_> {
    let mut row = Row::new(&job.sizes);
    job.held.iter().for_each(|&(slice, is_primary)| row.add(slice as usize, is_primary));
    row
}

fn row(html: &mut String, job: &JobOverview) {
    let (held, all) = (count(job.held.len() as u64), count(job.sizes.len() as u64));
    let slices = format!("{held} <small>of {all}</small>");
    let [reduce, decide, apply] = ["reduce", "decide", "apply"].map(|phase| {
        let time = job.phases.iter().find(|(name, _)| *name == phase);
        time.map(|(_, time)| duration(*time)).unwrap_or_default()
    });
    HELD.row(
        html,
        &[
            &Text(&job.name),
            &job.version.map(count).unwrap_or_default(),
            &count(job.epoch),
            &slices,
            &bytes(job.bytes),
            &reduce,
            &decide,
            &apply,
            &Text(job.waiting_for.as_deref().unwrap_or_default()),
        ],
    );
}
