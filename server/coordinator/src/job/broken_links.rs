//! Broken links: a rank reports that it cannot reach a shard server which is connected to the
//! coordinator.
//!
//! If half of the ranks of a job with replicas cannot reach a server, the job continues with its
//! backups, as if the server were lost. The server gets no slices of this job until it is restarted
//! or uncordoned, and other jobs keep it. If fewer ranks cannot reach it and the job waits only for
//! them, or if a rank reaches no server at all, these ranks count as lost. A job without replicas
//! only shows the reports.
//!
//! A rank repeats its report while it is true, so that an old report needs no correction.

use std::collections::BTreeSet;

use zeroshard_model::{Result, Server, listing::some_of};

use crate::{
    cluster::context::Context,
    job::{Job, Open, Phase},
    operators::history::Severity,
    state::{
        broken_links::{RANK_PATIENCE, SERVER_PATIENCE},
        members::Cause,
    },
    vocabulary::{
        calls::{LinkReport, Reply},
        events::Action,
        ids::{Caller, Now, ServerId},
    },
};

/// The number of characters of a cause that are kept.
const CAUSE_CHARS: usize = 200;

/// The consequence of a job's broken links.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It continues without the server.
    Drop(ServerId),
    /// These ranks count as lost.
    End(BTreeSet<u32>),
}

impl Open {
    /// The servers of the placement that ranks cannot reach: the address, the ranks, and the cause.
    pub(crate) fn unreachable_servers(&self) -> Vec<(&Server, BTreeSet<u32>, &str)> {
        let servers = self.plan.placement.servers().iter();
        let links = servers.map(|server| {
            (server, self.broken_links.ranks_without(server.id), self.broken_links.cause(server.id))
        });
        links.filter(|(_, ranks, _)| !ranks.is_empty()).collect()
    }

    /// Drops reports that have expired, and those about other servers or by earlier workers.
    fn forget_links(&mut self, now: Now) {
        let Self { broken_links, members, plan, .. } = self;
        broken_links.forget(now, |server, rank, lease| {
            members.get(rank).is_some_and(|member| member.lease == lease)
                && plan.placement.servers().iter().any(|of| of.id == server)
        });
    }

    /// Decides about a job with replicas.
    fn judge(&self, group_size: u32, now: Now) -> Option<Verdict> {
        let members: BTreeSet<u32> = self.members.ranks().collect();
        let reported = self.unreachable_servers();
        let servers = reported.iter().map(|(server, ..)| server.id);
        let unreachable: BTreeSet<ServerId> = servers.collect();
        let is_due = self.broken_links.may_drop(now);
        for &server in &unreachable {
            // Ranks of a group send parts of the gradients, and need not all use the same servers.
            let ranks = self.broken_links.ranks_long_without(server, SERVER_PATIENCE, now);
            let are_most = 2 * ranks.len() >= members.len() || group_size > 1;
            if !ranks.is_empty() && are_most && is_due && self.can_do_without(server, &unreachable)
            {
                return Some(Verdict::Drop(server));
            }
            let ranks = self.broken_links.ranks_long_without(server, RANK_PATIENCE, now);
            // The others have sent everything of this step.
            let has_sent = |&rank: &u32| self.round.has_voted(rank) || !self.takes_part(rank);
            let is_last = !are_most && members.difference(&ranks).all(has_sent);
            if !ranks.is_empty() && is_last {
                return Some(Verdict::End(ranks));
            }
        }
        let reaches_none = |rank: &u32| {
            let without = |server| self.broken_links.ranks_long_without(server, RANK_PATIENCE, now);
            self.servers().all(|server| without(server).contains(rank))
        };
        let ranks: BTreeSet<u32> = members.into_iter().filter(reaches_none).collect();
        (!ranks.is_empty()).then_some(Verdict::End(ranks))
    }

    /// Returns whether every slice has a backup that all ranks reach and that becomes its primary
    /// without the server.
    fn can_do_without(&self, server: ServerId, unreachable: &BTreeSet<ServerId>) -> bool {
        self.disconnects.is_empty()
            && self.kept_without(Some(server)).is_some_and(|kept| {
                let reaches = |next: &Vec<Server>| {
                    next.first().is_some_and(|next| !unreachable.contains(&next.id))
                };
                kept.iter().all(reaches)
            })
    }
}

impl Job {
    /// A rank cannot reach a server.
    pub(crate) fn link_reported(
        &mut self,
        caller: Caller,
        report: LinkReport,
        cx: &mut Context<'_>,
    ) {
        let noted = self.note_link(report, cx).map(|()| Reply::LinkNoted);
        cx.push(Action::Answer(caller, noted));
        self.expire_links(cx);
    }

    fn note_link(&mut self, report: LinkReport, cx: &mut Context<'_>) -> Result<()> {
        let LinkReport { turn, server, incarnation, cause } = report;
        let name = &turn.job.name;
        let Self { spec, phase, .. } = self;
        let open = phase.open_mut(name)?;
        open.check_lease(&turn)?;
        open.forget_links(cx.now);
        let is_it = |of: &&Server| (of.id, of.incarnation) == (server, incarnation);
        let Some(found) = open.plan.placement.servers().iter().find(is_it) else {
            // The rank does not know the current placement yet.
            return Ok(());
        };
        let (who, address) = (spec.describe_rank(turn.rank), found.address.clone());
        let cause: String = cause.chars().take(CAUSE_CHARS).collect();
        if open.broken_links.report((server, turn.rank), turn.lease, cause.clone(), cx.now) {
            let server = cx.common.servers.name_at(server, &address);
            let text = format!("{who} of job {name:?} cannot reach {server}: {cause}");
            cx.alarm(Severity::Warning, text);
        }
        Ok(())
    }

    /// Forgets old reports, and continues without a server or ranks that have been reported for too
    /// long.
    pub(crate) fn expire_links(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        open.forget_links(cx.now);
        open.broken_links.schedule(cx.now);
        if open.broken_links.number() == 0 {
            return;
        }
        let is_judged = spec.replicas > 1 && open.version.is_published();
        let verdict = is_judged.then(|| open.judge(spec.group_size, cx.now)).flatten();
        cx.out.extend(open.broken_links.due().map(Action::Tick));
        match verdict {
            Some(Verdict::Drop(server)) => self.drop_unreachable(server, cx),
            Some(Verdict::End(ranks)) => self.end_unreachable(&ranks, cx),
            None => {}
        }
    }

    /// The job continues without a server.
    fn drop_unreachable(&mut self, server: ServerId, cx: &mut Context<'_>) {
        let about = cx.name(server);
        let Self { name, spec, phase: Phase::Open(open), .. } = self else { return };
        open.broken_links.dropped(cx.now);
        let ranks = open.broken_links.ranks_without(server).into_iter();
        let ranks: Vec<_> = ranks.map(|rank| spec.describe_rank(rank)).collect();
        let gone = format!(
            "{} cannot reach {about}, which gets no slices of job {name:?} until it is restarted or \
             uncordoned (zsctl uncordon)",
            some_of(ranks)
        );
        self.refuse_on(server, &gone, cx);
    }

    /// Ends the leases of ranks that cannot reach what the others reach.
    fn end_unreachable(&mut self, ranks: &BTreeSet<u32>, cx: &mut Context<'_>) {
        for &rank in ranks {
            let Self { name, phase: Phase::Open(open), .. } = self else { return };
            let Some(lease) = open.members.get(rank).map(|member| member.lease) else { continue };
            let text = format!(
                "rank {rank} of job {name:?} counts as lost, because it cannot reach its shard \
                 servers: start its worker on another machine"
            );
            cx.alarm(Severity::Warning, text);
            self.expel(rank, lease, Cause::Unreachable, cx);
        }
    }
}
