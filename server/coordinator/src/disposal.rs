//! Disposal: a job is deleted when it has been unused for its idle timeout, or for that of the
//! coordinator if it has none of its own.

use super::{
    cluster::Cluster,
    events::{Action, Now},
    state::{Job, Phase},
};

impl Cluster {
    /// The time at which the job is deleted unless a rank gets a lease before; `None`: the job is
    /// kept.
    pub(super) fn disposal(&self, job: &Job) -> Option<Now> {
        let timeout = job.spec.idle_timeout.or(self.job_timeout)?;
        let due = match &job.phase {
            Phase::Open(open) if !open.members.is_empty() => return None,
            // See `save_ended`.
            Phase::Open(open) if open.saves.current().is_some() => return None,
            Phase::Open(open)
                if job.spec.idle_timeout.is_some() && open.has_ended(job.spec.world) =>
            {
                job.unused_since.max(open.saves.retry_at)
            }
            Phase::Open(open) => (job.unused_since + timeout).max(open.saves.retry_at),
            Phase::Failed { .. } => job.unused_since + timeout,
            // The callers that create the job wait for it: see `expire_creators`.
            // A job that is being recovered has a deadline.
            Phase::Waiting { .. } | Phase::Opening { .. } | Phase::Recovering(_) => return None,
        };
        // A job is kept while another job continues from it.
        self.successors(job.id).next().is_none().then_some(due)
    }

    /// A lease has ended, or the job has just been opened. Unless another rank has a lease, the job
    /// is unused from `now` on.
    pub(super) fn unused_from(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        match self.jobs.get_mut(name) {
            Some(Job { phase: Phase::Open(open), .. }) if !open.members.is_empty() => {}
            Some(job) => {
                job.unused_since = now;
                self.dispose(name, now, out);
            }
            None => {}
        }
    }

    /// Deletes the job if its time has come; otherwise requests a tick at that time.
    pub(super) fn dispose(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get(name) else { return };
        let unused_since = job.unused_since;
        match self.disposal(job) {
            Some(due) if due <= now => {
                if self.save_before_disposal(name, now, out) {
                    return;
                }
                let unused = now - unused_since;
                out.push(Action::Note(match unused.is_zero() {
                    true => format!("job {name:?} is deleted: every rank has left it"),
                    false => {
                        format!("job {name:?} is deleted: no rank has held a lease for {unused:?}")
                    }
                }));
                self.remove(name, "deleted, because no rank used it", out);
            }
            Some(due) => out.push(Action::Tick(due)),
            None => {}
        }
    }
}
