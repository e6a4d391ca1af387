//! The description of a job for a coordinator that does not know it.

use zeroshard_kernels::Backend;
use zeroshard_model::Attempt;
use zeroshard_proto::pb;

use super::{Job, progress::Decided};
use crate::shard::{events::step_ready, slice::Role};

/// The description of a job that is being read from a checkpoint while ranks wait. `None` for other
/// jobs, for which nobody waits.
pub(crate) fn being_restored(open: &pb::OpenJob) -> Option<pb::HeldJob> {
    let version = open.restore.as_ref()?.version?;
    let succession = open.succession.as_ref();
    (!open.leases.is_empty()).then(|| pb::HeldJob {
        spec: open.spec.clone(),
        job_id: open.job_id,
        placement: open.placement.clone(),
        from: succession.and_then(|succession| succession.from.clone()),
        fresh_state: succession.is_some_and(|succession| succession.fresh_state),
        restore: open.requested.clone(),
        epoch: open.epoch,
        step: version,
        published: true,
        leases: open.leases.clone(),
        done: open.done.clone(),
        left: open.left.clone(),
        restoring: true,
        ..Default::default()
    })
}

impl<B: Backend> Job<B> {
    /// The state of this job, in which all commands of the last coordinator have been carried out.
    pub(crate) fn held(&self) -> pb::HeldJob {
        let (name, id) = (|| self.spec.name.clone(), self.id);
        let mut held = pb::HeldJob {
            spec: Some((&self.spec).into()),
            job_id: id,
            placement: Some((&*self.placement()).into()),
            ..Default::default()
        };
        held.from = self.origin.from.clone();
        held.fresh_state = self.origin.fresh_state;
        held.restore = self.origin.restore.clone();
        let restored = self.restored.get();
        held.restored = restored.map(|&(epoch, version)| pb::Restored { epoch, version });
        self.ranks().describe(&mut held);
        let with = |role| {
            self.slices().filter(move |(_, slice)| slice.role() == role).map(|(index, _)| index)
        };
        held.empty = with(Role::Empty).chain(self.unallocated()).collect();
        held.copying = with(Role::Copying).collect();
        let progress = self.progress();
        let Attempt { epoch, step, number } = progress.attempt;
        (held.epoch, held.step, held.attempt) = (epoch, step, number);
        held.copies = progress.copies;
        held.rested = progress.rested;
        held.published = progress.version.is_some();
        held.initialised = progress.is_upload && progress.waiting == 0;
        held.ready =
            progress.reduced().map(|reduced| step_ready(name(), id, progress.attempt, reduced));
        if let Some(Decided { decision, reduced }) = progress.last.clone() {
            let pb::Decision { epoch, step, attempt: number, .. } = *decision;
            let attempt = Attempt { epoch, step, number };
            held.decided = Some(step_ready(name(), id, attempt, reduced));
            held.decision = Some(pb::Decision::clone(&decision));
        }
        held
    }
}
