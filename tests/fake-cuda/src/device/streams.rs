//! Calls on streams and events, and the order in which operations run.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{
    Device,
    queue::{Event, Operation, Stream},
    work::{Mark, Work},
};
use crate::{
    codes::{Code, INVALID_HANDLE, NOT_READY},
    order::Stamp,
};

impl Device {
    pub(crate) fn create_stream(&mut self) -> u64 {
        let handle = self.handle();
        self.streams.insert(handle, Stream::new(self.stream_count));
        self.stream_count += 1;
        handle
    }

    /// Destroys a stream, when its operations have run.
    pub(crate) fn destroy_stream(&mut self, handle: u64) -> Result<(), Code> {
        if handle == 0 || !self.streams.contains_key(&handle) {
            return Err(self.bad_handle("stream", handle));
        }
        let has_run = self.run_until(|device| device.streams[&handle].queue.is_empty());
        self.streams.remove(&handle);
        has_run
    }

    pub(crate) fn create_event(&mut self, has_time: bool) -> u64 {
        let handle = self.handle();
        self.events.insert(handle, Event { has_time, mark: None });
        handle
    }

    pub(crate) fn destroy_event(&mut self, handle: u64) -> Result<(), Code> {
        match self.events.remove(&handle) {
            Some(_) => Ok(()),
            None => Err(self.bad_handle("event", handle)),
        }
    }

    /// Adds an operation to a stream.
    pub(crate) fn enqueue(&mut self, stream: u64, work: Work) -> Result<(), Code> {
        let fails = self.injections.take_late();
        let Some(of) = self.streams.get_mut(&stream) else {
            self.bad_handle("stream", stream);
            return Err(INVALID_HANDLE);
        };
        of.clock.join(&self.host);
        of.clock.set(of.number, of.clock.of(of.number) + 1);
        let name = format!("{work} ({} of stream {})", of.clock.of(of.number), of.number);
        let stamp = Stamp { stream: of.number, clock: of.clock.clone(), name };
        of.queue.push_back(Operation { stamp: Arc::new(stamp), work, fails });
        Ok(())
    }

    /// Adds an operation to a stream. On a device that is lost, it runs at once.
    pub(crate) fn enqueue_or_run(&mut self, stream: u64, work: Work) -> Result<(), Code> {
        self.enqueue(stream, work)?;
        if self.sticky.is_some() {
            self.abandon();
        }
        Ok(())
    }

    /// Has an event record the operations of a stream.
    pub(crate) fn record(&mut self, event: u64, stream: u64) -> Result<(), Code> {
        if !self.events.contains_key(&event) {
            return Err(self.bad_handle("event", event));
        }
        let Some(of) = self.streams.get(&stream) else {
            return Err(self.bad_handle("stream", stream));
        };
        let mut clock = of.clock.clone();
        clock.join(&self.host);
        let (has_come, time) = (AtomicBool::new(false), AtomicU64::new(0));
        let mark = Arc::new(Mark { clock, has_come, time });
        self.events.get_mut(&event).expect("it exists").mark = Some(mark.clone());
        self.enqueue(stream, Work::Record(mark))
    }

    /// Has later operations of a stream wait for what an event has recorded.
    pub(crate) fn wait(&mut self, stream: u64, event: u64) -> Result<(), Code> {
        let Some(mark) = self.mark(event)? else { return Ok(()) };
        let Some(of) = self.streams.get_mut(&stream) else {
            return Err(self.bad_handle("stream", stream));
        };
        of.clock.join(&mark.clock);
        self.enqueue(stream, Work::Wait(mark))
    }

    /// What an event has recorded last.
    pub(crate) fn mark(&mut self, event: u64) -> Result<Option<Arc<Mark>>, Code> {
        match self.events.get(&event) {
            Some(event) => Ok(event.mark.clone()),
            None => Err(self.bad_handle("event", event)),
        }
    }

    /// The milliseconds in kernels between two events.
    pub(crate) fn elapsed(&mut self, start: u64, end: u64) -> Result<f32, Code> {
        let mut times = [0; 2];
        for (event, time) in [start, end].into_iter().zip(&mut times) {
            let mark = self.mark(event)?;
            if !self.events[&event].has_time {
                return Err(self.bad_handle("timed event", event));
            }
            let mark = mark.ok_or_else(|| self.bad_handle("recorded event", event))?;
            if !mark.has_come() {
                return Err(NOT_READY);
            }
            *time = mark.time.load(Ordering::Relaxed);
        }
        Ok((times[1] as f64 - times[0] as f64) as f32 / 1e6)
    }

    /// Waits for what an event has recorded.
    pub(crate) fn synchronize_event(&mut self, event: u64) -> Result<(), Code> {
        if let Some(mark) = self.mark(event)? {
            self.run_until(|_| mark.has_come())?;
            self.host.join(&mark.clock);
        }
        Ok(())
    }

    /// Waits for the operations of a stream.
    pub(crate) fn synchronize_stream(&mut self, stream: u64) -> Result<(), Code> {
        if !self.streams.contains_key(&stream) {
            return Err(self.bad_handle("stream", stream));
        }
        self.run_until(|device| device.streams[&stream].queue.is_empty())?;
        let clock = self.streams[&stream].clock.clone();
        self.host.join(&clock);
        Ok(())
    }

    /// Waits for all operations.
    pub(crate) fn synchronize(&mut self) -> Result<(), Code> {
        self.run_until(|device| device.busy().is_empty())?;
        for stream in self.streams.values() {
            self.host.join(&stream.clock);
        }
        Ok(())
    }

    /// Returns whether a stream has nothing to do. The program knows it then.
    pub(crate) fn query_stream(&mut self, stream: u64) -> Result<bool, Code> {
        let Some(of) = self.streams.get(&stream) else {
            return Err(self.bad_handle("stream", stream));
        };
        if of.queue.is_empty() {
            self.host.join(&of.clock);
            return Ok(true);
        }
        Ok(false)
    }

    /// Returns whether what an event has recorded is complete. The program knows it then.
    pub(crate) fn query_event(&mut self, event: u64) -> Result<bool, Code> {
        match self.mark(event)? {
            None => Ok(true),
            Some(mark) => {
                if mark.has_come() {
                    self.host.join(&mark.clock);
                }
                Ok(mark.has_come())
            }
        }
    }

    /// A stamp for what the program does itself, after all that it has waited for.
    pub(crate) fn host_stamp(&mut self, name: &str) -> Arc<Stamp> {
        // The default stream stands for the program.
        let clock = self.host.clone();
        Arc::new(Stamp { stream: 0, clock, name: name.to_owned() })
    }

    /// Runs some operations, or none.
    pub(super) fn drift(&mut self) {
        let count = self.random.below(8).saturating_sub(4);
        for _ in 0..count {
            self.run_one();
        }
    }

    pub(super) fn run_all(&mut self) {
        while self.sticky.is_none() && self.run_one() {}
    }

    /// Runs all operations. The program does not know that they are complete.
    pub(crate) fn finish_all(&mut self) -> Result<(), Code> {
        self.run_all();
        self.sticky.map_or(Ok(()), Err)
    }

    /// Runs operations of all streams until a condition holds.
    fn run_until(&mut self, holds: impl Fn(&Device) -> bool) -> Result<(), Code> {
        while !holds(self) {
            if let Some(code) = self.sticky {
                return Err(code);
            }
            // What a stream waits for was enqueued before, so some stream can go on.
            assert!(self.run_one(), "an operation waits for one that was enqueued before");
        }
        self.sticky.map_or(Ok(()), Err)
    }

    /// Runs the next operation of any stream that does not wait. Returns whether there was one.
    fn run_one(&mut self) -> bool {
        let mut ready = self.busy();
        ready.retain(|handle| match &self.streams[handle].queue[0].work {
            Work::Wait(mark) => mark.has_come(),
            Work::Receive { message, .. } => message.is_ready(),
            _ => true,
        });
        if ready.is_empty() {
            return false;
        }
        let chosen = self.random.below(ready.len() as u64) as usize;
        let operation = ready.iter().nth(chosen).and_then(|handle| self.streams.get_mut(handle));
        let Some(operation) = operation.and_then(|stream| stream.queue.pop_front()) else {
            return false;
        };
        self.figures.operations += 1;
        if let Err(code) = self.run(operation) {
            self.fail(code);
        }
        true
    }

    /// Gives all operations up, except that memory is freed.
    pub(super) fn abandon(&mut self) {
        for stream in self.streams.values_mut() {
            for operation in stream.queue.drain(..) {
                match operation.work {
                    Work::Free(base) => drop(self.memory.free(base, &operation.stamp)),
                    Work::Record(mark) => mark.come(self.figures.nanoseconds),
                    _ => {}
                }
            }
        }
        self.pinned.forget_pending();
        self.memory.races.clear();
    }
}
