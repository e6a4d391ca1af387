//! The status page of a coordinator: the cluster and its servers. `jobs` draws the jobs, and
//! `events` the events.

use std::{fmt::Write as _, time::SystemTime};

use zeroshard_coordinator::operators::{
    advice::Advice,
    overview::{Overview, ServerOverview},
};
use zeroshard_proto::pb;

use super::{
    charts::{bar, legend},
    events,
    html::{Text, bytes, count, counted, percent},
    jobs,
    table::Table,
};
use crate::coordinator::responses::Message;

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
    events::section(&mut html, overview, now);
    html
}

fn summary(html: &mut String, overview: &Overview) {
    let &Overview { connected, missing, all_jobs, failed_jobs, workers, .. } = overview;
    let memory = match overview.memory {
        (used, Some(capacity)) if connected > 0 => {
            format!("{} <small>of {}</small>", bytes(used), bytes(capacity))
        }
        (used, _) => bytes(used),
    };
    let servers = match missing {
        0 => count(connected as u64),
        missing => format!("{connected} <small>of {}</small>", connected + missing),
    };
    let jobs = match failed_jobs {
        0 => count(all_jobs as u64),
        failed => {
            format!("{} <small>{} failed</small>", count(all_jobs as u64), count(failed as u64))
        }
    };
    let tiles = [
        ("Jobs", jobs, failed_jobs > 0),
        ("Workers", count(workers as u64), false),
        ("Servers", servers, missing > 0 || connected == 0),
        ("Memory of jobs", memory, false),
    ];
    html.push_str("<dl class=tiles>");
    for (name, value, is_bad) in tiles {
        let class = if is_bad { " class=alarm" } else { "" };
        let _ = write!(html, "<div{class}><dt>{name}</dt><dd>{value}</dd></div>");
    }
    html.push_str("</dl>");
    if overview.is_learning {
        html.push_str(
            "<p class=notice>This coordinator has just started. Servers may still describe jobs of \
             an earlier one.</p>",
        );
    }
    if let Some(advice) = &overview.advice {
        let what = match (missing, connected) {
            (1, _) => "A shard server is missing.".to_owned(),
            (2.., _) => format!("{} are missing.", counted(missing, "shard server")),
            (0, 0) => "No shard server is connected.".to_owned(),
            (0, _) => String::new(),
        };
        remedy(html, &what, advice);
    }
}

/// Draws what an operator should do, with the command for it.
pub(super) fn remedy(html: &mut String, problem: &str, Advice { text, command }: &Advice) {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    let text = format!("{first}{}", letters.as_str());
    let _ = write!(html, "<p class=remedy>{problem} ");
    for (at, part) in text.split('`').enumerate() {
        // Every other part is a command between backticks.
        let tags = if at % 2 == 1 { ["<code>", "</code>"] } else { [""; 2] };
        let _ = write!(html, "{}{}{}", tags[0], Text(part), tags[1]);
    }
    html.push_str(if command.is_some() { ":" } else { "." });
    if let Some(command) = command {
        let _ = write!(html, " <code>{}</code>", Text(command));
    }
    html.push_str("</p>");
}

/// The table of servers.
const SERVERS: Table = Table {
    name: "servers",
    columns: &[
        ("Address", "key"),
        ("Zone", ""),
        ("Jobs", "number"),
        ("Slices", "number"),
        ("Memory", "wide"),
        ("In use", "number"),
        ("Reserved", "number"),
        ("Capacity", "number"),
        ("State", "reason"),
    ],
};

fn servers(html: &mut String, overview: &Overview) {
    let shown = &overview.servers;
    html.push_str("<section aria-labelledby=servers><h2 id=servers>Servers</h2>");
    if shown.is_empty() {
        html.push_str("<p class=empty>No shard server is connected.</p></section>");
        return;
    }
    SERVERS.begin(html);
    shown.iter().for_each(|server| row(html, server));
    SERVERS.end(html);
    html.push_str(&legend(KINDS));
    html.push_str(
        "<p class=note>In use: memory that the server has allocated; the bar shows its share of \
         the capacity for slices. Reserved: memory that the jobs of the server need.</p>",
    );
    left_out(html, shown.len(), overview.connected + overview.missing, "server");
    html.push_str("</section>");
}

fn row(html: &mut String, server: &ServerOverview) {
    let given = if server.name.is_empty() { String::new() } else { format!("{} ", server.name) };
    let name = format!(
        "<span title='id {:016x}'>{}{}</span>",
        server.id,
        Text(&given),
        Text(&server.address)
    );
    let (zone, state) = (Text(&server.zone), state(server));
    if server.lost.is_some() {
        let reserved = if server.assigned > 0 { bytes(server.assigned) } else { String::new() };
        SERVERS.row(html, &[&name, &zone, &"", &"", &"", &"", &reserved, &"", &state]);
        return;
    }
    let stats = server.stats.clone().unwrap_or_default().message();
    let slices = stats.jobs.iter().map(|job| u64::from(job.slices)).sum();
    let parts = kinds(&stats);
    let used = parts.iter().map(|(_, _, size)| size).sum::<f64>();
    let (capacity, percent) = match server.capacity {
        Some(room) => (bytes(room.bytes), percent(server.assigned, room.bytes)),
        None => ("no limit".to_owned(), String::new()),
    };
    let bar = bar(&parts, server.capacity.map_or(used, |room| room.bytes as f64));
    let reserved = format!("{} <small>{percent}</small>", bytes(server.assigned));
    let (jobs, slices, used) = (stats.jobs.len(), count(slices), bytes(used as u64));
    SERVERS.row(html, &[&name, &zone, &jobs, &slices, &bar, &used, &reserved, &capacity, &state]);
}

fn state(server: &ServerOverview) -> String {
    let waits = match server.awaited_by {
        0 => String::new(),
        1 => ": 1 job waits for it".to_owned(),
        jobs => format!(": {jobs} jobs wait for it"),
    };
    match (&server.lost, server.cordoned) {
        (Some(cause), _) => {
            format!("<span class='state bad'>lost</span> <span>({}){waits}</span>", Text(cause))
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

/// States the number of entries that a list does not show.
pub(super) fn left_out(html: &mut String, shown: usize, all: usize, thing: &str) {
    if let Some(left @ 1..) = all.checked_sub(shown) {
        let _ = write!(html, "<p class=note>Not shown: {}.</p>", counted(left, thing));
    }
}
