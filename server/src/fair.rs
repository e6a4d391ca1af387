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
pub(crate) use zeroshard_proto::quota::WEIGHTS;

/// The units of virtual time per unit of cost, so that a division by a large weight does not round
/// to zero.
const SCALE: u64 = *WEIGHTS.end() as u64;

/// A job is alone after this number of turns in a row: at most 64 MiB of the network.
const ALONE: u32 = 64;

/// A resource with a fixed number of turns that can be taken at the same time.
#[derive(Debug)]
pub(crate) struct Queue {
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
    pub(crate) fn new(turns: usize) -> Arc<Self> {
        let flows = BTreeMap::new();
        let state = Mutex::new(State { free: turns, now: 0, flows, last_flow: 0, served: (0, 0) });
        Arc::new(Self { state, waiting: AtomicUsize::new(0) })
    }

    /// Creates the share of a job, with the weight 1.
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        let mut state = self.lock();
        state.last_flow += 1;
        let (flow, end) = (state.last_flow, state.now);
        state.flows.insert(flow, Flow { weight: 1, end, waiting: VecDeque::new(), taken: 0 });
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
pub(crate) struct Share {
    queue: Arc<Queue>,
    flow: u64,
}

impl Share {
    /// Sets the weight of the job in relation to other jobs.
    pub(crate) fn weigh(&self, weight: u32) {
        if let Some(flow) = self.queue.lock().flows.get_mut(&self.flow) {
            flow.weight = weight.clamp(*WEIGHTS.start(), *WEIGHTS.end());
        }
    }

    /// Waits for a turn of this cost, which is a number of bytes or elements. The turn ends when it
    /// is dropped.
    pub(crate) async fn turn(&self, cost: u64) -> Turn {
        let (sender, turn) = oneshot::channel();
        match self.enter(cost, || Waiter::Task(sender)) {
            Some(turn) => turn,
            None => turn.await.expect("the share keeps its waiting turns"),
        }
    }

    /// Like [`Self::turn`], on a thread that may block.
    pub(crate) fn blocking_turn(&self, cost: u64) -> Turn {
        let (sender, turns) = mpsc::channel();
        self.ask(cost, &sender);
        turns.recv().ok().flatten().expect("the share keeps its waiting turns")
    }

    /// Requests a turn, which is sent to `turns` immediately or later.
    pub(crate) fn ask(&self, cost: u64, turns: &mpsc::Sender<Option<Turn>>) {
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
        drop(state);
        let waiting = flow.map_or(0, |flow| flow.waiting.len());
        self.queue.waiting.fetch_sub(waiting, Ordering::Relaxed);
    }
}

/// The permission to do a piece of work.
#[derive(Debug)]
pub(crate) struct Turn {
    queue: Arc<Queue>,
    flow: u64,
    cost: u64,
}

impl Turn {
    /// Whether another turn waits, so that this one should end after the current piece.
    pub(crate) fn is_wanted(&self) -> bool {
        self.queue.waiting.load(Ordering::Relaxed) > 0
    }

    /// Whether only this job has had turns for a while.
    fn is_alone(&self) -> bool {
        self.queue.lock().served.1 > ALONE
    }

    /// Ends the turn, and replaces its expected cost by the actual cost.
    pub(crate) fn end(mut self, cost: u64) {
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
pub(crate) struct Resources {
    network: Arc<Queue>,
    apply: Arc<Queue>,
    memory: Arc<Queue>,
}

impl Resources {
    /// The resources of this machine.
    pub(crate) fn new() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            network: Queue::new(cores),
            apply: Queue::new(cores),
            // A single thread is enough to saturate the memory of the machine.
            memory: Queue::new(1),
        }
    }

    /// Creates the shares of a job.
    pub(crate) fn shares(&self) -> Shares {
        let Self { network, apply, memory } = self;
        Shares { network: network.share(), apply: apply.share(), memory: memory.share() }
    }
}

/// Ends a turn of the network after all tasks that wait for a thread have run, among them those
/// that receive and send the bytes of the turn. This takes no time while threads are idle. On a
/// busy server it takes longer, so that a job with many streams takes its turns one after the
/// other.
///
/// The turn of a job that is alone ends at once. A task that lets others run continues on another
/// thread, where the data of the stream is not in the cache, and its connection follows it.
pub(crate) async fn end_after_others(turn: Turn) {
    if !turn.is_alone() {
        tokio::task::yield_now().await;
    }
    drop(turn);
}

/// The shares of a job in the resources of a shard server.
#[derive(Debug)]
pub(crate) struct Shares {
    /// The threads of the network, in bytes.
    pub(crate) network: Share,
    /// The threads that apply steps, in elements.
    pub(crate) apply: Share,
    /// The thread that populates the memory of jobs that are being opened, in elements.
    pub(crate) memory: Share,
}

impl Shares {
    /// Sets the weight of the job in all resources.
    pub(crate) fn weigh(&self, weight: u32) {
        [&self.network, &self.apply, &self.memory].iter().for_each(|share| share.weigh(weight));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::{FutureExt, future::join_all};
    use proptest::prelude::*;

    use super::*;

    /// Lets each job request many turns of its cost at the same time, and returns the jobs of the
    /// first `served` turns.
    fn order(jobs: &[(u32, u64)], served: usize) -> Vec<usize> {
        let queue = Queue::new(1);
        let shares: Vec<Share> = jobs.iter().map(|_| queue.share()).collect();
        shares.iter().zip(jobs).for_each(|(share, (weight, _))| share.weigh(*weight));
        let first = queue.share();
        let busy = first.turn(0).now_or_never().unwrap();
        let order = Mutex::new(Vec::new());
        let turn = |job: usize| {
            let (shares, order) = (&shares, &order);
            async move {
                let _turn = shares[job].turn(jobs[job].1).await;
                order.lock().unwrap().push(job);
            }
        };
        let turns = (0..jobs.len()).flat_map(|job| (0..served).map(move |_| job)).map(turn);
        let mut all = pin!(join_all(turns));
        assert!(all.as_mut().now_or_never().is_none());
        drop(busy);
        while all.as_mut().now_or_never().is_none() {}
        let mut order = order.lock().unwrap().clone();
        order.truncate(served);
        order
    }

    fn count(order: &[usize], job: usize) -> usize {
        order.iter().filter(|of| **of == job).count()
    }

    #[test]
    fn a_turn_is_taken_at_once_while_some_are_free() {
        let queue = Queue::new(2);
        let (one, other) = (queue.share(), queue.share());
        let first = one.turn(1).now_or_never().unwrap();
        let second = other.blocking_turn(1);
        assert!(!second.is_wanted());
        let mut third = pin!(one.turn(1));
        assert!(third.as_mut().now_or_never().is_none() && first.is_wanted());
        drop(second);
        assert!(third.now_or_never().is_some() && !first.is_wanted());
    }

    #[test]
    fn jobs_with_the_same_weight_alternate_even_if_one_has_asked_first() {
        let order = order(&[(1, 10), (1, 10)], 20);
        assert!(order.chunks(2).all(|pair| count(pair, 0) == 1), "{order:?}");
    }

    #[test]
    fn a_job_with_small_pieces_gets_as_many_bytes_as_one_with_large_pieces() {
        let order = order(&[(1, 100), (1, 10)], 55);
        assert!((4..=6).contains(&count(&order, 0)), "{order:?}");
    }

    #[test]
    fn a_job_with_twice_the_weight_gets_twice_the_turns() {
        let order = order(&[(1, 10), (2, 10)], 30);
        assert!((9..=11).contains(&count(&order, 0)), "{order:?}");
    }

    #[test]
    fn an_idle_job_does_not_save_up_turns() {
        let queue = Queue::new(1);
        let (busy, idle) = (queue.share(), queue.share());
        (0..1000).for_each(|_| drop(busy.turn(10).now_or_never().unwrap()));
        let running = busy.turn(10).now_or_never().unwrap();
        let mut waiting = [&idle, &idle, &busy].map(|share| Box::pin(share.turn(10)));
        assert!(waiting.iter_mut().all(|turn| turn.as_mut().now_or_never().is_none()));
        drop(running);
        let first = waiting[0].as_mut().now_or_never().unwrap();
        drop(first);
        assert!(waiting[1].as_mut().now_or_never().is_none());
        assert!(waiting[2].as_mut().now_or_never().is_some());
    }

    #[test]
    fn the_turns_of_a_job_end_at_once_only_while_it_is_alone() {
        let queue = Queue::new(2);
        let (one, other) = (queue.share(), queue.share());
        let ends_at_once = |share: &Share| {
            let turn = share.turn(1).now_or_never().unwrap();
            end_after_others(turn).now_or_never().is_some()
        };
        for share in [&one, &other, &one] {
            assert!((0..ALONE).all(|_| !ends_at_once(share)));
            assert!((0..10).all(|_| ends_at_once(share)));
        }
    }

    #[test]
    fn abandoned_turns_are_returned() {
        let queue = Queue::new(1);
        let (one, other) = (queue.share(), queue.share());
        let running = one.turn(1).now_or_never().unwrap();
        let mut given_up = Box::pin(other.turn(1));
        assert!(given_up.as_mut().now_or_never().is_none());
        let mut granted = Box::pin(other.turn(1));
        assert!(granted.as_mut().now_or_never().is_none());
        drop(given_up);
        drop(running);
        // The turn has begun, and its receiver has not been polled.
        drop(granted);
        assert!(one.turn(1).now_or_never().is_some());
        drop(other);
        assert!(one.turn(1).now_or_never().is_some());
    }

    #[test]
    fn a_thread_waits_for_its_turn() {
        let queue = Queue::new(1);
        let (one, other) = (queue.share(), queue.share());
        let running = one.blocking_turn(1);
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| drop(other.blocking_turn(1)));
            while !running.is_wanted() {
                std::thread::yield_now();
            }
            drop(running);
            waits.join().unwrap();
        });
        assert!(one.turn(1).now_or_never().is_some());
    }

    proptest! {
        /// The bound of start-time fair queuing: the amounts of service that two waiting jobs have
        /// received, each divided by the weight of the job, differ by at most the sum of the
        /// largest pieces of the two jobs, each divided by its weight.
        #[test]
        fn no_job_is_ahead_of_another_by_more_than_a_piece_of_each(
            jobs in prop::collection::vec((1u32..8, 1u64..50), 2..6),
        ) {
            let order = order(&jobs, 60);
            let got = |job: usize| count(&order, job) as f64 * jobs[job].1 as f64 / f64::from(jobs[job].0);
            let piece = |job: usize| jobs[job].1 as f64 / f64::from(jobs[job].0);
            for one in 0..jobs.len() {
                for other in 0..jobs.len() {
                    let ahead = got(one) - got(other);
                    prop_assert!(ahead <= piece(one) + piece(other) + 1e-6, "{one} {other} {order:?}");
                }
            }
        }
    }
}
