//! Backups copy their slices from the primaries, one part of the slices at a time, so that a step
//! waits for one part at most.

use crate::{
    cluster::context::Context,
    job::{Job, Open, Phase},
    operators::history::Severity,
    vocabulary::{commands::Command, events::Action, ids::ServerId},
};

/// The size of a part: the memory of its slices, in bytes.
const PART_BYTES: u64 = 64 << 20;

impl Job {
    /// A server has opened the job. Returns whether it was told to do so as a backup, which can now
    /// copy its slices.
    pub(crate) fn opened_as_backup(&mut self, server: ServerId, cx: &mut Context<'_>) -> bool {
        let Phase::Open(open) = &mut self.phase else { return false };
        let was_opening = open.replicas.opened(server);
        if was_opening {
            self.copy_next(cx);
        }
        was_opening
    }

    /// Tells a server to copy the next part of its slices. While all ranks wait for a decision, the
    /// step comes first.
    pub(crate) fn copy_next(&mut self, cx: &mut Context<'_>) {
        let job = self.reference();
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        let voters = open.active(spec.world);
        let is_busy =
            open.replicas.is_copying() || open.round.agreed(voters).is_some() || !open.is_stored();
        let Some(version) = open.version.current().filter(|_| !is_busy) else { return };
        let Open { replicas, disconnects, .. } = &mut **open;
        let bytes = |slice| spec.arrays(slice as usize).required().bytes;
        let next = replicas.next_copy(PART_BYTES, bytes, |server| disconnects.contains(*server));
        let Some((server, slices)) = next else { return };
        let trained = slices.iter().filter(|&&slice| spec.manifest.trains(slice as usize)).count();
        let number = replicas.begin_copy(server, slices.clone(), trained);
        open.round.drop_report(server);
        cx.command(server, Command::Copy { job, number, version, slices });
    }

    /// Repeats the command to copy slices to a server that was away: the command or the answer may
    /// have been lost.
    pub(crate) fn copy_again(&self, server: ServerId, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        if let Some((number, slices)) = open.replicas.copying_on(server)
            && let Some(version) = open.version.current()
        {
            let job = self.reference();
            cx.command(server, Command::Copy { job, number, version, slices });
        }
    }

    /// A server has no memory for slices. They are given to another server, if there is one, and
    /// otherwise have too few replicas until a server connects or another one is lost.
    pub(crate) fn copy_refused(
        &mut self,
        server: ServerId,
        number: u64,
        reason: &str,
        cx: &mut Context<'_>,
    ) {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        let Open { replicas, .. } = &mut **open;
        let Some(slices) = replicas.end_copy(server, number) else { return };
        let trained = slices.iter().filter(|&&slice| spec.manifest.trains(slice as usize)).count();
        replicas.cannot_copy(server, slices, trained);
        let text = format!(
            "{} cannot hold more backups of job {:?}: {reason}",
            cx.name(server),
            self.name
        );
        cx.alarm(Severity::Warning, text);
        self.restore_redundancy(cx);
        self.advance(cx);
        self.copy_next(cx);
    }

    /// A server has copied slices.
    pub(crate) fn copied(&mut self, server: ServerId, number: u64, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        if open.replicas.end_copy(server, number).is_none() {
            return;
        }
        self.note_redundancy(cx);
        self.advance(cx);
        self.copy_next(cx);
    }

    /// Notes that all slices have their replicas again, if some had too few until now.
    pub(crate) fn note_redundancy(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, phase: Phase::Open(open), .. } = self else { return };
        if open.degraded_slices(spec) == 0
            && let Some(since) = open.replicas.recovered()
        {
            let after = cx.now.saturating_sub(since);
            cx.push(Action::Redundant { after });
            let seconds = after.as_secs_f64();
            cx.note(format!("job {name:?} has all its replicas again after {seconds:.1} s"));
        }
    }
}
