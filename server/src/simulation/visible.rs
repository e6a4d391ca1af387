//! When a version may be seen: all servers of its slices must have the decision that leads to it.

use std::sync::Arc;

use zeroshard_changes::Known;
use zeroshard_kernels::Cpu;

use super::{
    data::{Payload, Request},
    world::World,
};
use crate::shard::job::Job;

impl World {
    /// A version is sent to a worker or a reader.
    pub(super) fn check_visible(
        &mut self,
        from: usize,
        job: &Arc<Job<Cpu>>,
        (request, content): (&Request, &Payload),
    ) {
        match (request, content) {
            (&Request::Pull { version, slice, .. }, _) => {
                self.check_decided(from, job, (version, slice));
            }
            (_, Payload::Known(Known { version, slices: Some(slices) })) => {
                slices.keys().for_each(|&slice| self.check_decided(from, job, (*version, slice)));
            }
            (Request::Pin { version, .. }, Payload::Pinned(slices)) => {
                slices.keys().for_each(|&slice| self.check_decided(from, job, (*version, slice)));
            }
            _ => {}
        }
    }

    /// In a job with replicas, all servers of a slice must have the decision that leads to a
    /// version that is sent.
    fn check_decided(&mut self, from: usize, job: &Arc<Job<Cpu>>, (version, slice): (u64, u32)) {
        let decided = self.servers[from].decided.get(&job.id);
        if let Some(&attempt) = decided.filter(|of| of.step + 1 == version) {
            let outcome = self.decisions.shown(job.id, attempt);
            self.check(outcome);
        }
        let placement = job.placement();
        if job.spec.replicas <= 1 {
            return;
        }
        for server in placement.servers() {
            let of = &self.servers[(server.id - 1) as usize];
            if !of.is_alive || of.life != server.incarnation {
                continue;
            }
            let Some(theirs) = of.jobs.get(&job.id).map(|of| of.job.attempt()) else { continue };
            // It may have the job of an earlier placement, and become a backup without content.
            let counts = match self.only_cluster() {
                Some(cluster) => {
                    let known = cluster.jobs().get(&job.spec.name);
                    known.is_some_and(|job| job.has_content(server.id, slice))
                }
                None => theirs.epoch == job.attempt().epoch,
            };
            if counts && theirs.step < version {
                let index = of.index;
                return self.fail(format!(
                    "version {version} of slice {slice} was sent before server {index} had the \
                     decision"
                ));
            }
        }
    }
}
