//! The description of a job for a coordinator that does not know it.

use zeroshard_kernels::Backend;
use zeroshard_model::Attempt;
use zeroshard_proto::pb;
use zeroshard_shard::job::{Decided, JobReport, Rest};

use super::Job;
use crate::shard::events::step_ready;

/// The description of a job that is being read from a checkpoint while ranks wait. `None` for other
/// jobs, for which nobody waits.
pub(crate) fn being_restored(open: &pb::OpenJob) -> Option<pb::JobReport> {
    let version = open.restore.as_ref()?.version?;
    let fork = open.fork.as_ref();
    (!open.leases.is_empty()).then(|| pb::JobReport {
        spec: open.spec.clone(),
        job_id: open.job_id,
        placement: open.placement.clone(),
        from: fork.and_then(|fork| fork.from.clone()),
        fresh_state: fork.is_some_and(|fork| fork.fresh_state),
        restore: open.requested.clone(),
        epoch: open.epoch,
        step: version,
        published: true,
        leases: open.leases.clone(),
        done: open.done.clone(),
        left: open.left.clone(),
        restoring: true,
        line: open.line.clone(),
        recent: open.recent.clone(),
        ..Default::default()
    })
}

impl<B: Backend> Job<B> {
    /// The state of this job, in which all commands of the last coordinator have been carried out.
    pub(crate) fn report(&self) -> pb::JobReport {
        let JobReport {
            attempt,
            published,
            initialised,
            leases,
            done,
            left,
            resting,
            rested,
            ready,
            empty,
            copying,
            copies,
            restored,
            decided,
        } = self.state.report();
        let (name, id) = (|| self.spec.name.clone(), self.id);
        let rests = |Rest { rank, since, excluded }| pb::RankRests {
            job: name(),
            job_id: id,
            rank,
            ends: false,
            since,
            excluded,
        };
        let mut report = pb::JobReport {
            spec: Some((&self.spec).into()),
            job_id: id,
            placement: Some((&*self.placement()).into()),
            from: self.origin.from.clone(),
            fresh_state: self.origin.fresh_state,
            restore: self.origin.restore.clone(),
            line: Some(self.origin.line.clone()),
            recent: self.origin.recent.clone(),
            restored: restored.map(|(epoch, version)| pb::Restored { epoch, version }),
            leases: leases.into_iter().map(|(rank, lease)| pb::RankLease { rank, lease }).collect(),
            done,
            left,
            resting: resting.into_iter().map(rests).collect(),
            empty,
            copying,
            epoch: attempt.epoch,
            step: attempt.step,
            attempt: attempt.number,
            copies,
            rested,
            published,
            initialised,
            ready: ready.map(|reduced| step_ready(name(), id, attempt, reduced)),
            ..Default::default()
        };
        if let Some(Decided { decision, reduced }) = decided {
            let pb::Decision { epoch, step, attempt: number, .. } = *decision;
            let attempt = Attempt { epoch, step, number };
            report.decided = Some(step_ready(name(), id, attempt, reduced));
            report.decision = Some(pb::Decision::clone(&decision));
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_is_being_restored_is_described_with_its_predecessor() {
        let from = pb::JobVersion { job: "before".to_owned(), job_id: 8, version: 3 };
        let fork = pb::Fork { from: Some(from.clone()), fresh_state: true, ..Default::default() };
        let open = pb::OpenJob {
            restore: Some(pb::Restore { version: Some(2), ..Default::default() }),
            leases: vec![pb::RankLease { rank: 0, lease: 7 }],
            fork: Some(fork),
            ..Default::default()
        };
        let report = being_restored(&open).expect("a rank waits");
        assert_eq!((report.from, report.fresh_state, report.restoring), (Some(from), true, true));
    }
}
