//! Disposal: a job with an idle timeout is deleted when it has been unused for that time.

use super::{
    cluster::Cluster,
    events::{Action, Now},
    state::{Job, Phase},
};

impl Job {
    /// The time at which the job is deleted unless a rank gets a lease before; `None`: the job is
    /// kept.
    pub(super) fn disposal(&self) -> Option<Now> {
        let timeout = self.spec.idle_timeout?;
        match &self.phase {
            Phase::Open(open) if !open.members.is_empty() => None,
            Phase::Open(open) if open.left.len() + open.done.len() == self.spec.world as usize => {
                Some(self.unused_since)
            }
            Phase::Open(_) | Phase::Failed { .. } => Some(self.unused_since + timeout),
            // The callers that create the job wait for it: see `expire_creators`.
            Phase::Waiting { .. } | Phase::Opening { .. } => None,
        }
    }
}

impl Cluster {
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
        match job.disposal() {
            Some(due) if due <= now => {
                let unused = now - job.unused_since;
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
