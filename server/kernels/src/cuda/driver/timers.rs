//! The time that a device spends in kernels: events before and after the launches of an operation.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cudarc::driver::result;

use super::handles::{Event, Stream, checked};
use crate::Result;

/// The number of pairs of events. The host waits if it is ahead of the device by so many
/// operations.
const PAIRS: usize = 16;

/// The events of operations on one stream.
pub(super) struct Timers {
    device: usize,
    state: Mutex<State>,
}

struct State {
    free: Vec<Pair>,
    /// Operations whose time is not counted yet, in the order of the stream.
    pending: VecDeque<Pair>,
    time: Duration,
}

struct Pair {
    began: Event,
    ended: Event,
}

// SAFETY: objects of the driver may be used by any thread.
unsafe impl Send for Pair {}

impl Timers {
    pub(super) fn new(device: usize) -> Result<Self> {
        let pair = || Ok(Pair { began: Event::timed(device)?, ended: Event::timed(device)? });
        let free = (0..PAIRS).map(|_| pair()).collect::<Result<_>>()?;
        let state = State { free, pending: VecDeque::new(), time: Duration::ZERO };
        Ok(Self { device, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs launches on a stream, and measures the time of their kernels. The launches of different
    /// threads follow each other.
    pub(super) fn measure(
        &self,
        stream: &Stream,
        launches: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut state = self.state();
        if state.free.is_empty()
            && let Some(first) = state.pending.pop_front()
        {
            // SAFETY: the event exists.
            let ended = unsafe { result::event::synchronize(first.ended.0) };
            let counted = checked(self.device, "synchronize with the device", 0, ended)
                .and_then(|()| self.count(&mut state, &first));
            state.free.push(first);
            counted?;
        }
        let pair = state.free.pop().expect("a pair is free, pending, or in use under the lock");
        let record = |event: &Event| {
            // SAFETY: both exist.
            checked(self.device, "record an event", 0, unsafe {
                result::event::record(event.0, stream.0)
            })
        };
        let done = record(&pair.began).and_then(|()| launches()).and_then(|()| record(&pair.ended));
        match done {
            Ok(()) => state.pending.push_back(pair),
            Err(_) => state.free.push(pair),
        }
        done
    }

    /// Adds the time between the events of an operation that is complete.
    fn count(&self, state: &mut State, pair: &Pair) -> Result<()> {
        // SAFETY: both events exist, and were recorded.
        let elapsed = unsafe { result::event::elapsed(pair.began.0, pair.ended.0) };
        let milliseconds = checked(self.device, "read the time of an event", 0, elapsed)?;
        state.time += Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3);
        Ok(())
    }

    /// The time of all operations that are complete.
    pub(super) fn time(&self) -> Duration {
        let mut state = self.state();
        // SAFETY: the event exists. An error means that the operation is not complete, or that the
        // device is lost.
        let is_complete = |pair: &mut Pair| unsafe { result::event::query(pair.ended.0) }.is_ok();
        while let Some(pair) = state.pending.pop_front_if(is_complete) {
            // A device that is lost since then has no time.
            let _ = self.count(&mut state, &pair);
            state.free.push(pair);
        }
        state.time
    }
}
