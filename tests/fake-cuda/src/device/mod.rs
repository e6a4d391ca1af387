//! A device, its memory and its streams, with what a program did wrong on it.
//!
//! A device has no threads. The operations of streams wait in queues, and run during later calls: a
//! few at random, and all those that a call has to wait for. The seed of the device decides which.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    codes::{Code, INVALID_HANDLE, INVALID_VALUE, is_sticky},
    fault::{Fault, Kind},
    memory::{Memory, pinned::Pinned},
    order::Clock,
    ptx::{Kernel, Module},
    random::Random,
};

mod execute;
mod injection;
mod queue;
mod streams;
mod work;

pub(crate) use injection::Injection;
use injection::Injections;
use queue::{Event, Stream};
pub(crate) use work::Work;

/// The bits of a handle below the number of its device.
const HANDLE_BITS: u32 = 32;

/// A device.
#[derive(Debug)]
pub(crate) struct Device {
    number: usize,
    pub(crate) memory: Memory,
    pub(crate) pinned: Pinned,
    random: Random,
    streams: BTreeMap<u64, Stream>,
    /// The number of streams that were ever created, with the default stream.
    stream_count: usize,
    events: BTreeMap<u64, Event>,
    modules: BTreeMap<u64, Arc<Module>>,
    functions: BTreeMap<u64, Arc<Kernel>>,
    next_handle: u64,
    /// What the program has waited for.
    host: Clock,
    /// The number of programs' references to the context.
    contexts: usize,
    sticky: Option<Code>,
    injections: Injections,
    pub(crate) faults: Vec<String>,
    pub(crate) figures: Figures,
}

/// What a device has done.
#[derive(Debug, Default, Clone, Copy)]
#[repr(C)]
pub struct Figures {
    /// Calls of functions that can fail.
    pub calls: u64,
    /// Operations of streams that have run.
    pub operations: u64,
    /// Instructions of kernels, counted for each thread.
    pub instructions: u64,
    /// The nanoseconds in kernels.
    pub nanoseconds: u64,
}

impl Device {
    pub(crate) fn new(number: usize, seed: u64, capacity: u64) -> Self {
        Self {
            number,
            memory: Memory::new(number, capacity),
            pinned: Pinned::default(),
            random: Random::new(seed),
            streams: BTreeMap::from([(0, Stream::new(0))]),
            stream_count: 1,
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            next_handle: 1,
            host: Clock::default(),
            contexts: 0,
            sticky: None,
            injections: Injections::default(),
            faults: Vec::new(),
            figures: Figures::default(),
        }
    }

    /// Begins a call that can fail: counts it, fails if it should or if the device is lost, and
    /// runs some operations of streams.
    pub(crate) fn enter(&mut self, function: &str) -> Result<(), Code> {
        self.figures.calls += 1;
        let injected = self.injections.fail(function);
        if let Some(code) = self.sticky {
            return Err(code);
        }
        if let Some(code) = injected {
            return Err(self.fail(code));
        }
        self.drift();
        // A fault of an operation may have come to light.
        self.sticky.map_or(Ok(()), Err)
    }

    /// Has calls fail.
    pub(crate) fn inject(&mut self, injection: Injection) {
        self.injections.add(injection);
    }

    /// Chooses the order of operations by another seed from here on.
    pub(crate) fn reseed(&mut self, seed: u64) {
        self.random = Random::new(seed);
    }

    /// Notes an error. If it is sticky, nothing runs any more.
    fn fail(&mut self, code: Code) -> Code {
        if is_sticky(code) && self.sticky.is_none() {
            self.sticky = Some(code);
            self.abandon();
        }
        code
    }

    /// Notes what the program did wrong.
    pub(crate) fn report(&mut self, fault: &Fault) {
        let text = format!("device {}: {fault}", self.number);
        if !self.faults.contains(&text) {
            #[allow(clippy::print_stderr)]
            {
                eprintln!("fake CUDA driver: {text}");
            }
            self.faults.push(text);
            if std::env::var_os("FAKE_CUDA_ABORT").is_some() {
                std::process::abort();
            }
        }
    }

    /// Reports what the program did wrong in a call, which fails.
    pub(crate) fn check(&mut self, done: Result<(), Fault>) -> Result<(), Code> {
        self.report_races();
        done.map_err(|fault| {
            self.report(&fault);
            INVALID_VALUE
        })
    }

    fn report_races(&mut self) {
        if self.sticky.is_some() {
            // A program cannot wait for a device that is lost.
            self.memory.races.clear();
        }
        for race in std::mem::take(&mut self.memory.races) {
            self.report(&race);
        }
    }

    fn handle(&mut self) -> u64 {
        self.next_handle += 1;
        (self.number as u64 + 1) << HANDLE_BITS | self.next_handle
    }

    fn bad_handle(&mut self, what: &str, handle: u64) -> Code {
        let what = format!("{what} {handle:#x} does not exist");
        self.report(&Fault { kind: Kind::BadHandle, what });
        INVALID_HANDLE
    }

    /// Adds a reference to the context.
    pub(crate) fn retain(&mut self) {
        self.contexts += 1;
    }

    /// Drops a reference to the context. With the last one, the device is reset.
    pub(crate) fn release(&mut self) {
        self.contexts = self.contexts.saturating_sub(1);
        if self.contexts > 0 {
            return;
        }
        self.run_all();
        for what in self.live() {
            self.report(&Fault { kind: Kind::Leak, what: format!("{what} is not freed") });
        }
        self.sticky = None;
    }

    /// What exists in the context.
    pub(crate) fn live(&self) -> Vec<String> {
        let mut live = self.memory.live();
        live.extend(self.pinned.live());
        let streams = self.streams.keys().filter(|handle| **handle != 0);
        live.extend(streams.map(|handle| format!("stream {handle:#x}")));
        live.extend(self.events.keys().map(|handle| format!("event {handle:#x}")));
        live.extend(self.modules.keys().map(|handle| format!("module {handle:#x}")));
        live
    }

    pub(crate) fn load_module(&mut self, text: &str) -> Result<u64, String> {
        let module = Arc::new(Module::read(text)?);
        let handle = self.handle();
        self.modules.insert(handle, module);
        Ok(handle)
    }

    pub(crate) fn unload_module(&mut self, handle: u64) -> Result<(), Code> {
        match self.modules.remove(&handle) {
            Some(_) => Ok(()),
            None => Err(self.bad_handle("module", handle)),
        }
    }

    /// The function of a module; the inner `None` if the module does not have it.
    pub(crate) fn function(&mut self, module: u64, name: &str) -> Result<Option<u64>, Code> {
        let Some(module) = self.modules.get(&module) else {
            return Err(self.bad_handle("module", module));
        };
        let kernel = module.kernels.get(name).map(|kernel| Arc::new(kernel.clone()));
        Ok(kernel.map(|kernel| {
            let handle = self.handle();
            self.functions.insert(handle, kernel);
            handle
        }))
    }

    pub(crate) fn kernel(&mut self, function: u64) -> Result<Arc<Kernel>, Code> {
        match self.functions.get(&function) {
            Some(kernel) => Ok(kernel.clone()),
            None => Err(self.bad_handle("function", function)),
        }
    }

    /// The handles of streams that have operations.
    fn busy(&self) -> BTreeSet<u64> {
        let busy = self.streams.iter().filter(|(_, stream)| !stream.queue.is_empty());
        busy.map(|(handle, _)| *handle).collect()
    }
}
