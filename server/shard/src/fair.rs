//! Shares a resource of a server among jobs by weight.
//!
//! Work is done in pieces of bounded size, and each piece needs a [`Turn`]. While the resource is
//! free, a job takes a turn immediately. Otherwise, the next turn goes to the waiting job that has
//! used the least in relation to its weight, regardless of the number of its waiting calls. The
//! order of turns does not affect results.
//!
//! The algorithm is start-time fair queuing (P. Goyal, H. Vin, H. Cheng: "Start-Time Fair Queuing:
//! A Scheduling Algorithm for Integrated Services Packet Switching Networks", SIGCOMM 1996), which
//! does not need the capacity of the resource. The exact cost of a turn may be known at its end, as
//! in P. Goyal, X. Guo, H. Vin: "A Hierarchical CPU Scheduler for Multimedia Operating Systems",
//! OSDI 1996.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use tokio::sync::oneshot;

/// The weights that a job may have.
pub use zeroshard_model::quota::WEIGHTS;

/// The units of virtual time per unit of cost, so that a division by a large weight does not round
/// to zero.
const SCALE: u64 = *WEIGHTS.end() as u64;

/// The number of turns in a row after which a job may be alone.
const ALONE: u32 = 64;

/// The recent service covers at most this many units of cost: 1 GiB of the network.
const RECENT: u64 = 1 << 30;

/// A job counts as a neighbour only if its part of the recent service is larger than one divided by
/// this number.
const SMALLEST: u64 = 256;

/// A resource with a fixed number of turns that can be taken at the same time.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    /// The number of waiting turns. It can be read without the lock.
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// The current virtual time: the start of the last turn.
    now: u64,
    flows: BTreeMap<u64, Flow>,
    last_flow: u64,
    /// The flow of the last turn, and the number of turns in a row that it has had.
    served: (u64, u32),
    /// The sum of the recent service of all flows.
    recent: u64,
}

/// The turns of a job.
#[derive(Debug)]
struct Flow {
    weight: u32,
    /// The virtual time at which the last turn of the job ends.
    end: u64,
    /// The waiting turns and their costs.
    waiting: VecDeque<(u64, Waiter)>,
    /// The turns that have been taken and not returned.
    taken: usize,
    /// The recent service: the expected costs of its turns.
    recent: u64,
}

/// The receiver of a turn.
#[derive(Debug)]
enum Waiter {
    Task(oneshot::Sender<Turn>),
    Thread(mpsc::Sender<Option<Turn>>),
}

impl Waiter {
    fn is_gone(&self) -> bool {
        matches!(self, Self::Task(task) if task.is_closed())
    }

    /// Passes on a turn. The turn is dropped, and thereby returned, if its receiver has gone.
    fn send(self, turn: Turn) {
        match self {
            Self::Task(task) => drop(task.send(turn)),
            Self::Thread(thread) => drop(thread.send(Some(turn))),
        }
    }
}

impl Queue {
    pub fn new(turns: usize) -> Arc<Self> {
        let flows = BTreeMap::new();
        let state = Mutex::new(State {
            free: turns,
            now: 0,
            flows,
            last_flow: 0,
            served: (0, 0),
            recent: 0,
        });
        Arc::new(Self { state, waiting: AtomicUsize::new(0) })
    }

    /// Creates the share of a job, with the weight 1.
    pub fn share(self: &Arc<Self>) -> Share {
        let mut state = self.lock();
        state.last_flow += 1;
        let (flow, end) = (state.last_flow, state.now);
        state
            .flows
            .insert(flow, Flow { weight: 1, end, waiting: VecDeque::new(), taken: 0, recent: 0 });
        Share { queue: self.clone(), flow }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the lock panics")
    }

    /// Begins waiting turns while turns are free.
    fn begin_waiting(self: &Arc<Self>) {
        loop {
            let (turn, waiter) = {
                let mut state = self.lock();
                if state.free == 0 {
                    return;
                }
                let Some((flow, cost, waiter)) = self.next_waiting(&mut state) else { return };
                state.begin(flow, cost);
                (Turn { queue: self.clone(), flow, cost }, waiter)
            };
            // The lock must not be held, because a turn whose receiver has gone is returned here.
            waiter.send(turn);
        }
    }

    /// Removes and returns the next waiting turn.
    fn next_waiting(&self, state: &mut State) -> Option<(u64, u64, Waiter)> {
        loop {
            let waiting = state.flows.iter_mut().filter(|(_, flow)| !flow.waiting.is_empty());
            let (&number, flow) = waiting.min_by_key(|(_, flow)| flow.end)?;
            let (cost, waiter) = flow.waiting.pop_front()?;
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            if !waiter.is_gone() {
                return Some((number, cost, waiter));
            }
        }
    }
}

impl State {
    /// Begins a turn of a job.
    fn begin(&mut self, flow: u64, cost: u64) {
        self.free -= 1;
        let (last, turns) = self.served;
        self.served = (flow, if flow == last { turns.saturating_add(1) } else { 1 });
        let Some(flow) = self.flows.get_mut(&flow) else { return };
        self.now = self.now.max(flow.end);
        flow.taken += 1;
        flow.charge(cost);
        flow.recent = flow.recent.saturating_add(cost);
        self.recent = self.recent.saturating_add(cost);
        if self.recent > RECENT {
            self.flows.values_mut().for_each(|flow| flow.recent /= 2);
            self.recent = self.flows.values().map(|flow| flow.recent).sum();
        }
    }

    /// Returns whether only this job has had turns for a while, and no other job has or wants one.
    fn is_alone(&self, flow: u64) -> bool {
        let is_idle = |other: &Flow| other.taken == 0 && other.waiting.is_empty();
        self.served.0 == flow
            && self.served.1 > ALONE
            && self.flows.iter().all(|(&number, other)| number == flow || is_idle(other))
    }

    /// Returns whether a job has received more than one and a half times its share of the recent
    /// service.
    fn is_ahead(&self, flow: u64) -> bool {
        let Some(flow) = self.flows.get(&flow) else { return false };
        let jobs = self.flows.values().filter(|other| other.recent > self.recent / SMALLEST);
        let weights = jobs.map(|other| u128::from(other.weight)).sum::<u128>();
        2 * u128::from(flow.recent) * weights
            > 3 * u128::from(self.recent) * u128::from(flow.weight)
    }
}

impl Flow {
    /// The virtual time that a cost takes.
    fn scaled(&self, cost: u64) -> u64 {
        cost.saturating_mul(SCALE) / u64::from(self.weight)
    }

    fn charge(&mut self, cost: u64) {
        self.end = self.end.saturating_add(self.scaled(cost));
    }
}

/// The share of a job in a resource.
#[derive(Debug)]
pub struct Share {
    queue: Arc<Queue>,
    flow: u64,
}

impl Share {
    /// Sets the weight of the job in relation to other jobs.
    pub fn weigh(&self, weight: u32) {
        if let Some(flow) = self.queue.lock().flows.get_mut(&self.flow) {
            flow.weight = weight.clamp(*WEIGHTS.start(), *WEIGHTS.end());
        }
    }

    /// Waits for a turn of this cost, which is a number of bytes or elements. The turn ends when it
    /// is dropped.
    pub async fn turn(&self, cost: u64) -> Turn {
        let (sender, turn) = oneshot::channel();
        match self.enter(cost, || Waiter::Task(sender)) {
            Some(turn) => turn,
            None => turn.await.expect("the share keeps its waiting turns"),
        }
    }

    /// Like [`Self::turn`], on a thread that may block.
    pub fn blocking_turn(&self, cost: u64) -> Turn {
        let (sender, turns) = mpsc::channel();
        self.ask(cost, &sender);
        turns.recv().ok().flatten().expect("the share keeps its waiting turns")
    }

    /// Requests a turn, which is sent to `turns` immediately or later.
    pub fn ask(&self, cost: u64, turns: &mpsc::Sender<Option<Turn>>) {
        if let Some(turn) = self.enter(cost, || Waiter::Thread(turns.clone())) {
            // The receiver is dropped when it needs no further turns.
            let _ = turns.send(Some(turn));
        }
    }

    /// Begins a turn if one is free. Otherwise adds `waiter` to the waiting turns.
    fn enter(&self, cost: u64, waiter: impl FnOnce() -> Waiter) -> Option<Turn> {
        let mut state = self.queue.lock();
        let (is_free, now) = (state.free > 0, state.now);
        let flow = state.flows.get_mut(&self.flow)?;
        if flow.taken == 0 && flow.waiting.is_empty() {
            // A job cannot save up the time in which it was idle.
            flow.end = flow.end.max(now);
        }
        if is_free {
            state.begin(self.flow, cost);
            return Some(Turn { queue: self.queue.clone(), flow: self.flow, cost });
        }
        flow.waiting.push_back((cost, waiter()));
        self.queue.waiting.fetch_add(1, Ordering::Relaxed);
        None
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        let flow = state.flows.remove(&self.flow);
        state.recent = state.recent.saturating_sub(flow.as_ref().map_or(0, |flow| flow.recent));
        drop(state);
        let waiting = flow.map_or(0, |flow| flow.waiting.len());
        self.queue.waiting.fetch_sub(waiting, Ordering::Relaxed);
    }
}

/// The permission to do a piece of work.
#[derive(Debug)]
pub struct Turn {
    queue: Arc<Queue>,
    flow: u64,
    cost: u64,
}

impl Turn {
    /// Returns whether another turn waits, so that this one should end after the current piece.
    pub fn is_wanted(&self) -> bool {
        self.queue.waiting.load(Ordering::Relaxed) > 0
    }

    /// Ends the turn, and replaces its expected cost by the actual cost.
    pub fn end(mut self, cost: u64) {
        let expected = std::mem::replace(&mut self.cost, cost);
        if let Some(flow) = self.queue.lock().flows.get_mut(&self.flow) {
            flow.end = flow.end.saturating_sub(flow.scaled(expected));
            flow.charge(cost);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let is_wanted = {
            let mut state = self.queue.lock();
            state.free += 1;
            if let Some(flow) = state.flows.get_mut(&self.flow) {
                flow.taken -= 1;
            }
            self.is_wanted()
        };
        if is_wanted {
            self.queue.begin_waiting();
        }
    }
}

/// The resources of a shard server that jobs share.
#[derive(Debug)]
pub struct Resources {
    network: Arc<Queue>,
    apply: Arc<Queue>,
    memory: Arc<Queue>,
}

impl Default for Resources {
    fn default() -> Self {
        Self::new()
    }
}

impl Resources {
    /// The resources of this machine.
    pub fn new() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            network: Queue::new(cores),
            apply: Queue::new(cores),
            // A single thread is enough to saturate the memory of the machine.
            memory: Queue::new(1),
        }
    }

    /// Creates the shares of a job.
    pub fn shares(&self) -> Shares {
        let Self { network, apply, memory } = self;
        Shares { network: network.share(), apply: apply.share(), memory: memory.share() }
    }
}

/// Ends a turn of the network after all tasks that wait for a thread have run, among them those
/// that receive and send the bytes of the turn. This takes no time while threads are idle. On a
/// busy server it takes longer, so that a job with many streams takes its turns one after the
/// other.
///
/// The turn of a job that is alone ends at once. A task that lets others run may continue on
/// another thread, where the data of the stream is not in the cache, and its connection follows it.
///
/// Turns only divide the time of this server. If the processors are busy, a job that has received
/// more than its share also takes time from other processes, among them the workers of other jobs
/// on the same machine. Its turns therefore let the waiting threads of other processes run first.
pub async fn end_after_others(turn: Turn) {
    let (is_alone, is_ahead) = {
        let state = turn.queue.lock();
        let is_alone = state.is_alone(turn.flow);
        (is_alone, !is_alone && state.is_ahead(turn.flow))
    };
    if is_ahead {
        thread::yield_now();
    }
    if !is_alone {
        tokio::task::yield_now().await;
    }
    drop(turn);
}

/// The shares of a job in the resources of a shard server.
#[derive(Debug)]
pub struct Shares {
    /// The threads of the network, in bytes.
    pub network: Share,
    /// The threads that apply steps, in elements.
    pub apply: Share,
    /// The thread that populates the memory of jobs that are being opened, in elements.
    pub memory: Share,
}

impl Shares {
    /// Sets the weight of the job in all resources.
    pub fn weigh(&self, weight: u32) {
        [&self.network, &self.apply, &self.memory].iter().for_each(|share| share.weigh(weight));
    }
}

#[cfg(test)]
#[path = "fair/tests.rs"]
mod tests;
