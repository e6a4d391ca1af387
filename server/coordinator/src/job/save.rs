//! Checkpoints: the servers write their slices of one version while training continues.
//!
//! The command is sent after the decisions that make the version, so each server finds exactly that
//! version. When all servers have written their files, the driver writes the manifest, without
//! which the files are not a checkpoint. A job has at most one save at a time; a request for
//! another version waits until it has ended.

use std::{collections::BTreeSet, sync::Arc};

use zeroshard_model::{
    Error, Line, LineVersion, Result,
    checkpoint::{Start, is_same_place},
};

use crate::{
    cluster::context::Context,
    job::{Job, Phase},
    operators::history::Severity,
    state::saves::{Lacks, Next, SAVE_LIMIT},
    vocabulary::{
        calls::{Reply, Save, Saved},
        commands::{Checkpoint, Command, SavePlan},
        events::Action,
        ids::{Caller, JobRef, ServerId, Waiter},
        reports::Files,
    },
};

impl Job {
    /// States that the job is over where it has claimed the checkpoints of its name.
    pub(crate) fn end_claims(&self) -> Action {
        Action::EndClaims { job: self.reference(), urls: self.claimed() }
    }

    /// The places at which the job has claimed the checkpoints of its name.
    fn claimed(&self) -> BTreeSet<String> {
        let mut urls = BTreeSet::new();
        urls.extend(self.spec.checkpoints.as_ref().map(|policy| policy.url.clone()));
        if let Phase::Open(open) = &self.phase {
            urls.extend(open.saves.last_url().map(str::to_owned));
        }
        urls
    }

    /// The job and the places at which it has claimed the checkpoints of its name; `None` if it has
    /// failed or was never placed.
    pub fn claims(&self) -> Option<(JobRef, BTreeSet<String>)> {
        let lives = match &self.phase {
            Phase::Waiting { interrupted, .. } => interrupted.is_some(),
            Phase::Failed { .. } | Phase::Gone => false,
            Phase::Opening { .. } | Phase::Open(_) | Phase::Recovering(_) => true,
        };
        lives.then(|| (self.reference(), self.claimed()))
    }

    /// Returns what the driver claims before it saves an open job on request: the place, the job,
    /// its line, and how that began. `None` if the request is going to fail anyway.
    pub fn saved_at(&self, save: &Save) -> Option<(String, JobRef, Arc<Line>, Start)> {
        let Phase::Open(open) = &self.phase else { return None };
        let url = self.place(save.url.as_deref()).ok()?;
        let is_here = |of: &&Checkpoint| {
            of.job_id == self.id || is_same_place(&of.url, &url) && of.job == self.spec.name
        };
        let start = match open.saves.origin().filter(is_here) {
            Some(of) => Start::From(of.job_id, of.version),
            None => Start::Anew,
        };
        Some((url, self.reference(), self.line.clone(), start))
    }

    /// Returns the place of a checkpoint: the one that a request names, or that of the job's
    /// policy.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is neither.
    pub fn place(&self, named: Option<&str>) -> Result<String> {
        let policy = self.spec.checkpoints.as_ref().map(|policy| policy.url.as_str());
        named.or(policy).map(str::to_owned).ok_or_else(|| {
            Error::refused(format!(
                "job {:?} has no checkpoint policy; name the URL of the checkpoint",
                self.name
            ))
        })
    }

    /// A client has asked for a checkpoint of the current version.
    pub(crate) fn save(&mut self, caller: Caller, save: Save, cx: &mut Context<'_>) {
        if let Err(error) = self.try_save(caller, save, cx) {
            cx.push(Action::Answer(caller, Err(error)));
        }
    }

    fn try_save(&mut self, caller: Caller, save: Save, cx: &mut Context<'_>) -> Result<()> {
        let Save { job: JobRef { name, id }, url, unless_saved, wait } = save;
        if id != 0 && id != self.id {
            return Err(Error::JobReplaced { job: name });
        }
        let url = self.place(url.as_deref())?;
        let policy = self.spec.checkpoints.as_ref().filter(|policy| policy.url == url);
        let keep = policy.map_or(0, |policy| policy.keep);
        let open = self.phase.open_mut(&name)?;
        let waiter = Waiter::new(caller, cx.now, wait);
        let Some(version) = open.version.current() else {
            let cause = "its initial parameters have not all been uploaded yet".to_owned();
            return Err(Error::Unavailable { peer: format!("job {name:?}"), cause });
        };
        let saves = &mut open.saves;
        if let Some(saved) = saves.saved(version, &url).filter(|_| unless_saved) {
            cx.push(Action::Answer(caller, Ok(Reply::Saved(saved))));
            return Ok(());
        }
        if saves.request(&name, version, (&url, keep), waiter)? {
            self.begin_save(url, keep, vec![waiter], cx);
        } else {
            cx.push(Action::Tick(waiter.deadline));
        }
        Ok(())
    }

    /// Begins a save of the current version of an open job.
    fn begin_save(&mut self, url: String, keep: u32, waiters: Vec<Waiter>, cx: &mut Context<'_>) {
        let job = self.reference();
        let save = cx.common.saves.next();
        let line = self.line.number;
        let Self { spec, recent, phase: Phase::Open(open), .. } = self else { return };
        let Some(version) = open.version.current() else { return };
        if let Some(rank) = open.saves.lost_data(open.has_ended(spec.world)) {
            let error = Error::UserDataLost { job: job.name, version, rank };
            return cx.refuse(waiters, &error);
        }
        let plan = SavePlan { save, version: LineVersion { version, line }, url, keep };
        open.send(&Command::Write { job, plan: plan.clone() }, cx.out);
        open.saves.begin((plan, recent.clone()), open.servers().collect(), waiters, cx.now);
        cx.push(Action::Tick(cx.now + SAVE_LIMIT));
        self.complete_if_written(cx);
    }

    /// Begins a save if the policy of the job asks for one of the version that has just been made.
    pub(crate) fn save_if_due(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, phase: Phase::Open(open), .. } = self else { return };
        let Some(policy) = &spec.checkpoints else { return };
        let version = open.step();
        if !open.saves.is_due(policy, version, cx.now) {
            return;
        }
        if let Some(running) = open.saves.current() {
            return cx.note(format!(
                "version {version} of job {name:?} is not saved, because version {running} is \
                 still being saved"
            ));
        }
        let (url, keep) = (policy.url.clone(), policy.keep);
        self.begin_save(url, keep, Vec::new(), cx);
    }

    /// Saves an unused job a last time, if it has a policy and steps that are not saved. Returns
    /// whether the job is to be kept for it.
    pub(crate) fn save_before_deletion(&mut self, cx: &mut Context<'_>) -> bool {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return false };
        let (Some(policy), Some(version)) = (&spec.checkpoints, open.version.current()) else {
            return false;
        };
        let is_saving = open.saves.current().is_some();
        let is_saved = open.saves.saved(version, &policy.url).is_some();
        let is_complete = open.saves.lost_data(open.has_ended(spec.world)).is_none();
        if !is_saving && (is_saved || version == 0 || !is_complete) {
            return false;
        }
        if !is_saving {
            let (url, keep) = (policy.url.clone(), policy.keep);
            self.begin_save(url, keep, Vec::new(), cx);
        }
        true
    }

    /// Saves the current version of a job before one of its servers or the coordinator stops. Does
    /// nothing if the job has no checkpoint policy or no unsaved steps.
    pub(crate) fn save_last(&mut self, cx: &mut Context<'_>) {
        if !self.save_before_deletion(cx) {
            return;
        }
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        if let Some(policy) = &spec.checkpoints
            && open.saves.current().is_some_and(|running| Some(running) != open.version.current())
        {
            open.saves.save_again(policy.url.clone(), policy.keep);
        }
    }

    /// A server has written its part of a checkpoint.
    pub(crate) fn written(
        &mut self,
        server: ServerId,
        (save, line): (u64, u64),
        files: Files,
        cx: &mut Context<'_>,
    ) {
        if line != self.line.number {
            // A server that does not know lines writes into the directory of line 0.
            let cause = format!(
                "{} has written a version of job {:?} on line {line} instead of line {}; it is of \
                 an earlier version of ZeroShard: update it",
                cx.name(server),
                self.name,
                self.line.number
            );
            return self.save_ended(save, Err(Error::Internal { cause }), cx);
        }
        let was_awaited = match &mut self.phase {
            Phase::Open(open) => open.saves.written(server, save, files),
            _ => None,
        };
        match was_awaited {
            Some(true) => self.complete_if_written(cx),
            Some(false) => {}
            None => {
                let job = self.reference();
                cx.command(server, Command::CancelSave { job, save });
            }
        }
    }

    pub(crate) fn complete_if_written(&mut self, cx: &mut Context<'_>) {
        let job = self.reference();
        let Self { spec, line, phase: Phase::Open(open), .. } = self else { return };
        if let Some(completion) = open.saves.complete(job, spec, line) {
            cx.common.saves.complete(completion.plan.save, &completion.job.name);
            cx.push(Action::Complete(completion));
        }
    }

    /// A save is complete, or has failed on a server or in the driver.
    pub(crate) fn save_ended(&mut self, save: u64, outcome: Result<u64>, cx: &mut Context<'_>) {
        let job = self.reference();
        let Phase::Open(open) = &mut self.phase else { return };
        let Some(ended) = open.saves.end(save, &outcome, cx.now) else { return };
        let (name, version) = (&job.name, ended.version);
        match &outcome {
            Ok(bytes) => {
                cx.note(format!(
                    "version {version} of job {name:?} is saved: {bytes} bytes at {}",
                    ended.url
                ));
            }
            Err(error) => {
                let job = job.clone();
                open.send(&Command::CancelSave { job, save }, cx.out);
                let text = format!("version {version} of job {name:?} is not saved: {error}");
                cx.alarm(Severity::Warning, text);
            }
        }
        let complete = outcome.is_ok().then(|| (version, cx.now.saturating_sub(ended.since)));
        cx.push(Action::SaveEnded { job: name.clone(), complete });
        let reply = outcome.map(|bytes| Reply::Saved(Saved { version, bytes }));
        for waiter in ended.waiters {
            cx.answer(waiter, reply.clone());
        }
        if let Some(Next { url, keep, waiters }) = open.saves.take_next() {
            self.begin_save(url, keep, waiters, cx);
        }
        // A job that is to return after a spike waits for the end of the save.
        self.decide(cx);
        self.delete_if_idle(cx);
    }

    /// Gives up a save of which a server may not have received the command, because its control
    /// stream has broken.
    pub(crate) fn save_without(&mut self, server: ServerId, cause: &str, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let Some(save) = open.saves.awaits(server) else { return };
        let (peer, cause) = (cx.name(server), cause.to_owned());
        self.save_ended(save, Err(Error::Unavailable { peer, cause }), cx);
    }

    /// Answers callers at their deadline, and gives up a save at its own.
    pub(crate) fn expire_saves(&mut self, cx: &mut Context<'_>) {
        let Self { name, phase: Phase::Open(open), .. } = self else { return };
        let expired = open.saves.expire(cx.now);
        let overdue = open.saves.overdue(cx.now);
        if expired.is_empty() && overdue.is_none() {
            return;
        }
        let Some((version, lacks)) = open.saves.lacks() else { return };
        let waiting_for = match lacks {
            Lacks::Manifest => {
                format!("the manifest of version {version} of job {name:?} to be written")
            }
            Lacks::Rank(rank) => {
                format!("rank {rank} to send its data of version {version} of job {name:?}")
            }
            Lacks::Servers(pending) => {
                let servers = cx.common.servers.names_of(&pending);
                format!("{servers} to write version {version} of job {name:?}")
            }
        };
        cx.time_out(expired, |_| waiting_for.clone());
        if let Some(save) = overdue {
            let waited_ms = SAVE_LIMIT.as_millis() as u64;
            let error = Error::Timeout { waiting_for, waited_ms };
            self.save_ended(save, Err(error), cx);
        }
    }

    /// The caller of a save has disconnected. The save continues.
    pub(crate) fn saver_gone(&mut self, caller: Caller) {
        if let Phase::Open(open) = &mut self.phase {
            open.saves.forget_caller(caller);
        }
    }
}
