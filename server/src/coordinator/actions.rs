//! Carries out the actions of the state machine. This module runs under the driver's lock, so no
//! function waits.

use std::task::Waker;

use zeroshard_proto::Result;

use super::{
    cluster::Gauges,
    driver::{Driver, Inner, MemberStream},
    events::{Action, Command, Event, Link, Placed, Placing, ServerId},
    jobs::Plan,
    save::Completion,
    storage,
};

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
                Action::Command(server, command) => inner.send(server, command),
                Action::Place(placing) => self.place(placing),
                Action::Wake(lease) => {
                    if let Some(waker) = inner.members.get_mut(&lease).and_then(|m| m.waker.take())
                    {
                        waker.wake();
                    }
                }
                Action::Attached(lease) => {
                    inner.members.insert(lease, MemberStream::default());
                }
                Action::End(lease, error) => {
                    if let Some(member) = inner.members.get_mut(&lease) {
                        member.ended = Some(error);
                        member.waker.take().into_iter().for_each(Waker::wake);
                    }
                }
                Action::Dismiss(link) => inner.dismiss(link),
                Action::Probe(server) => self.probe(inner, server),
                Action::Decided { applied, commit_spread, ready_wait } => {
                    let steps = &self.metrics.steps;
                    if applied {
                        steps.applied.inc()
                    } else {
                        steps.skipped.inc()
                    }
                    steps.commit_spread.observe(commit_spread.as_secs_f64());
                    steps.ready_wait.observe(ready_wait.as_secs_f64());
                }
                Action::Tick(due) => self.arm(inner, due),
                Action::Complete(completion) => self.complete(completion),
                Action::SaveEnded { succeeded } => {
                    let saves = &self.metrics.saves;
                    if succeeded { saves.succeeded.inc() } else { saves.failed.inc() }
                }
                Action::Redundant { after } => {
                    self.metrics.degraded.observe(after.as_secs_f64());
                }
                Action::Aborted => self.metrics.steps.aborted.inc(),
                Action::Forgotten { job } => self.metrics.forget_job(&job),
                Action::Note(note) => tracing::info!("{note}"),
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
        let (checkpoint, user_data) = storage::find(&placing).await?;
        let Placing { spec, live, zones, rooms, .. } = placing;
        let plan = move || Plan::within(&spec, &live, &zones, &rooms);
        let plan = self.failure.blocking("place a job", plan).await?;
        Ok(Placed { plan, checkpoint, user_data })
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
                let is_complete = outcome.is_ok();
                driver.tell(Event::Completed { job: job.clone(), save, outcome });
                if is_complete && driver.is_leader() {
                    storage::prune(&job.name, &plan).await;
                }
            };
            driver.failure.guard("the manifest of a checkpoint", complete).await;
        });
    }

    pub(super) fn show(&self, inner: &Inner) {
        let (servers, jobs) = inner.cluster.gauges();
        self.metrics.servers.set(servers as i64);
        for Gauges { job, epoch, version, workers, degraded } in jobs {
            let slices = self.metrics.degraded_slices.with_label_values(&[job]);
            slices.set(degraded as i64);
            self.metrics.epoch.with_label_values(&[job]).set(epoch as i64);
            self.metrics.workers.with_label_values(&[job]).set(workers as i64);
            if let Some(version) = version {
                self.metrics.version.with_label_values(&[job]).set(version as i64);
            }
        }
    }
}

impl Inner {
    /// Sends a command. A server that does not read its commands is dismissed, and the end of its
    /// control stream is then an ordinary event.
    fn send(&mut self, server: ServerId, command: Command) {
        if let Some(outbox) = self.servers.get(&server)
            && outbox.commands.try_send(command).is_err()
        {
            let link = Link { server, stream: outbox.stream };
            self.dismiss(link);
        }
    }

    fn dismiss(&mut self, link: Link) {
        if self.servers.get(&link.server).is_some_and(|known| known.stream == link.stream)
            && let Some(server) = self.servers.remove(&link.server)
        {
            server.dismissed.cancel();
        }
    }
}
