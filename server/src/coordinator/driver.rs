//! The clock, the random numbers and the runtime of the coordinator. The driver passes events to
//! the state, and has its actions carried out (`actions`).
//!
//! The state is behind a mutex that is held briefly and never across an await. Under the mutex,
//! actions only send into channels and wake tasks, so commands to a server are sent in the order of
//! the decisions. Long work (placements, conversions of specs) is done without the mutex, on
//! threads outside the async runtime.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::TaskTracker,
};
use zeroshard_coordinator::{
    cluster::{Cluster, IDLE},
    operators::{
        history::{History, Journal, Severity},
        overview::{Overview, View},
    },
    state::memberships::Change,
    vocabulary::{
        calls::Reply,
        commands::Command,
        events::Event,
        ids::{Caller, Lease, Link, Now, ServerId},
    },
};
use zeroshard_model::{Error, Result, Server};

use super::{control::Registration, leadership::Leadership};
use crate::{
    failure::Failure,
    metrics::{CoordinatedJob, Metrics},
    shutdown::Shutdown,
};

/// The maximum number of commands that may wait for one server; beyond it the server is dismissed.
/// 1,000 workers that join, leave and join again while the server reads nothing need 3,000.
pub(crate) const MAX_COMMANDS: usize = 8192;

/// The parts of the process that a driver uses.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) failure: Failure,
    /// As in [`Driver`].
    pub(crate) name: String,
}

/// Runs one [`Cluster`].
#[derive(Debug)]
pub(crate) struct Driver {
    pub(super) me: Weak<Self>,
    started: Instant,
    /// Its term is part of every command to a server.
    pub(super) leadership: Leadership,
    pub(super) metrics: Arc<Metrics>,
    pub(super) failure: Failure,
    /// The name of the coordinator, which is the same after a restart: its host and port.
    pub(super) name: String,
    /// The manifests that are being written, and the old checkpoints that are being removed.
    pub(super) completions: TaskTracker,
    last_caller: AtomicU64,
    inner: Mutex<Inner>,
    /// Wakes the timer for an earlier deadline.
    wake: Notify,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) cluster: Cluster,
    pub(super) calls: HashMap<Caller, oneshot::Sender<Result<Reply>>>,
    pub(super) servers: HashMap<ServerId, ServerStream>,
    pub(super) members: HashMap<Lease, MemberStream>,
    /// The servers that are being dialled.
    pub(super) probed: HashSet<ServerId>,
    /// The metrics of each job.
    pub(super) series: HashMap<String, CoordinatedJob>,
    /// The history of each job that has made a step.
    pub(super) histories: BTreeMap<String, History>,
    pub(super) journal: Journal,
    /// The tasks that state that the last job of a name is over.
    pub(super) ending: HashMap<String, JoinHandle<()>>,
    last_stream: u64,
    /// The time at which the timer is set to fire.
    armed: Now,
    stopped: bool,
}

#[derive(Debug)]
pub(super) struct ServerStream {
    pub(super) stream: u64,
    pub(super) server: Server,
    /// Changes with each message of the server.
    pub(super) heard: watch::Sender<()>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) dismissal: Dismissal,
}

#[derive(Debug)]
pub(super) struct MemberStream {
    /// The call that has opened it. A lease may have a new stream before the end of the old one is
    /// noticed.
    opened_by: Caller,
    /// The waker of the task that reads the stream, if it waits.
    pub(super) waker: Option<Waker>,
    /// Set when the stream has ended, in order or with an error.
    pub(super) ended: Option<Option<Error>>,
}

impl MemberStream {
    pub(super) fn opened_by(opened_by: Caller) -> Self {
        Self { opened_by, waker: None, ended: None }
    }
}

/// A server's control stream.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) link: Link,
    /// As in [`ServerStream`].
    pub(crate) heard: watch::Sender<()>,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) dismissal: Dismissal,
}

/// The end of a control stream by the coordinator, with its cause.
#[derive(Debug, Clone, Default)]
pub(crate) struct Dismissal {
    dismissed: CancellationToken,
    cause: Arc<OnceLock<String>>,
}

impl Dismissal {
    /// Ends the stream. The cause of the first call counts.
    pub(super) fn dismiss(&self, cause: impl Into<String>) {
        self.cause.get_or_init(|| cause.into());
        self.dismissed.cancel();
    }

    /// Waits until the stream is ended.
    pub(super) fn ended(&self) -> WaitForCancellationFutureOwned {
        self.dismissed.clone().cancelled_owned()
    }

    /// Runs `work`, unless the stream is ended before.
    ///
    /// # Errors
    /// The cause of the end.
    pub(super) async fn until<T>(&self, work: impl Future<Output = T>) -> Result<T, String> {
        let done = self.dismissed.run_until_cancelled(work).await;
        done.ok_or_else(|| self.cause().unwrap_or_default().to_owned())
    }

    /// The cause; `None` before the end.
    pub(super) fn cause(&self) -> Option<&str> {
        self.cause.get().map(String::as_str)
    }
}

impl Driver {
    pub(crate) fn new(
        mut cluster: Cluster,
        Host { metrics, failure, name }: Host,
        leadership: Leadership,
    ) -> Arc<Self> {
        cluster.set_term(leadership.term());
        metrics.coordinator.lead();
        let inner = Inner {
            cluster,
            calls: HashMap::new(),
            servers: HashMap::new(),
            members: HashMap::new(),
            probed: HashSet::new(),
            series: HashMap::new(),
            histories: BTreeMap::new(),
            journal: Journal::default(),
            ending: HashMap::new(),
            last_stream: 0,
            armed: Now::MAX,
            stopped: false,
        };
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            last_caller: AtomicU64::new(0),
            started: Instant::now(),
            leadership,
            metrics,
            failure,
            name,
            completions: TaskTracker::new(),
            inner: Mutex::new(inner),
            wake: Notify::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nothing panics while it is held")
    }

    /// Reads the state.
    ///
    /// # Errors
    /// [`Error::Unavailable`] after the end of the leadership, or when it is shutting down.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Cluster) -> T) -> Result<T> {
        self.inspect(|inner| read(&inner.cluster))
    }

    /// Reads the state, and the history and the events that the driver keeps for operators.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub(super) fn inspect<T>(&self, read: impl FnOnce(&Inner) -> T) -> Result<T> {
        let mut inner = self.lock();
        self.check_running(&mut inner)?;
        Ok(read(&inner))
    }

    /// The state of the cluster for operators; `None` if this coordinator is no longer the leader.
    pub(crate) fn overview(&self, view: &View) -> Option<Overview> {
        let now = self.now();
        let read = self.inspect(|inner| {
            let mut overview = Overview::of(&inner.cluster, *view, &inner.histories, now);
            overview.events = inner.journal.newest(view.events);
            overview.counts = Severity::ALL.map(|least| inner.journal.count(least));
            overview
        });
        read.ok()
    }

    /// The time since the driver started.
    pub(super) fn now(&self) -> Now {
        self.started.elapsed()
    }

    /// Returns whether this coordinator is still the leader. It stays the leader while it shuts
    /// down.
    pub(super) fn is_leader(&self) -> bool {
        self.leadership.is_valid()
    }

    /// The term of the coordinator.
    pub(super) fn term(&self) -> u64 {
        self.leadership.term()
    }

    /// Passes on an event without an answer.
    pub(crate) fn tell(&self, event: Event) {
        let mut inner = self.lock();
        if self.check_running(&mut inner).is_ok() {
            self.handle(&mut inner, event);
        }
    }

    /// Passes on an event and waits for its answer, which the state sends at the event's deadline
    /// at the latest. If the future is dropped before that, the state learns that the caller has
    /// disconnected.
    pub(crate) async fn call(&self, event: impl FnOnce(Caller) -> Event) -> Result<Reply> {
        let caller = self.next_caller();
        self.call_as(caller, event(caller)).await
    }

    /// A number for a call.
    pub(crate) fn next_caller(&self) -> Caller {
        Caller(self.last_caller.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The same as [`Self::call`], with a number from [`Self::next_caller`].
    pub(crate) async fn call_as(&self, caller: Caller, event: Event) -> Result<Reply> {
        let (sender, answer) = oneshot::channel();
        let mut open = {
            let mut inner = self.lock();
            self.check_running(&mut inner)?;
            let open = OpenCall { driver: self, caller, gone: event.gone(), answered: false };
            inner.calls.insert(caller, sender);
            self.handle(&mut inner, event);
            open
        };
        let answer = answer.await;
        open.answered = true;
        answer.unwrap_or_else(|_| Err(Error::Internal { cause: "a call was dropped".to_owned() }))
    }

    /// Registers a shard server.
    pub(crate) fn add_server(&self, registration: Registration) -> Result<Control> {
        let Registration { server, about, term: before, reports } = registration;
        let mut inner = self.lock();
        self.check_running(&mut inner)?;
        if before > self.term() {
            // It refuses the commands of this coordinator.
            self.pass(before, server.id, &mut inner)?;
        }
        let term = self.term();
        inner.last_stream += 1;
        let (link, dismissal) =
            (Link { server: server.id, stream: inner.last_stream }, Dismissal::default());
        let (outbox, commands) = mpsc::channel(MAX_COMMANDS);
        let heard = watch::Sender::new(());
        let new = ServerStream {
            stream: link.stream,
            server: server.clone(),
            heard: heard.clone(),
            commands: outbox,
            dismissal: dismissal.clone(),
        };
        if let Some(old) = inner.servers.insert(server.id, new) {
            old.dismissal.dismiss("it has registered again");
        }
        let is_new = before != 0 && before != term;
        self.handle(
            &mut inner,
            Event::ServerJoined { stream: link.stream, server, about, reports, is_new },
        );
        Ok(Control { link, heard, commands, dismissal })
    }

    /// Takes a term above the one that a server has seen. The other servers count as lost until
    /// they register again and learn it: with the earlier term they may follow another coordinator.
    ///
    /// # Errors
    /// [`Error::StaleTerm`] if the coordinator has been replaced.
    fn pass(&self, seen: u64, server: ServerId, inner: &mut Inner) -> Result<()> {
        let term = self.term();
        let is_missed = inner.cluster.common().servers.misses(server);
        let is_own = inner.servers.contains_key(&server) || is_missed;
        if !self.leadership.pass(seen, is_own) {
            tracing::warn!(server = %format_args!("{server:016x}"), seen, term, is_own,
                "a server has a later coordinator and is refused");
            return Err(Error::StaleTerm { term, current: seen });
        }
        inner.cluster.set_term(self.term());
        let cause = "the coordinator has taken a higher term";
        for (server, ServerStream { stream, dismissal, .. }) in std::mem::take(&mut inner.servers) {
            dismissal.dismiss(cause);
            let from = Link { server, stream };
            self.handle(inner, Event::ServerLost { from, cause: cause.to_owned() });
        }
        Ok(())
    }

    /// The server is not dialled any more.
    pub(super) fn probed(&self, server: ServerId) {
        self.lock().probed.remove(&server);
    }

    /// Registers the stream of a lease that is about to join.
    pub(crate) fn add_lease(&self, lease: Lease, opened_by: Caller) {
        self.lock().members.insert(lease, MemberStream::opened_by(opened_by));
    }

    /// A worker's stream has ended, which the call `opened_by` had opened. The lease ends with it,
    /// unless the worker has opened another stream since, or the state has ended this one.
    pub(crate) fn end_lease(&self, job: String, rank: u32, lease: Lease, opened_by: Caller) {
        let mut inner = self.lock();
        let is_open = |stream: &&MemberStream| stream.opened_by == opened_by;
        let Some(stream) = inner.members.get(&lease).filter(is_open) else { return };
        // Then the state knows of the end, and may have learned the lease again since.
        let is_known = stream.ended.is_some();
        inner.members.remove(&lease);
        if !is_known && self.check_running(&mut inner).is_ok() {
            self.handle(&mut inner, Event::LeaseEnded { job, rank, lease });
        }
    }

    /// The next membership for a worker, or registers its waker.
    pub(crate) fn poll_membership(
        &self,
        job: &str,
        (lease, opened_by): (Lease, Caller),
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Change>>> {
        let mut inner = self.lock();
        let Inner { cluster, members, .. } = &mut *inner;
        let stream = members.get_mut(&lease).filter(|stream| stream.opened_by == opened_by);
        let Some(stream) = stream else { return Poll::Ready(None) };
        if let Some(error) = stream.ended.take() {
            members.remove(&lease);
            return Poll::Ready(error.map(Err));
        }
        match cluster.next_membership(job, lease) {
            Some(change) => Poll::Ready(Some(Ok(change))),
            None => {
                stream.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The first membership of a worker that has joined, if it still holds its lease.
    pub(crate) fn first_membership(&self, job: &str, lease: Lease) -> Option<Change> {
        self.lock().cluster.next_membership(job, lease)
    }

    /// Runs the timer until `shutdown`, then ends every call and stream. When the process is asked
    /// to stop, jobs are saved first. A checkpoint that is being completed at the end has the rest
    /// of `drain` to finish, because otherwise the old checkpoints of the job would remain until it
    /// is saved again.
    pub(crate) async fn run(&self, shutdown: &Shutdown, drain: Duration) {
        let (mut leaving, mut asked_at) = (Some(shutdown.leaving()), None);
        loop {
            if asked_at.is_some() && !self.lock().cluster.common().index.is_saving() {
                leaving = None;
            }
            let until = {
                let mut inner = self.lock();
                inner.armed = inner.cluster.next_deadline().unwrap_or(Now::MAX);
                inner.armed.saturating_sub(self.started.elapsed()).min(IDLE)
            };
            tokio::select! {
                biased;
                () = shutdown.stop().cancelled() => break,
                () = shutdown.asked(), if asked_at.is_none() => {
                    asked_at = Some(Instant::now());
                    self.tell(Event::Stopping);
                }
                () = self.wake.notified() => {}
                () = tokio::time::sleep(until) => self.tell(Event::Tick),
            }
        }
        drop(leaving);
        self.stop(&mut self.lock());
        self.completions.close();
        let left = drain.saturating_sub(asked_at.map_or(Duration::ZERO, |at| at.elapsed()));
        if tokio::time::timeout(left, self.completions.wait()).await.is_err() {
            tracing::warn!("a checkpoint was not completed, or old ones were not removed, in time");
        }
    }

    /// Ends every call and stream.
    fn stop(&self, inner: &mut Inner) {
        inner.stopped = true;
        inner.cluster = Cluster::default();
        inner.histories.clear();
        let metrics = &self.metrics.coordinator;
        inner.series.drain().for_each(|(_, series)| metrics.forget(series));
        metrics.stand_by();
        for call in std::mem::take(&mut inner.calls).into_values() {
            // Sending fails if the caller has disconnected.
            let _ = call.send(Err(self.stopped()));
        }
        for member in inner.members.values_mut() {
            member.ended.get_or_insert_with(|| Some(self.stopped()));
            member.waker.take().into_iter().for_each(Waker::wake);
        }
        for server in std::mem::take(&mut inner.servers).into_values() {
            server.dismissal.dismiss("this coordinator has stopped");
        }
    }

    /// Checks that the coordinator may decide. Each event is checked: a process that stood still
    /// for a while does not know that another coordinator was elected meanwhile.
    ///
    /// # Errors
    /// [`Error::Unavailable`] after the end of the leadership, or when it is shutting down.
    fn check_running(&self, inner: &mut Inner) -> Result<()> {
        if !inner.stopped && !self.is_leader() {
            self.stop(inner);
        }
        if inner.stopped { Err(self.stopped()) } else { Ok(()) }
    }

    /// The error of calls to a coordinator that has stopped.
    fn stopped(&self) -> Error {
        let cause =
            if self.is_leader() { "it is shutting down" } else { "it is no longer the leader" };
        Error::Unavailable { peer: "coordinator".to_owned(), cause: cause.to_owned() }
    }

    fn handle(&self, inner: &mut Inner, event: Event) {
        let now = self.now();
        if let Some(wait) = event.wait() {
            self.arm(inner, now + wait);
        }
        let ends_save = matches!(event, Event::Completed { .. } | Event::FromServer { .. });
        let actions = inner.cluster.handle(event, now);
        if ends_save && inner.cluster.is_stopping() {
            self.wake.notify_one();
        }
        self.act(inner, actions);
        self.show(inner);
    }

    /// Sets the timer to fire no later than `deadline`.
    pub(super) fn arm(&self, inner: &mut Inner, deadline: Now) {
        if deadline < inner.armed {
            inner.armed = deadline;
            self.wake.notify_one();
        }
    }
}

/// A call that waits for its answer.
struct OpenCall<'a> {
    driver: &'a Driver,
    caller: Caller,
    /// The event for the state if the caller disconnects.
    gone: Option<Event>,
    answered: bool,
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        let mut inner = self.driver.lock();
        if inner.calls.remove(&self.caller).is_some()
            && self.driver.check_running(&mut inner).is_ok()
            && let Some(gone) = self.gone.take()
        {
            self.driver.handle(&mut inner, gone);
        }
    }
}
