//! Checkpoints: the servers write their slices of one version while training continues.
//!
//! The command is sent after the decisions that make the version, so each server finds exactly that
//! version. When all servers have written their files, the driver writes the manifest, without
//! which the files are not a checkpoint. A job has at most one save at a time; a request for
//! another version waits until it has ended.

use std::{collections::BTreeSet, time::Duration};

use zeroshard_model::{
    Error, Result,
    checkpoint::{Start, is_same_place},
};

use crate::events::Completion;
use crate::history::Severity;
use crate::ids::ServerId;
use crate::reports::Files;
use crate::{
    calls::{Reply, Save, Saved},
    commands::{Checkpoint, Command, SavePlan},
    context::Context,
    events::Action,
    ids::{Caller, JobRef, Waiter},
    job::{Job, Phase},
    saves::{Next, Saving},
};

/// How long a save may take. It is given up afterwards, so that a store that does not respond does
/// not end all later saves as well.
pub(crate) const SAVE_LIMIT: Duration = Duration::from_secs(3600);

/// The pause after a failed save of an unused job.
const RETRY: Duration = Duration::from_secs(60);

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
            urls.extend(open.saves.last.as_ref().map(|(_, url)| url.clone()));
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

    /// The place where an open job is saved on request, the job, and how it began, for its claim;
    /// `None` if the request fails for another reason.
    pub fn saved_at(&self, save: &Save) -> Option<(String, JobRef, Start)> {
        let Phase::Open(open) = &self.phase else { return None };
        let policy = self.spec.checkpoints.as_ref().map(|policy| &policy.url);
        let url = save.url.as_ref().or(policy)?;
        let is_here = |of: &&Checkpoint| is_same_place(&of.url, url) && of.job == self.spec.name;
        let start = match open.saves.origin.as_ref().filter(is_here) {
            Some(of) => Start::From(of.job_id, of.version),
            None => Start::Anew,
        };
        Some((url.clone(), self.reference(), start))
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
        let policy = self.spec.checkpoints.as_ref();
        let by_policy = policy.filter(|policy| url.as_ref().is_none_or(|url| *url == policy.url));
        let keep = by_policy.map_or(0, |policy| policy.keep);
        let url = url.or_else(|| policy.map(|policy| policy.url.clone())).ok_or_else(|| {
            let expected = "the directory for the checkpoint: the job has no policy with one";
            Error::invalid(format!("url of the checkpoint of job {name:?}"), "absent", expected)
        })?;
        let open = self.phase.open_mut(&name)?;
        let waiter = Waiter::new(caller, cx.now, wait);
        let Some(version) = open.version else {
            let cause = "its initial parameters have not all been uploaded yet".to_owned();
            return Err(Error::Unavailable { peer: format!("job {name:?}"), cause });
        };
        let saves = &mut open.saves;
        if let Some(saved) = saves.saved(version, &url).filter(|_| unless_saved) {
            cx.push(Action::Answer(caller, Ok(Reply::Saved(saved))));
            return Ok(());
        }
        let Some(saving) = &mut saves.current else {
            self.begin_save(url, keep, vec![waiter], cx);
            return Ok(());
        };
        if saving.plan.version == version && saving.plan.url == url {
            saving.waiters.push(waiter);
            return Ok(());
        }
        let running = saving.plan.version;
        let next = Next { url: url.clone(), keep, waiters: Vec::new() };
        let next = saves.next.get_or_insert(next);
        if next.url != url {
            let cause =
                format!("its version {running} is being saved, and the next at {}", next.url);
            return Err(Error::Unavailable { peer: format!("job {name:?}"), cause });
        }
        cx.push(Action::Tick(waiter.deadline));
        next.waiters.push(waiter);
        Ok(())
    }

    /// Begins a save of the current version of an open job.
    fn begin_save(&mut self, url: String, keep: u32, waiters: Vec<Waiter>, cx: &mut Context<'_>) {
        let job = self.reference();
        let save = cx.common.saves.next();
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        let Some(version) = open.version else { return };
        if let Some(rank) = open.saves.user_data.lost(open.has_ended(spec.world)) {
            let error = Error::UserDataLost { job: job.name, version, rank };
            return cx.refuse(waiters, &error);
        }
        let plan = SavePlan { save, version, url, keep };
        open.send(&Command::Write { job, plan: plan.clone() }, cx.out);
        open.saves.began = Some(cx.now);
        open.saves.current = Some(Saving {
            plan,
            since: cx.now,
            deadline: cx.now + SAVE_LIMIT,
            pending: open.servers().collect(),
            files: Vec::new(),
            user_data: open.saves.user_data.clone(),
            waiters,
        });
        cx.push(Action::Tick(cx.now + SAVE_LIMIT));
        self.complete_if_written(cx);
    }

    /// Begins a save if the policy of the job asks for one of the version that has just been made.
    pub(crate) fn save_if_due(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, phase: Phase::Open(open), .. } = self else { return };
        let Some(policy) = &spec.checkpoints else { return };
        let began = *open.saves.began.get_or_insert(cx.now);
        let version = open.step();
        let by_steps = policy.every_steps.is_some_and(|every| version.is_multiple_of(every));
        let by_time = policy.every.is_some_and(|every| cx.now.saturating_sub(began) >= every);
        if !by_steps && !by_time {
            return;
        }
        if let Some(saving) = &open.saves.current {
            let running = saving.plan.version;
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
        let (Some(policy), Some(version)) = (&spec.checkpoints, open.version) else { return false };
        let is_saving = open.saves.current.is_some();
        let is_saved = open.saves.saved(version, &policy.url).is_some();
        let is_complete = open.saves.user_data.lost(open.has_ended(spec.world)).is_none();
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
        let (Some(policy), Some(saving)) = (&spec.checkpoints, &open.saves.current) else { return };
        if Some(saving.plan.version) != open.version {
            let (url, keep) = (policy.url.clone(), policy.keep);
            open.saves.next.get_or_insert(Next { url, keep, waiters: Vec::new() });
        }
    }

    /// A server has written its part of a checkpoint.
    pub(crate) fn written(
        &mut self,
        server: ServerId,
        save: u64,
        files: Files,
        cx: &mut Context<'_>,
    ) {
        let job = self.reference();
        let saving = match &mut self.phase {
            Phase::Open(open) => open.saves.of(save),
            _ => None,
        };
        let Some(saving) = saving else {
            return cx.command(server, Command::CancelSave { job, save });
        };
        if saving.pending.remove(&server) {
            saving.files.push(files);
            self.complete_if_written(cx);
        }
    }

    pub(crate) fn complete_if_written(&mut self, cx: &mut Context<'_>) {
        let job = self.reference();
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        let is_complete =
            |saving: &&mut Saving| saving.pending.is_empty() && saving.user_data.is_complete();
        let saving = open.saves.current.as_mut().filter(is_complete);
        if let Some(saving) = saving {
            cx.common.saves.complete(saving.plan.save, &job.name);
            cx.push(Action::Complete(Completion {
                job,
                spec: spec.clone(),
                plan: saving.plan.clone(),
                files: std::mem::take(&mut saving.files),
                user_data: std::mem::take(&mut saving.user_data.ranks),
                lost_ranks: saving.user_data.missing.iter().copied().collect(),
            }));
        }
    }

    /// A save is complete, or has failed on a server or in the driver.
    pub(crate) fn save_ended(&mut self, save: u64, outcome: Result<u64>, cx: &mut Context<'_>) {
        let job = self.reference();
        let Phase::Open(open) = &mut self.phase else { return };
        let Some(saving) = open.saves.current.take_if(|saving| saving.plan.save == save) else {
            return;
        };
        let (name, version) = (&job.name, saving.plan.version);
        match &outcome {
            Ok(bytes) => {
                let saved = Saved { version, bytes: *bytes };
                open.saves.last = Some((saved, saving.plan.url.clone()));
                (open.saves.completed, open.saves.failures, open.saves.failure) =
                    (Some(cx.now), 0, None);
                cx.note(format!(
                    "version {version} of job {name:?} is saved: {bytes} bytes at {}",
                    saving.plan.url
                ));
            }
            Err(error) => {
                open.saves.retry_at = cx.now + RETRY;
                open.saves.failures = open.saves.failures.saturating_add(1);
                open.saves.failure = Some(error.to_string());
                let job = job.clone();
                open.send(&Command::CancelSave { job, save }, cx.out);
                let text = format!("version {version} of job {name:?} is not saved: {error}");
                cx.alarm(Severity::Warning, text);
            }
        }
        let complete = outcome.is_ok().then(|| (version, cx.now.saturating_sub(saving.since)));
        cx.push(Action::SaveEnded { job: name.clone(), complete });
        let reply = outcome.map(|bytes| Reply::Saved(Saved { version, bytes }));
        for waiter in saving.waiters {
            cx.answer(waiter, reply.clone());
        }
        if let Some(Next { url, keep, waiters }) = open.saves.next.take() {
            self.begin_save(url, keep, waiters, cx);
        }
        self.delete_if_idle(cx);
    }

    /// Gives up a save of which a server may not have received the command, because its control
    /// stream has broken.
    pub(crate) fn save_without(&mut self, server: ServerId, cause: &str, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let saving = open.saves.current.as_ref().filter(|of| of.pending.contains(&server));
        let Some(save) = saving.map(|saving| saving.plan.save) else { return };
        let (peer, cause) = (cx.name(server), cause.to_owned());
        self.save_ended(save, Err(Error::Unavailable { peer, cause }), cx);
    }

    /// Answers callers at their deadline, and gives up a save at its own.
    pub(crate) fn expire_saves(&mut self, cx: &mut Context<'_>) {
        let Self { name, phase: Phase::Open(open), .. } = self else { return };
        let expired = open.saves.take_waiters(|waiter| waiter.deadline <= cx.now);
        let Some(saving) = &mut open.saves.current else { return };
        let (save, version) = (saving.plan.save, saving.plan.version);
        let (is_late, pending) = (saving.deadline <= cx.now, saving.pending.clone());
        let waiting_for = match (pending.is_empty(), saving.user_data.awaited.first()) {
            (true, None) => {
                format!("the manifest of version {version} of job {name:?} to be written")
            }
            (true, Some(rank)) => {
                format!("rank {rank} to send its data of version {version} of job {name:?}")
            }
            (false, _) => {
                let servers = cx.common.servers.names_of(&pending);
                format!("{servers} to write version {version} of job {name:?}")
            }
        };
        cx.time_out(expired, &waiting_for);
        if is_late {
            let waited_ms = SAVE_LIMIT.as_millis() as u64;
            let error = Error::Timeout { waiting_for, waited_ms };
            self.save_ended(save, Err(error), cx);
        }
    }

    /// The caller of a save has disconnected. The save continues.
    pub(crate) fn saver_gone(&mut self, caller: Caller) {
        if let Phase::Open(open) = &mut self.phase {
            open.saves.take_waiters(|waiter| waiter.caller == caller);
        }
    }
}
