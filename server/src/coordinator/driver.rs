//! The only clock of the coordinator: hands events to the state, and does what it says.
//!
//! The state is behind a mutex that is held for a moment and never across an await; what is done under it
//! is sending into channels, so commands to a server leave in the order of the decisions.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use zeroshard_proto::{Error, Result, pb};

use super::{
    cluster::{Cluster, IDLE},
    state::{Action, Caller, Event, Lease, Now, Reply, ServerId},
};
use crate::metrics::Metrics;

/// What a stream to a server or worker carries. Unbounded: both get few and small messages, and HTTP/2
/// keepalive ends the stream of one that does not read.
type Outbox<T> = mpsc::UnboundedSender<Result<T, Status>>;
type Inbox<T> = mpsc::UnboundedReceiver<Result<T, Status>>;

/// Runs one [`Cluster`].
#[derive(Debug)]
pub(crate) struct Driver {
    started: Instant,
    metrics: Arc<Metrics>,
    inner: Mutex<Inner>,
    /// Wakes the timer for an earlier deadline.
    wake: Notify,
}

#[derive(Debug)]
struct Inner {
    cluster: Cluster,
    calls: HashMap<Caller, oneshot::Sender<Result<Reply>>>,
    servers: HashMap<ServerId, (Outbox<pb::ServerCommand>, CancellationToken)>,
    members: HashMap<Lease, Outbox<pb::Membership>>,
    last_caller: u64,
    last_lease: u64,
    last_server: ServerId,
    /// When the timer rings.
    armed: Now,
    stopped: bool,
}

/// A server's control stream.
pub(crate) struct Control {
    pub(crate) server: ServerId,
    pub(crate) commands: Inbox<pb::ServerCommand>,
    /// Cancelled when the server is given up.
    pub(crate) dismissed: CancellationToken,
}

impl Driver {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        let inner = Inner {
            cluster: Cluster::default(),
            calls: HashMap::new(),
            servers: HashMap::new(),
            members: HashMap::new(),
            last_caller: 0,
            last_lease: 0,
            last_server: 0,
            armed: Now::MAX,
            stopped: false,
        };
        Arc::new(Self { started: Instant::now(), metrics, inner: Mutex::new(inner), wake: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nothing panics while it is held")
    }

    /// Reads the state.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Cluster) -> T) -> T {
        read(&self.lock().cluster)
    }

    /// Hands over an event that nobody waits for.
    pub(crate) fn tell(&self, event: Event) {
        self.handle(&mut self.lock(), event);
    }

    /// Hands over an event and waits for its answer; the state answers at the event's deadline at the latest.
    pub(crate) async fn call(&self, event: impl FnOnce(Caller) -> Event) -> Result<Reply> {
        let (sender, answer) = oneshot::channel();
        {
            let mut inner = self.lock();
            inner.check_running()?;
            inner.last_caller += 1;
            let caller = Caller(inner.last_caller);
            inner.calls.insert(caller, sender);
            self.handle(&mut inner, event(caller));
        }
        answer.await.unwrap_or_else(|_| Err(Error::Internal { cause: "a call was dropped".to_owned() }))
    }

    /// Takes in a shard server that others reach at `address`.
    pub(crate) fn add_server(&self, address: String) -> Result<Control> {
        let mut inner = self.lock();
        inner.check_running()?;
        inner.last_server += 1;
        let (server, dismissed) = (inner.last_server, CancellationToken::new());
        let (outbox, commands) = mpsc::unbounded_channel();
        inner.servers.insert(server, (outbox, dismissed.clone()));
        self.handle(&mut inner, Event::ServerJoined { server, address });
        Ok(Control { server, commands, dismissed })
    }

    /// A new lease and the stream of its memberships; it holds nothing yet.
    pub(crate) fn add_lease(&self) -> (Lease, Inbox<pb::Membership>) {
        let mut inner = self.lock();
        inner.last_lease += 1;
        let lease = Lease(inner.last_lease);
        let (outbox, memberships) = mpsc::unbounded_channel();
        inner.members.insert(lease, outbox);
        (lease, memberships)
    }

    /// The worker's stream has ended, however.
    pub(crate) fn end_lease(&self, job: String, lease: Lease) {
        let mut inner = self.lock();
        inner.members.remove(&lease);
        self.handle(&mut inner, Event::LeaseEnded { job, lease });
    }

    /// Looks at the clock until `shutdown`; then ends every call and stream.
    pub(crate) async fn run(&self, shutdown: CancellationToken) {
        loop {
            let until = {
                let mut inner = self.lock();
                inner.armed = inner.cluster.next_deadline().unwrap_or(Now::MAX);
                inner.armed.saturating_sub(self.started.elapsed()).min(IDLE)
            };
            tokio::select! {
                () = tokio::time::sleep(until) => self.tell(Event::Tick),
                () = self.wake.notified() => {}
                () = shutdown.cancelled() => break,
            }
        }
        let mut inner = self.lock();
        inner.stopped = true;
        let actions = inner.cluster.stop();
        self.act(&mut inner, actions);
        for (_, dismissed) in std::mem::take(&mut inner.servers).into_values() {
            dismissed.cancel();
        }
    }

    fn handle(&self, inner: &mut Inner, event: Event) {
        let now = self.started.elapsed();
        if let Event::Create { wait, .. } = &event {
            self.arm(inner, now + *wait);
        } else if let Event::Commit { commit, .. } = &event {
            self.arm(inner, now + commit.wait);
        } else if let Event::Reduce { reduce, .. } = &event {
            self.arm(inner, now + reduce.wait);
        }
        let actions = inner.cluster.handle(event, now);
        self.act(inner, actions);
        self.show(inner);
    }

    /// Has the timer ring no later than `deadline`.
    fn arm(&self, inner: &mut Inner, deadline: Now) {
        if deadline < inner.armed {
            inner.armed = deadline;
            self.wake.notify_one();
        }
    }

    fn act(&self, inner: &mut Inner, actions: Vec<Action>) {
        // Sending fails when the other side has gone; then it also hears no answer.
        for action in actions {
            match action {
                Action::Answer(caller, answer) => {
                    if let Some(call) = inner.calls.remove(&caller) {
                        let _ = call.send(answer);
                    }
                }
                Action::Command(server, command) => {
                    if let Some((outbox, _)) = inner.servers.get(&server) {
                        let _ = outbox.send(Ok(pb::ServerCommand { command: Some(command), term: 0 }));
                    }
                }
                Action::Tell(lease, membership) => {
                    if let Some(outbox) = inner.members.get(&lease) {
                        let _ = outbox.send(Ok(membership));
                    }
                }
                Action::End(lease, error) => {
                    if let Some(outbox) = inner.members.remove(&lease)
                        && let Some(error) = error
                    {
                        let _ = outbox.send(Err(error.into()));
                    }
                }
                Action::Dismiss(server) => {
                    if let Some((_, dismissed)) = inner.servers.remove(&server) {
                        dismissed.cancel();
                    }
                }
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
                Action::Aborted => self.metrics.steps.aborted.inc(),
                Action::Forgotten { job } => self.metrics.forget_job(&job),
                Action::Note(note) => tracing::info!("{note}"),
            }
        }
    }

    fn show(&self, inner: &Inner) {
        let (servers, jobs) = inner.cluster.gauges();
        self.metrics.servers.set(servers as i64);
        for (job, epoch, version, workers) in jobs {
            self.metrics.epoch.with_label_values(&[job]).set(epoch as i64);
            self.metrics.workers.with_label_values(&[job]).set(workers as i64);
            if let Some(version) = version {
                self.metrics.version.with_label_values(&[job]).set(version as i64);
            }
        }
    }
}

impl Inner {
    fn check_running(&self) -> Result<()> {
        if self.stopped {
            let cause = "it is shutting down".to_owned();
            return Err(Error::Unavailable { peer: "coordinator".to_owned(), cause });
        }
        Ok(())
    }
}
