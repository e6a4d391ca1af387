//! Servers that are about to stop, and what operators do with servers.

use zeroshard_model::{Error, Result, Server};

use crate::{
    cluster::{
        context::{Common, Context},
        jobs::Jobs,
    },
    job::Job,
    vocabulary::{calls::Drained, commands::Command, ids::ServerId},
};

/// A server is about to stop. No further slices are placed on it. Jobs that would be lost are saved
/// first, if they have a checkpoint policy.
///
/// A departing server keeps its jobs until the coordinator releases it, or until its time limit has
/// passed. Jobs with replicas are not saved, because their backups take over when the server has
/// stopped.
pub(crate) fn departing(jobs: &mut Jobs, server: ServerId, cx: &mut Context<'_>) {
    cx.note(format!("{} is about to stop", cx.name(server)));
    cx.common.servers.depart(server);
    jobs.visit_all(cx.common.index.users(server), cx, |job, cx| {
        if job.spec.replicas <= 1 && job.phase.uses(server) {
            job.save_last(cx);
        }
    });
}

/// Releases departing servers that no save needs any more.
pub(crate) fn release(cx: &mut Context<'_>) {
    let Common { servers, index, .. } = &mut *cx.common;
    let released: Vec<ServerId> =
        servers.unreleased().filter(|&server| !index.saves_on(server)).collect();
    for server in released {
        cx.common.servers.release(server);
        cx.command(server, Command::Release);
    }
}

/// Cordons a server, or uncordons it.
pub(crate) fn set_cordoned(
    jobs: &mut Jobs,
    name: &str,
    cordoned: bool,
    cx: &mut Context<'_>,
) -> Result<Server> {
    let is_learning = cx.common.startup.is_learning();
    let server = cx.common.servers.find(name).map_err(|unknown| match is_learning {
        true => Error::Unavailable {
            peer: format!("shard server {name:?}"),
            cause: "the coordinator was started, and the server has not connected".into(),
        },
        false => unknown,
    })?;
    if cx.common.servers.set_cordoned(server.id, cordoned) {
        cx.command(server.id, Command::Cordon { cordoned });
        let what = if cordoned { "cordoned" } else { "no longer cordoned" };
        cx.note(format!("{} is {what}", cx.name(server.id)));
    }
    if !cordoned {
        // Any job may have refused it.
        jobs.visit_all(jobs.names(), cx, |job, cx| job.uncordoned(server.id, cx));
    }
    Ok(server)
}

/// Cordons a server, and begins or continues to move its slices to other servers. A lost server is
/// not missed any more, if no job waits for it.
pub(crate) fn drain(
    jobs: &mut Jobs,
    name: &str,
    restore: bool,
    cx: &mut Context<'_>,
) -> Result<Drained> {
    let server = match set_cordoned(jobs, name, true, cx) {
        Ok(server) => server,
        Err(unknown) => {
            let missing = cx.common.servers.find_missing(name).ok_or(unknown.clone())?;
            if jobs.use_server(missing.id, cx.common) {
                return Err(unknown);
            }
            cx.common.servers.forget_missing(missing.id);
            let name = cx.common.servers.name_at(missing.id, &missing.address);
            cx.note(format!("{name} is not missed any more"));
            return Ok(Drained { server: missing, stays: Vec::new(), degraded: 0 });
        }
    };
    let mut stays = Vec::new();
    jobs.visit_all(cx.common.index.users(server.id), cx, |job, cx| {
        stays.extend(job.move_off(&server, restore, cx).err());
    });
    let degraded = jobs.all().values().map(Job::degraded_slices).sum();
    Ok(Drained { server, stays, degraded })
}
