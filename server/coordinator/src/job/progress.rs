//! The progress of each job for operators: the input that it waits for, the duration of the wait,
//! and the last error.

use zeroshard_model::{Server, listing::some_of};

use crate::{
    cluster::context::Common,
    job::{Job, Open, Phase},
    state::progress::Wait,
    vocabulary::ids::Now,
};

impl Job {
    /// Updates the progress after an event at `now`.
    pub(crate) fn note_progress(&mut self, now: Now) {
        let version = match &self.phase {
            Phase::Open(open) => open.version.current(),
            _ => None,
        };
        self.progress.note(self.phase.shown(), version, now);
    }

    /// The input that the job waits for; `None` if nothing is missing, the job has failed, or all
    /// of its ranks have ended.
    pub fn wait(&self, common: &Common) -> Option<Wait> {
        let servers =
            |reason, lacks_servers| Some(Wait { reason, lacks_workers: false, lacks_servers });
        match &self.phase {
            Phase::Waiting { placing, .. } => servers(self.creators_wait_for(common), !placing),
            Phase::Opening { .. } => servers(self.creators_wait_for(common), false),
            Phase::Recovering(recovery) => {
                let missing =
                    recovery.missing().map(|of| common.servers.name_at(of.id, &of.address));
                let missing: Vec<String> = missing.collect();
                match missing.is_empty() {
                    true => servers("its workers to continue".to_owned(), false),
                    false => {
                        let missing = some_of(missing);
                        servers(format!("{missing} to connect to the coordinator again"), true)
                    }
                }
            }
            Phase::Open(open) => self.open_waits_for(open, common),
            Phase::Failed { .. } | Phase::Gone => None,
        }
    }

    fn open_waits_for(&self, open: &Open, common: &Common) -> Option<Wait> {
        if open.has_ended(self.spec.world) {
            return None;
        }
        let name = |of: &Server| common.servers.name_at(of.id, &of.address);
        let away = open.away().map(|of| format!("{}, which is not connected", name(of)));
        let mut parts: Vec<String> = away.collect();
        parts.extend(open.unreachable_servers().into_iter().map(|(server, ranks, cause)| {
            let ranks: Vec<_> =
                ranks.into_iter().map(|rank| self.spec.describe_rank(rank)).collect();
            format!("{}, which cannot be reached by {}: {cause}", name(server), some_of(ranks))
        }));
        let lacks_servers = !parts.is_empty();
        // At the end of training, ranks leave in order, and none has committed the open step.
        let is_ending = open.departed.left().next().is_some() && open.round.is_empty();
        let is_lost = |rank: u32| {
            let has_left = is_ending && open.departed.has_left(rank);
            open.takes_part(rank) && open.members.get(rank).is_none() && !has_left
        };
        let lacks_workers = (0..self.spec.world).any(is_lost);
        if is_ending && !lacks_workers && !lacks_servers {
            return None;
        }
        if open.replicas.is_copying() {
            parts.push("the copies of slices to a backup".to_owned());
        }
        parts.extend(self.step_lacks(open, common));
        let step = open.step();
        let is_missing = !parts.is_empty();
        let reason = format!("step {step} waits for {}", some_of(parts));
        is_missing.then_some(Wait { reason, lacks_workers, lacks_servers })
    }
}
