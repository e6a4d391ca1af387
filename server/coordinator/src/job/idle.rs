//! Idle jobs: a job is deleted when it has been unused for its idle timeout, or for that of the
//! coordinator if it has none of its own.

use crate::{
    cluster::context::{Common, Context},
    job::{Job, Phase},
    vocabulary::{events::Action, ids::Now},
};

impl Job {
    /// The time at which the job is deleted unless a rank gets a lease before; `None`: the job is
    /// kept.
    pub(crate) fn idle_deadline(&self, common: &Common) -> Option<Now> {
        let timeout = self.spec.idle_timeout.or(common.limits.timeout)?;
        let due = match &self.phase {
            Phase::Open(open) if !open.members.is_empty() => return None,
            // See `save_ended`.
            Phase::Open(open) if open.saves.current().is_some() => return None,
            Phase::Open(open)
                if self.spec.idle_timeout.is_some() && open.has_ended(self.spec.world) =>
            {
                self.unused_since.max(open.saves.retry_at())
            }
            Phase::Open(open) => (self.unused_since + timeout).max(open.saves.retry_at()),
            Phase::Failed { .. } => self.unused_since + timeout,
            // The callers that create the job wait for it: see `expire_creators`.
            // A job that is being recovered has a deadline.
            Phase::Waiting { .. } | Phase::Opening { .. } | Phase::Recovering(_) | Phase::Gone => {
                return None;
            }
        };
        // A job is kept while another job continues from it.
        (!common.index.has_successors(self.id)).then_some(due)
    }

    /// A lease has ended, or the job has just been opened. Unless another rank has a lease, the job
    /// is unused from now on.
    pub(crate) fn idle_from_now(&mut self, cx: &mut Context<'_>) {
        if let Phase::Open(open) = &self.phase
            && !open.members.is_empty()
        {
            return;
        }
        self.unused_since = cx.now;
        self.delete_if_idle(cx);
    }

    /// Deletes the job if its time has come; otherwise requests a tick at that time.
    pub(crate) fn delete_if_idle(&mut self, cx: &mut Context<'_>) {
        match self.idle_deadline(cx.common) {
            Some(due) if due <= cx.now => {
                if self.save_before_deletion(cx) {
                    return;
                }
                let (name, unused) = (&self.name, cx.now - self.unused_since);
                cx.note(match unused.is_zero() {
                    true => format!("job {name:?} is deleted: every rank has left it"),
                    false => {
                        format!("job {name:?} is deleted: no rank has held a lease for {unused:?}")
                    }
                });
                self.remove("deleted, because no rank used it", cx);
            }
            Some(due) => cx.push(Action::Tick(due)),
            None => {}
        }
    }
}
