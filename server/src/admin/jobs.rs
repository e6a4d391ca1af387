//! The jobs on the status page of a coordinator: a table of all jobs, and a card for each of the
//! first jobs.

use std::{fmt::Write as _, time::Duration};

use zeroshard_coordinator::{
    operators::{
        history::{History, Phases, Point},
        metrics_view::JobState,
        overview::{Details, JobOverview, Overview, View},
    },
    placement::plan::weights,
};
use zeroshard_model::{Placement, Server};

use super::{
    charts::{Curve, Row, bar, legend},
    cluster::{left_out, remedy},
    html::{Text, age, count, counted, duration, optional, short},
    table::Table,
    view::Link,
};

/// The maximum number of servers in the map of a job's slices.
const MAX_ROWS: usize = 16;
/// The time without a step after which the page shows the input that the job waits for.
const PATIENCE: Duration = Duration::from_secs(3);

/// The table of jobs.
const JOBS: Table = Table {
    name: "jobs",
    columns: &[
        ("Job", "key name"),
        ("State", ""),
        ("Version", "number"),
        ("Last step", "number"),
        ("Steps/s", "number"),
        ("Loss", "number"),
        ("Gradient norm", "number"),
        ("Workers", "number"),
        ("Latest rank", "number"),
        ("Checkpoint", "number"),
    ],
};

/// Draws the table of jobs.
pub(super) fn table(html: &mut String, overview: &Overview) {
    html.push_str("<section aria-labelledby=jobs><h2 id=jobs>Jobs</h2>");
    if overview.jobs.is_empty() {
        html.push_str("<p class=empty>There are no jobs.</p></section>");
        return;
    }
    JOBS.begin(html);
    overview.jobs.iter().for_each(|job| row(html, job, overview.view));
    JOBS.end(html);
    pages(html, overview);
    html.push_str("</section>");
}

/// Links to the other pages of jobs.
fn pages(html: &mut String, overview: &Overview) {
    let &Overview { pages, view, all_jobs, .. } = overview;
    if pages == 1 {
        return;
    }
    let _ = write!(
        html,
        "<nav class=filter aria-label='Pages of jobs'><span>Page {} of {}, {}</span>",
        view.page + 1,
        count(pages as u64),
        counted(all_jobs, "job")
    );
    let to = |page: usize| Link(View { page, ..view });
    if view.page > 0 {
        let _ = write!(html, "<a href='{}#jobs' id=previous-jobs>previous</a>", to(view.page - 1));
    }
    if view.page + 1 < pages {
        let _ = write!(html, "<a href='{}#jobs' id=next-jobs>next</a>", to(view.page + 1));
    }
    html.push_str("</nav>");
}

fn row(html: &mut String, job: &JobOverview, view: View) {
    let JobOverview { id, spec, metrics, rate, idle, loss, norm, .. } = job;
    // The card of a job that is not on this page is on a page of its own.
    let page = match job.details {
        Some(_) => String::new(),
        None => Link(View { job: Some(*id), ..view }).to_string(),
    };
    let name = format!("<a href='{page}#job-{id:016x}'>{}</a>", Text(&spec.name));
    let late = metrics.slowest.map_or(String::new(), |(rank, seconds)| {
        format!("{rank} <small>+{}</small>", duration(Duration::from_secs_f64(seconds)))
    });
    let workers = format!("{} / {}", metrics.workers, spec.world);
    JOBS.row(
        html,
        &[
            &name,
            &state(job),
            &metrics.version.map(count).unwrap_or_default(),
            &idle.map(age).unwrap_or_default(),
            &optional(*rate),
            &optional(*loss),
            &optional(*norm),
            &workers,
            &late,
            &checkpoint(job),
        ],
    );
}

fn checkpoint(job: &JobOverview) -> String {
    let mut text = job.saved.map_or("–".to_owned(), count);
    match job.saved_ago.map(age) {
        Some(ago) if ago == "now" => text.push_str(" <small>now</small>"),
        Some(ago) => {
            let _ = write!(text, " <small>{ago} ago</small>");
        }
        None => {}
    }
    if job.failed_saves > 0 {
        let failed = counted(job.failed_saves as usize, "save");
        let _ = write!(text, " <span class='state bad'>{failed} failed</span>");
    }
    if let Some(version) = job.saving {
        let _ = write!(text, " <small>saving {}</small>", count(version));
    }
    text
}

/// The state as a coloured label. The text alone also identifies the state.
fn state(job: &JobOverview) -> String {
    let state = job.metrics.state;
    let (class, text) = match state {
        JobState::Failed => ("bad", state.label()),
        JobState::Open if job.metrics.degraded > 0 => ("warn", "degraded"),
        JobState::Open if job.metrics.version.is_none() => ("warn", "initialising"),
        JobState::Open if job.metrics.workers == 0 => ("idle", "no workers"),
        JobState::Open => ("good", "training"),
        _ => ("warn", state.label()),
    };
    format!("<span class='state {class}'>{text}</span>")
}

/// Returns whether an operator has to do something, or the job waits for longer than a step.
fn needs_attention(job: &JobOverview) -> bool {
    let is_open = job.metrics.state == JobState::Open;
    !is_open || job.failed_saves > 0 || job.idle.is_none_or(|idle| idle > PATIENCE)
}

/// The card of a job: its figures, curves and slices.
pub(super) fn card(html: &mut String, job: &JobOverview, details: &Details) {
    let _ = write!(
        html,
        "<section class=card id='job-{0:016x}' aria-labelledby='name-{0:016x}'>\
         <h2 id='name-{0:016x}'>{1} {2}</h2>",
        job.id,
        Text(&job.spec.name),
        state(job)
    );
    if let Some(failure) = &job.failure {
        let _ = write!(html, "<p class=failure>{}</p>", Text(failure));
    }
    if let Some(advice) = job.advice.as_ref().filter(|_| needs_attention(job)) {
        remedy(html, "", advice);
    }
    facts(html, job, &details.history);
    waiting(html, job, details);
    if job.metrics.version.is_some() {
        curves(html, job, &details.history);
        html.push_str("<div class=columns>");
        phases(html, details.history.phases());
        late(html, &details.late);
        html.push_str("</div>");
    }
    if let Some(placement) = &details.placement {
        slices(html, placement, &weights(&job.spec));
    }
    html.push_str("</section>");
}

fn facts(html: &mut String, job: &JobOverview, history: &History) {
    let JobOverview { spec, metrics, resting, done, .. } = job;
    let manifest = &spec.manifest;
    let steps = format!(
        "{} applied, {} skipped, {} aborted",
        count(history.applied),
        count(history.skipped),
        count(history.aborted)
    );
    let mut facts = vec![
        ("Version", metrics.version.map_or("–".to_owned(), count)),
        ("Line", count(job.line)),
        ("Epoch", count(metrics.epoch)),
        ("Workers", format!("{} of {}", metrics.workers, spec.world)),
        ("Parameters", short(manifest.parameters())),
        ("Tensors", count(manifest.tensors().len() as u64)),
        ("Slices", count(manifest.number_of_slices() as u64)),
        ("Replicas", spec.replicas.to_string()),
        ("Steps since start", steps),
        ("Last checkpoint", checkpoint(job)),
    ];
    for (name, ranks) in [("Ranks resting", *resting), ("Ranks done", *done)] {
        if ranks > 0 {
            facts.push((name, count(ranks as u64)));
        }
    }
    html.push_str("<dl class=facts>");
    for (name, value) in facts {
        let _ = write!(html, "<div><dt>{name}</dt><dd>{value}</dd></div>");
    }
    html.push_str("</dl>");
}

/// The input that the job waits for, if any.
fn waiting(html: &mut String, job: &JobOverview, details: &Details) {
    let JobOverview { metrics, uninitialised, spec, .. } = job;
    let mut reasons = Vec::new();
    if metrics.degraded > 0 {
        reasons.push(format!("{} with too few replicas", counted(metrics.degraded, "slice")));
    }
    if *uninitialised > 0 {
        let servers = counted(*uninitialised, "server");
        reasons.push(format!("initial parameters are missing on {servers}"));
    }
    let has_all = metrics.workers + job.resting + job.done >= spec.world as usize;
    if metrics.state == JobState::Open && !has_all {
        let missing = (spec.world as usize).saturating_sub(metrics.workers + job.done);
        reasons.push(format!("{} without a worker", counted(missing, "rank")));
    }
    if job.idle.is_none_or(|idle| idle > PATIENCE)
        && let Some(waiting_for) = &details.waiting_for
    {
        reasons.push(Text(waiting_for).to_string());
    }
    if !reasons.is_empty() {
        let _ = write!(html, "<p class=notice>{}.</p>", reasons.join("; "));
    }
}

fn curves(html: &mut String, job: &JobOverview, history: &History) {
    let points = |of: fn(&Point) -> Option<f64>| {
        history.points().iter().map(|point| (point.version, of(point))).collect()
    };
    let curves = [
        Curve {
            title: "Loss",
            now: job.loss,
            points: points(Point::loss),
            from_zero: false,
            empty: "The workers report no loss.",
        },
        Curve {
            title: "Gradient norm",
            now: job.norm,
            points: points(Point::norm),
            from_zero: false,
            empty: "No step has been decided since this coordinator started.",
        },
        Curve {
            title: "Steps per second",
            now: job.rate,
            points: points(Point::rate),
            from_zero: true,
            empty: "Fewer than two steps have been decided since this coordinator started.",
        },
    ];
    html.push_str("<div class=curves>");
    curves.iter().for_each(|curve| html.push_str(&curve.figure()));
    html.push_str("</div>");
    if history.stride() > 1 {
        let _ =
            write!(html, "<p class=note>Each point is the mean of {} steps.</p>", history.stride());
    }
}

fn phases(html: &mut String, phases: Option<Phases>) {
    html.push_str("<figure><figcaption><span>Phases of a step</span>");
    let Some(Phases { work, ranks, servers }) = phases else {
        html.push_str(
            "</figcaption><p class=empty>No step has been measured since this coordinator \
             started.</p></figure>",
        );
        return;
    };
    let all = work + ranks + servers;
    let parts = [(1, "workers", work), (3, "late ranks", ranks), (2, "servers", servers)];
    let labelled = parts.map(|(colour, name, time)| (colour, name, duration(time), time));
    let sized = labelled
        .each_ref()
        .map(|(colour, name, text, time)| (*colour, format!("{name}: {text}"), time.as_secs_f64()));
    let labels = labelled
        .each_ref()
        .map(|(colour, name, text, _)| (*colour, format!("{name} <strong>{text}</strong>")));
    let _ = write!(
        html,
        " <strong>{}</strong></figcaption>{}{}<p class=note>Mean times of the last steps. Workers: \
         until the first rank commits. Late ranks: until the last rank commits. Servers: until the \
         step is decided.</p></figure>",
        duration(all),
        bar(&sized, all.as_secs_f64()),
        legend(labels.iter().map(|(colour, label)| (*colour, label.as_str()))),
    );
}

fn late(html: &mut String, late: &[(u32, f64)]) {
    html.push_str("<figure><figcaption><span>Late ranks</span></figcaption>");
    if late.is_empty() {
        html.push_str("<p class=empty>No rank waits for another.</p></figure>");
        return;
    }
    let longest = late.first().map_or(0.0, |(_, seconds)| *seconds);
    html.push_str("<table class=bars><tbody>");
    for (rank, seconds) in late {
        let text = duration(Duration::from_secs_f64(*seconds));
        let _ = write!(
            html,
            "<tr><th>rank {rank}<td>{}<td class=number>+{text}",
            bar(&[(3, format!("rank {rank}: {text}"), *seconds)], longest),
        );
    }
    html.push_str(
        "</tbody></table><p class=note>Delay after the first commit, on average over about the \
         last 10 steps.</p></figure>",
    );
}

/// The map of slices by server. `sizes` are those of all slices in bytes.
fn slices(html: &mut String, placement: &Placement, sizes: &[u64]) {
    let shown = &placement.servers()[..placement.servers().len().min(MAX_ROWS)];
    let mut rows: Vec<Row<'_>> = shown.iter().map(|_| Row::new(sizes)).collect();
    for slice in 0..placement.slices() {
        for (at, &owner) in placement.owners(slice).iter().enumerate() {
            if let Some(row) = rows.get_mut(owner as usize) {
                row.add(slice, at == 0);
            }
        }
    }
    html.push_str("<figure><figcaption><span>Bytes of slices by server</span></figcaption>");
    map(html, shown.iter().map(|Server { address, .. }| address.as_str()).zip(&rows));
    left_out(html, shown.len(), placement.servers().len(), "server");
    html.push_str("</figure>");
}

/// Draws a map of slices from rows with names.
pub(super) fn map<'a>(html: &mut String, rows: impl Iterator<Item = (&'a str, &'a Row<'a>)>) {
    html.push_str("<table class=bars><tbody>");
    for (name, row) in rows {
        let (name, svg, text) = (Text(name), row.svg(), row.text());
        let _ = write!(html, "<tr><th>{name}<td>{svg}<td class=number>{text}");
    }
    html.push_str("</tbody></table>");
    html.push_str(&legend([(6, "primary"), (7, "backup")]));
}
