//! Disposal: a job whose spec has an idle timeout is deleted when nobody uses it any more.

use super::{
    cluster::Cluster,
    events::{Action, Now},
    state::{Job, Phase},
};

impl Cluster {
    /// When the job is to be deleted if no rank gets a lease before; absent: it is kept.
    pub(super) fn disposal(&self, job: &Job) -> Option<Now> {
        let timeout = job.spec.idle_timeout?;
        let due = match &job.phase {
            Phase::Open(open) if !open.members.is_empty() => return None,
            Phase::Open(open) if open.left.len() + open.done.len() == job.spec.world as usize => {
                job.unused_since
            }
            Phase::Open(_) | Phase::Failed { .. } => job.unused_since + timeout,
            // Whoever creates it waits for it: see `expire_creators`.
            Phase::Waiting { .. } | Phase::Opening { .. } => return None,
        };
        // While another job takes over from it, it is kept.
        self.successors(job.id).next().is_none().then_some(due)
    }

    /// A lease has ended, or there was none yet: unless another rank has one, nobody uses the job
    /// from `now` on.
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

    /// Deletes the job if it is time to, else asks to be called again when it will be.
    pub(super) fn dispose(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get(name) else { return };
        match self.disposal(job) {
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
