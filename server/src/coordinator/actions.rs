//! Carries out the actions of the state machine. This module runs under the driver's lock, so no
//! function waits.

use std::{collections::BTreeSet, task::Waker, time::Duration};

use tokio::sync::mpsc::error::TrySendError;
use zeroshard_checkpoint::{Claimant, Storage};
use zeroshard_coordinator::{
    operators::history::Severity,
    placement::plan::Plan,
    vocabulary::{
        commands::Command,
        events::{Action, Completion, Event, Placed, Placing, Search},
        ids::{JobRef, Link, ServerId},
    },
};
use zeroshard_model::{Error, Line, Result, checkpoint::Start};

use super::{
    driver::{Driver, Inner, MAX_COMMANDS, MemberStream},
    storage::{self, Found},
    traces,
};
use crate::metrics::CoordinatedJob;

/// The number of searches for a checkpoint while the storage does not answer.
const SEARCHES: usize = 12;

/// The pause between two searches.
const SEARCH_PAUSE: Duration = Duration::from_secs(5);

impl Driver {
    pub(super) fn act(&self, inner: &mut Inner, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Answer(caller, answer) => {
                    // Sending fails if the caller has disconnected.
                    if let Some(call) = inner.calls.remove(&caller) {
                        let _ = call.send(answer);
                    }
                }
                Action::Command(server, command) => {
                    if command.decides() {
                        self.leadership.lead();
                    }
                    inner.send(server, command);
                }
                Action::Place(placing) => self.place(placing),
                Action::Wake(lease) => {
                    if let Some(waker) = inner.members.get_mut(&lease).and_then(|m| m.waker.take())
                    {
                        waker.wake();
                    }
                }
                Action::Attached(lease, opened_by) => {
                    let stream = MemberStream::opened_by(opened_by);
                    // The task of an earlier stream sees that it is not the current one any more.
                    let earlier = inner.members.insert(lease, stream);
                    earlier.and_then(|of| of.waker).into_iter().for_each(Waker::wake);
                }
                Action::End(lease, error) => {
                    if let Some(member) = inner.members.get_mut(&lease) {
                        member.ended = Some(error);
                        member.waker.take().into_iter().for_each(Waker::wake);
                    }
                }
                Action::Dismiss(link) => inner.dismiss(link, "it was lost"),
                Action::Probe(server) => self.probe(inner, server),
                Action::Decided { job, step } => {
                    inner.count(&job.name, |series| {
                        series.decided(step.applied, &step.waits);
                        self.metrics.coordinator.show_step(series, step.loss, step.norm);
                    });
                    traces::decided(&job, &step, self.now());
                    inner.histories.entry(job.name).or_default().add(&step, self.now());
                }
                Action::Tick(due) => self.arm(inner, due),
                Action::Complete(completion) => self.complete(completion),
                Action::Search(search) => self.search(search),
                Action::Spiked { job } => inner.count(&job, CoordinatedJob::spiked),
                Action::SaveEnded { job, complete } => inner.count(&job, |of| match complete {
                    Some((version, took)) => self.metrics.coordinator.saved(of, version, took),
                    None => of.not_saved(),
                }),
                Action::Redundant { after } => self.metrics.coordinator.redundant(after),
                Action::Aborted { job } => {
                    inner.count(&job, CoordinatedJob::aborted);
                    inner.histories.entry(job).or_default().aborted += 1;
                }
                Action::Interrupted { job, attempt, began } => {
                    traces::interrupted(&job, attempt, self.now().saturating_sub(began));
                }
                Action::Forgotten { job } => {
                    inner.histories.remove(&job);
                    let series = inner.series.remove(&job);
                    series.into_iter().for_each(|series| self.metrics.coordinator.forget(series));
                }
                Action::EndClaims { job, urls } => self.end_claims(inner, job, urls),
                Action::Note(note) => {
                    tracing::info!("{note}");
                    inner.journal.add(Severity::Info, note);
                }
                Action::Alarm(severity, text) => {
                    match severity {
                        Severity::Info => tracing::info!("{text}"),
                        Severity::Warning => tracing::warn!("{text}"),
                        Severity::Error => tracing::error!("{text}"),
                    }
                    inner.journal.add(severity, text);
                }
            }
        }
    }

    /// Computes a placement on a thread that may block.
    fn place(&self, placing: Placing) {
        let Some(driver) = self.me.upgrade() else { return };
        tokio::spawn(async move {
            let job = placing.job.clone();
            let placed = driver.plan(placing).await;
            driver.tell(Event::Placed { job, placed });
        });
    }

    async fn plan(&self, placing: Placing) -> Result<Placed> {
        let job = &placing.job;
        self.claims_ended(&job.name).await;
        let Found { checkpoint, user_data, line, recent } = storage::find(&placing).await?;
        for url in storage::places(&placing) {
            // A coordinator that has been replaced must not claim a line.
            self.read(|_| ())?;
            let owner = Storage::open(url)?.owner(&job.name).await?;
            if placing.returns && owner.is_some_and(|owner| owner.of().job_id != job.id) {
                continue; // the job cannot save there any more, and still reads its own checkpoints
            }
            let start = storage::start(&placing, checkpoint.as_ref(), url);
            self.claim(url, job, &line, start).await?;
        }
        let Placing { spec, live, zones, free_memory, .. } = placing;
        let plan = move || Plan::within(&spec, &live, &zones, &free_memory);
        let plan = self.failure.blocking("place a job", plan).await?;
        Ok(Placed { plan, checkpoint, user_data, line, recent })
    }

    /// Searches for the checkpoint to which a job returns after a spike. Tries again for a while if
    /// the storage does not answer.
    fn search(&self, search: Search) {
        let Some(driver) = self.me.upgrade() else { return };
        tokio::spawn(async move {
            let mut found = storage::search(&search).await;
            for _ in 1..SEARCHES {
                if !matches!(found, Err(Error::Storage { .. } | Error::Timeout { .. })) {
                    break;
                }
                tokio::time::sleep(SEARCH_PAUSE).await;
                found = storage::search(&search).await;
            }
            driver.tell(Event::Searched { search: Box::new(search), found });
        });
    }

    /// Makes the line the owner of the checkpoints of its job's name at `url`.
    ///
    /// # Errors
    /// Those of [`Storage::claim`].
    pub(super) async fn claim(
        &self,
        url: &str,
        job: &JobRef,
        line: &Line,
        start: Start,
    ) -> Result<()> {
        let (name, job_id, by) = (job.name.as_str(), job.id, self.name.as_str());
        let claimant = Claimant { job: name, job_id, line, by, start };
        Storage::open(url)?.claim(&claimant).await
    }

    /// States that a job is over, in a task of its own.
    fn end_claims(&self, inner: &mut Inner, job: JobRef, urls: BTreeSet<String>) {
        if urls.is_empty() || !self.is_leader() {
            return;
        }
        let name = job.name.clone();
        let task = self.completions.spawn(storage::end_claims(job, urls));
        inner.ending.retain(|_, earlier| !earlier.is_finished());
        inner.ending.insert(name, task);
    }

    /// Waits until the last job of this name is stated to be over.
    async fn claims_ended(&self, job: &str) {
        let task = self.lock().ending.remove(job);
        if let Some(task) = task {
            // The task logs its errors, and then another job cannot claim the checkpoints.
            let _ = task.await;
        }
    }

    /// Completes a checkpoint in a task of its own.
    fn complete(&self, completion: Completion) {
        let Some(driver) = self.me.upgrade() else { return };
        self.completions.spawn(async move {
            let (job, save) = (completion.job.clone(), completion.plan.save);
            let plan = completion.plan.clone();
            let check_leader = || driver.read(|_| ());
            let complete = async {
                let outcome = storage::complete(completion, check_leader).await;
                // A job that is to return to a checkpoint waits until none is being removed.
                if outcome.is_ok() && driver.is_leader() {
                    storage::prune(&job, &plan).await;
                }
                driver.tell(Event::Completed { job, save, outcome });
            };
            driver.failure.guard("the manifest of a checkpoint", complete).await;
        });
    }

    /// Shows the servers, and the jobs that have changed, in the metrics.
    pub(super) fn show(&self, inner: &mut Inner) {
        let Inner { cluster, series, .. } = inner;
        let metrics = &self.metrics.coordinator;
        let changed = cluster.take_changed();
        let servers = &cluster.common().servers;
        metrics.show_servers(servers.connected().len(), servers.missing().len());
        for name in changed {
            let Some(job) = cluster.jobs().get(&*name) else { continue };
            let series = series.entry(name.to_string()).or_insert_with(|| metrics.job(&name));
            metrics.show(series, &job.metrics());
        }
    }
}

impl Inner {
    /// Counts something in the metrics of a job, which has none before it is shown.
    fn count(&self, job: &str, count: impl FnOnce(&CoordinatedJob)) {
        if let Some(series) = self.series.get(job) {
            count(series);
        }
    }

    /// Sends a command. A server that does not read its commands is dismissed, and the end of its
    /// control stream is then an ordinary event.
    fn send(&mut self, server: ServerId, command: Command) {
        let Some(outbox) = self.servers.get(&server) else { return };
        let link = Link { server, stream: outbox.stream };
        match outbox.commands.try_send(command) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.dismiss(link, &format!("it did not read {MAX_COMMANDS} commands"));
            }
            Err(TrySendError::Closed(_)) => self.dismiss(link, "its control stream ended"),
        }
    }

    fn dismiss(&mut self, link: Link, cause: &str) {
        if self.servers.get(&link.server).is_some_and(|known| known.stream == link.stream)
            && let Some(server) = self.servers.remove(&link.server)
        {
            server.dismissal.dismiss(cause);
        }
    }
}
