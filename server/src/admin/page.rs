//! The frame of the status page, and its section about the gRPC requests of the process.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use prometheus::proto::MetricType;
use zeroshard_coordinator::operators::overview::View;

use super::{
    Admin, cluster,
    html::{Text, age, count, duration},
    server,
    table::Table,
};
use crate::metrics::Metrics;

/// Renders the page from the current state. `view` selects a part of the cluster.
pub(super) fn render(admin: &Admin, view: &View) -> String {
    let role = admin.role;
    let overviews = (admin.sources.cluster.read(view), admin.sources.shard.read(&()));
    let mut sections = String::new();
    match &overviews.0 {
        Some(cluster) => sections.push_str(&cluster::sections(cluster, SystemTime::now())),
        None if role != "shard" => sections.push_str(
            "<p class=notice>This coordinator is a standby. The status page of the leader shows \
             the cluster.</p>",
        ),
        None => {}
    }
    if let Some(shard) = &overviews.1 {
        sections.push_str(&server::sections(shard));
    }
    requests(&mut sections, &admin.metrics);
    let (class, ready) = match admin.health.ready() {
        true => ("good", "ready"),
        false => ("warn", "not ready"),
    };
    format!(
        "<!doctype html><html lang=en><head><meta charset=utf-8>\
         <meta name=viewport content='width=device-width, initial-scale=1'>\
         <meta name=color-scheme content='light dark'>\
         <title>{role} {address} · ZeroShard</title>\
         <link rel=icon href='data:,'><link rel=stylesheet href=status.css>\
         <noscript><meta http-equiv=refresh content=5></noscript>\
         <script src=status.js defer></script></head><body>\
         <p id=stale role=status hidden></p>\
         <main><header><h1>ZeroShard <span>{role}</span></h1>\
         <p><span class='state {class}'>{ready}</span> {address} <span>version {version}</span> \
         <span>up {uptime}</span> <a href=metrics>metrics</a></p></header>{sections}</main>\
         </body></html>\n",
        address = admin.address,
        version = env!("CARGO_PKG_VERSION"),
        uptime = age(admin.started.elapsed()),
    )
}

/// The counts of the requests of a method.
#[derive(Debug, Default)]
struct Method {
    ok: u64,
    failed: u64,
    open: i64,
    seconds: f64,
    measured: u64,
}

const REQUESTS: Table = Table {
    name: "requests",
    columns: &[
        ("Method", "key"),
        ("Open", "number"),
        ("Answered", "number"),
        ("Failed", "number"),
        ("Mean time", "number"),
    ],
};

fn requests(html: &mut String, metrics: &Metrics) {
    let methods = methods(metrics);
    html.push_str(
        "<section aria-labelledby=requests><h2 id=requests>Requests to this process</h2>",
    );
    if methods.is_empty() {
        html.push_str("<p class=empty>No requests have arrived.</p></section>");
        return;
    }
    REQUESTS.begin(html);
    for (method, Method { ok, failed, open, seconds, measured }) in methods {
        let mean = Duration::try_from_secs_f64(seconds / measured as f64).ok();
        let mean = mean.filter(|_| measured > 0).map(duration).unwrap_or_default();
        let name = Text(method.trim_start_matches('/').trim_start_matches("zeroshard.v1."));
        REQUESTS.row(html, &[&name, &open, &count(ok), &count(failed), &mean]);
    }
    REQUESTS.end(html);
    html.push_str("</section>");
}

/// The requests by method. The number of methods is limited.
fn methods(metrics: &Metrics) -> BTreeMap<String, Method> {
    let mut methods = BTreeMap::<String, Method>::new();
    let of_requests = |name: &str| {
        ["requests_total", "requests_in_flight", "request_seconds"]
            .iter()
            .any(|of| name.strip_prefix("zeroshard_") == Some(of))
    };
    for family in metrics.gather().iter().filter(|family| of_requests(family.name())) {
        for metric in family.get_metric() {
            let label = |name: &str| {
                let label = metric.get_label().iter().find(|label| label.name() == name);
                label.map_or("", |label| label.value()).to_owned()
            };
            let method = methods.entry(label("method")).or_default();
            match family.get_field_type() {
                MetricType::COUNTER => {
                    let requests = metric.get_counter().get_value() as u64;
                    match label("code").as_str() {
                        "Ok" => method.ok += requests,
                        _ => method.failed += requests,
                    }
                }
                MetricType::GAUGE => method.open += metric.get_gauge().get_value() as i64,
                MetricType::HISTOGRAM => {
                    let times = metric.get_histogram();
                    method.seconds += times.get_sample_sum();
                    method.measured += times.get_sample_count();
                }
                _ => {}
            }
        }
    }
    methods
}
