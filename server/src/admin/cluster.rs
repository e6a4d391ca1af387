//! The status page of a coordinator: the cluster and its servers. `jobs` draws the jobs.

use std::{fmt::Write as _, time::SystemTime};

use zeroshard_proto::pb;

use super::{
    charts::{bar, legend},
    html::{Text, age, bytes, count, counted, percent},
    jobs,
};
use crate::coordinator::{
    history::{Happened, Severity},
    overview::{Overview, ServerOverview},
};

/// The kinds of memory of a server, with the numbers of their colours.
const KINDS: [(u8, &str); 5] = [
    (1, "master weights"),
    (2, "optimizer state"),
    (3, "gradients"),
    (4, "parameters"),
    (5, "early gradients"),
];

/// The sections of the page of a coordinator.
pub(super) fn sections(overview: &Overview, now: SystemTime) -> String {
    let mut html = String::new();
    summary(&mut html, overview);
    jobs::table(&mut html, overview);
    for job in &overview.jobs {
        if let Some(details) = &job.details {
            jobs::card(&mut html, job, details);
        }
    }
    servers(&mut html, overview);
    events(&mut html, &overview.events, now);
    html
}

fn summary(html: &mut String, overview: &Overview) {
    let &Overview { connected, missing, all_jobs, workers, memory: (used, capacity), .. } =
        overview;
    let memory = match capacity {
        Some(capacity) if connected > 0 => {
            format!("{} <small>of {}</small>", bytes(used), bytes(capacity))
        }
        _ => bytes(used),
    };
    let servers = match missing {
        0 => count(connected as u64),
        missing => format!("{connected} <small>of {}</small>", connected + missing),
    };
    let tiles = [
        ("Jobs", count(all_jobs as u64)),
        ("Workers", count(workers as u64)),
        ("Servers", servers),
        ("Memory of jobs", memory),
    ];
    html.push_str("<dl class=tiles>");
    for (name, value) in tiles {
        let _ = write!(html, "<div><dt>{name}</dt><dd>{value}</dd></div>");
    }
    html.push_str("</dl>");
    if overview.is_learning {
        html.push_str(
            "<p class=notice>This coordinator has just started. Servers may still describe jobs of \
             an earlier one.</p>",
        );
    }
}

fn servers(html: &mut String, overview: &Overview) {
    let shown = &overview.servers;
    html.push_str("<section aria-labelledby=servers><h2 id=servers>Servers</h2>");
    if shown.is_empty() {
        html.push_str("<p class=empty>No shard server is connected.</p></section>");
        return;
    }
    html.push_str(
        "<div class=scroll id=scroll-servers tabindex=0 role=region aria-labelledby=servers>\
         <table><thead><tr><th>Address<th>Zone<th class=number>Jobs<th class=number>Slices\
         <th class=wide>Memory<th class=number>In use<th class=number>Reserved<th class=number>Capacity<th>State\
         </thead><tbody>",
    );
    shown.iter().for_each(|server| row(html, server));
    html.push_str("</tbody></table></div>");
    html.push_str(&legend(KINDS));
    html.push_str(
        "<p class=note>In use: memory that the server has allocated; the bar shows its share of \
         the capacity for slices. Reserved: memory that the jobs of the server need.</p>",
    );
    left_out(html, shown.len(), overview.connected + overview.missing, "server");
    html.push_str("</section>");
}

fn row(html: &mut String, server: &ServerOverview) {
    let empty = pb::Stats::default();
    let stats = server.stats.as_ref().unwrap_or(&empty);
    let slices = stats.jobs.iter().map(|job| u64::from(job.slices)).sum();
    let parts = kinds(stats);
    let used = parts.iter().map(|(_, _, size)| size).sum::<f64>();
    let (capacity, percent) = match server.capacity {
        Some(room) => (bytes(room.bytes), percent(server.assigned, room.bytes)),
        None => ("no limit".to_owned(), String::new()),
    };
    let state = state(server);
    let _ = write!(
        html,
        "<tr><td title='id {:016x}'>{}<td>{}<td class=number>{}<td class=number>{}<td>{}<td class=number>{}\
         <td class=number>{} <small>{percent}</small><td class=number>{capacity}<td>{state}",
        server.id,
        Text(&server.address),
        Text(if server.zone.is_empty() { "–" } else { &server.zone }),
        stats.jobs.len(),
        count(slices),
        bar(&parts, server.capacity.map_or(used, |room| room.bytes as f64)),
        bytes(used as u64),
        bytes(server.assigned),
    );
}

fn state(server: &ServerOverview) -> String {
    let waits = match server.awaited_by {
        0 => String::new(),
        1 => ": 1 job waits for it".to_owned(),
        jobs => format!(": {jobs} jobs wait for it"),
    };
    match (&server.lost, server.cordoned) {
        (Some(cause), _) => {
            format!("<span class='state bad'>lost</span> ({}){waits}", Text(cause))
        }
        (None, true) => "<span class='state warn'>cordoned</span>".to_owned(),
        (None, false) => "<span class='state good'>connected</span>".to_owned(),
    }
}

/// The parts of a server's memory, by kind.
pub(super) fn kinds(stats: &pb::Stats) -> Vec<(u8, String, f64)> {
    let sizes = [
        stats.master_bytes,
        stats.state_bytes,
        stats.accumulator_bytes,
        stats.published_bytes,
        stats.parked_bytes,
    ];
    let part = |((colour, kind), size): ((u8, &str), u64)| {
        (colour, format!("{kind}: {}", bytes(size)), size as f64)
    };
    KINDS.into_iter().zip(sizes).map(part).collect()
}

/// The legend for [`kinds`].
pub(super) fn legend_of_kinds() -> String {
    legend(KINDS)
}

fn events(html: &mut String, events: &[Happened], now: SystemTime) {
    html.push_str("<section aria-labelledby=events><h2 id=events>Events</h2>");
    if events.is_empty() {
        html.push_str("<p class=empty>No event has occurred since this coordinator started.</p>");
    } else {
        html.push_str("<ol class=events id=scroll-events tabindex=0 aria-labelledby=events>");
        for Happened { at, severity, text } in events {
            let ago = now.duration_since(*at).unwrap_or_default();
            let _ = write!(
                html,
                "<li><time>{} UTC <small>{}</small></time><span>{}{}</span></li>",
                clock(*at),
                age(ago),
                badge(*severity),
                Text(text)
            );
        }
        html.push_str("</ol>");
    }
    html.push_str("</section>");
}

fn badge(severity: Severity) -> String {
    let class = match severity {
        Severity::Info => return String::new(),
        Severity::Warning => "warn",
        Severity::Error => "bad",
    };
    format!("<span class='state {class}'>{}</span> ", severity.label())
}

/// The time of day in UTC, such as `13:05:59`.
fn clock(at: SystemTime) -> String {
    let seconds = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds % 3600 / 60, seconds % 60)
}

/// States the number of entries that a list does not show.
pub(super) fn left_out(html: &mut String, shown: usize, all: usize, thing: &str) {
    if let Some(left @ 1..) = all.checked_sub(shown) {
        let _ = write!(html, "<p class=note>Not shown: {}.</p>", counted(left, thing));
    }
}
