//! Servers that connect, describe their jobs, and are lost.

use std::collections::BTreeSet;

use zeroshard_model::{Error, Server};

use crate::{
    cluster::{context::Context, jobs::Jobs, servers::Missing, startup::unknown_yet},
    job::Job,
    operators::history::Severity,
    vocabulary::{
        commands::{About, Command},
        events::Action,
        ids::{JobRef, Link, ServerId},
        job_report::JobReport,
    },
};

/// Registers a server. A known server with the same id or address is removed first, because it has
/// restarted or connected again.
pub(crate) fn joined(
    jobs: &mut Jobs,
    stream: u64,
    server: Server,
    about: About,
    is_new: bool,
    cx: &mut Context<'_>,
) {
    cx.common.startup.registered(is_new);
    for (link, cause) in cx.common.servers.replaced_by(&server) {
        lost(jobs, link, cause, cx);
    }
    cx.common.servers.join(stream, server, about, cx.out);
    jobs.visit_all(cx.common.index.waiting(), cx, Job::try_place);
}

/// A server has described the jobs that it holds. It has followed another coordinator before if it
/// `is_new` here; a job that this coordinator has dropped is closed.
pub(crate) fn described(
    jobs: &mut Jobs,
    server: ServerId,
    reports: Vec<JobReport>,
    is_new: bool,
    cx: &mut Context<'_>,
) {
    let ids: BTreeSet<u64> = reports.iter().map(|report| report.id).collect();
    for report in reports {
        let job = JobRef { name: report.spec.name.clone(), id: report.id };
        if is_new {
            make_way_for(jobs, &report, server, cx);
        }
        match jobs.all().get(&job.name) {
            None if is_new => {
                let job = Job::recovering(server, report, cx.now);
                cx.out.extend(job.next_deadline(cx.common).map(Action::Tick));
                jobs.insert(job, cx.common);
            }
            Some(found) if found.id == job.id => {
                jobs.visit(&job.name, cx, |found, cx| found.described(server, report, cx));
            }
            _ => cx.command(server, Command::Close(job)),
        }
    }
    let Some(known) = cx.common.servers.get(server) else { return };
    let (incarnation, address) = (known.incarnation, known.address.clone());
    let process = Server { id: server, incarnation, address };
    jobs.visit_all(cx.common.index.users_of(&process), cx, |job, cx| {
        let holds = ids.contains(&job.id);
        job.abandoned_by(&process, holds, cx);
    });
    jobs.visit_all(cx.common.index.recovering(), cx, Job::try_recover);
    // After the server was told to close what it holds of an earlier placement.
    jobs.visit_all(cx.common.index.short(), cx, Job::restore_redundancy);
    probe_missing(jobs, cx);
}

/// A worker may have asked for the job before a server has described it. It asks again.
/// And a server that was away may have described an earlier job of the name, or this job without
/// steps and epochs that another coordinator has made since.
fn make_way_for(jobs: &mut Jobs, report: &JobReport, server: ServerId, cx: &mut Context<'_>) {
    let name = &report.spec.name;
    let Some(found) = jobs.all().get(name) else { return };
    if found.is_new() {
        let error = unknown_yet(name);
        jobs.visit(name, cx, |job, cx| job.give_way(&error, cx));
    } else if found.id != report.id && found.is_older_than(report) {
        let error = Error::JobReplaced { job: name.clone() };
        jobs.visit(name, cx, |job, cx| job.give_way(&error, cx));
    } else if found.lacks_what(report) {
        learn_again(jobs, name, server, cx);
    }
}

/// Another coordinator has had an open job meanwhile. Its servers keep it, and those other than
/// `server` describe it again. Its ranks keep their leases, and open new streams.
fn learn_again(jobs: &mut Jobs, name: &str, server: ServerId, cx: &mut Context<'_>) {
    let servers = &cx.common.servers;
    let placement = jobs.all().get(name).and_then(|job| job.phase.placement());
    let placed = placement.into_iter().flat_map(|placement| placement.servers());
    let others = placed.map(|of| of.id).filter(|&other| other != server);
    let link = |server| Some(Link { server, stream: servers.get(server)?.stream });
    let links: Vec<Link> = others.filter_map(link).collect();
    jobs.visit(name, cx, Job::learn_again);
    let cause = format!("another coordinator has had job {name:?} meanwhile");
    links.into_iter().for_each(|link| lost(jobs, link, &cause, cx));
}

/// Removes a server. A job with slices on the server waits for its return; a job that is being
/// opened fails.
pub(crate) fn lost(jobs: &mut Jobs, link: Link, cause: &str, cx: &mut Context<'_>) {
    if !cx.common.servers.is_current(link) {
        return;
    }
    let server = link.server;
    let gone = format!("{} was lost ({cause})", cx.name(server));
    let has_departed = note_loss(jobs, server, cause, cx);
    cx.push(Action::Dismiss(link));
    let users = cx.common.index.users(server);
    jobs.visit_all(users, cx, |job, cx| job.server_lost(server, cause, &gone, cx));
    if has_departed {
        let users = cx.common.index.users(server);
        jobs.visit_all(users, cx, |job, cx| job.server_stopped(server, cx));
    }
    cx.common.acknowledgements.lose(server, cx.out);
    probe_missing(jobs, cx);
}

/// A server is not connected any more. It is missed, unless it was drained. Returns whether it was
/// about to stop.
fn note_loss(jobs: &Jobs, id: ServerId, cause: &str, cx: &mut Context<'_>) -> bool {
    let name = cx.name(id);
    let Some((known, has_departed)) = cx.common.servers.remove(id) else { return false };
    let is_drained = known.cordoned && !jobs.use_server(id, cx.common);
    let cause = if has_departed { "it was stopped" } else { cause };
    let (severity, what) = match (is_drained, has_departed) {
        (true, _) => (Severity::Info, "has left the cluster, and held no slices"),
        (false, true) => (Severity::Warning, "has left the cluster"),
        (false, false) => (Severity::Warning, "was lost"),
    };
    cx.alarm(severity, format!("{name} {what} ({cause})"));
    if !is_drained {
        let server = Server { id, incarnation: known.incarnation, address: known.address };
        cx.common.servers.miss(Missing { server, since: cx.now, cause: cause.to_owned() });
    }
    has_departed
}

/// Dials the servers that jobs wait for.
fn probe_missing(jobs: &Jobs, cx: &mut Context<'_>) {
    for (server, users) in cx.common.index.used() {
        if !cx.common.servers.is_connected(server) {
            let mut users = users.iter().rev().filter_map(|name| jobs.all().get(&**name));
            let awaited = users.find_map(|job| job.awaited(server));
            cx.out.extend(awaited.map(|server| Action::Probe(server.clone())));
        }
    }
}
