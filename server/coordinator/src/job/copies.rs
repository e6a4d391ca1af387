//! Backups copy their slices from the primaries, one part of the slices at a time, so that a step
//! waits for one part at most.

use zeroshard_model::JobSpec;

use crate::{
    commands::Command,
    context::Context,
    events::Action,
    history::Severity,
    ids::ServerId,
    job::{Job, Open, Phase},
    replicas::{Copying, Replicas},
};

/// The size of a part: the memory of its slices, in bytes.
const PART_BYTES: u64 = 64 << 20;

impl Job {
    /// A server has opened the job. Returns whether it was told to do so as a backup, which can now
    /// copy its slices.
    pub(crate) fn opened_as_backup(&mut self, server: ServerId, cx: &mut Context<'_>) -> bool {
        let Phase::Open(open) = &mut self.phase else { return false };
        let was_opening = open.replicas.opening.remove(&server).is_some();
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
        let Some(version) = open.version.filter(|_| !is_busy) else { return };
        let Some((server, slices)) = open.next_copy(spec) else { return };
        let replicas = &mut open.replicas;
        replicas.last_copy += 1;
        let number = replicas.last_copy;
        let trained = slices.iter().filter(|&&slice| spec.manifest.trains(slice as usize)).count();
        *replicas.active.entry(server).or_default() += trained;
        replicas.told.insert(server, number);
        replicas.copying = Some(Copying { number, server, slices: slices.clone() });
        open.round.reports.remove(&server);
        cx.command(server, Command::Copy { job, number, version, slices });
    }

    /// Repeats the command to copy slices to a server that was away: the command or the answer may
    /// have been lost.
    pub(crate) fn copy_again(&self, server: ServerId, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let copying = open.replicas.copying.as_ref().filter(|copying| copying.server == server);
        if let Some((Copying { number, slices, .. }, version)) = copying.zip(open.version) {
            let (job, number, slices) = (self.reference(), *number, slices.clone());
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
        let Some(Copying { slices, .. }) = replicas.end_copy(server, number) else { return };
        let trained = slices.iter().filter(|&&slice| spec.manifest.trains(slice as usize)).count();
        if let Some(active) = replicas.active.get_mut(&server) {
            *active -= trained;
        }
        replicas.full.insert(server);
        replicas.empty.entry(server).or_default().extend(slices);
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
            && let Some(since) = open.replicas.degraded.take()
        {
            let after = cx.now.saturating_sub(since);
            cx.push(Action::Redundant { after });
            let seconds = after.as_secs_f64();
            cx.note(format!("job {name:?} has all its replicas again after {seconds:.1} s"));
        }
    }
}

impl Replicas {
    /// Ends the copy in progress, if the server has answered it.
    fn end_copy(&mut self, server: ServerId, number: u64) -> Option<Copying> {
        self.copying.take_if(|copying| (copying.server, copying.number) == (server, number))
    }
}

impl Open {
    /// A server that can copy slices, and the next part of them.
    fn next_copy(&mut self, spec: &JobSpec) -> Option<(ServerId, Vec<u32>)> {
        let Self { replicas, away, .. } = self;
        let can = |server: &ServerId| {
            !replicas.opening.contains_key(server)
                && !replicas.full.contains(server)
                && !away.contains_key(server)
        };
        let (&server, slices) = replicas.empty.iter_mut().find(|(server, _)| can(server))?;
        let mut bytes = 0;
        let fits = |slice: &u32| {
            let is_first = bytes == 0;
            bytes += spec.arrays(*slice as usize).required().bytes.max(1);
            is_first || bytes <= PART_BYTES
        };
        let part: Vec<u32> = slices.iter().copied().take_while(fits).collect();
        match slices.iter().nth(part.len()) {
            Some(&next) => *slices = slices.split_off(&next),
            None => _ = replicas.empty.remove(&server),
        }
        Some((server, part))
    }
}
