//! The working buffers: whole arrays in memory whose place is outside of it, while chunks of them
//! arrive.
//!
//! Their memory is bounded. If it is used up, the array that was loaded first is written to its
//! tier, and its buffer given to the one that needs it. An array that is in use at this moment is
//! skipped, and if all are, the bound is exceeded: each thread uses one buffer at a time, so the
//! excess is at most one array for each thread.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Result};

use super::form::Form;

/// The working buffers of a server, for arrays of type `A`.
pub(super) struct Working<B: Backend, A> {
    limit: usize,
    state: Mutex<State<B, A>>,
}

struct State<B: Backend, A> {
    /// The elements of all buffers, free or in use, as if all were f32.
    elements: usize,
    /// Free buffers, with their form: memory that is mapped anew for each use would be slower than
    /// a disk.
    free: Vec<(Form, Arc<B::Buffer>)>,
    /// Arrays that may have a buffer, in the order in which they got one.
    loaded: VecDeque<Weak<A>>,
}

impl<B: Backend, A> Working<B, A> {
    /// Buffers of at most `bytes`.
    pub(super) fn new(bytes: usize) -> Self {
        let state = State { elements: 0, free: Vec::new(), loaded: VecDeque::new() };
        Self { limit: bytes / DType::F32.size(), state: Mutex::new(state) }
    }

    /// A buffer of this form, of any content, that nobody else holds. `settle` writes
    /// an array to its tier and gives its buffer back, and returns `false` if the array keeps it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn take(
        &self,
        backend: &B,
        form: Form,
        settle: impl Fn(&A) -> bool,
    ) -> Result<Arc<B::Buffer>> {
        let mut tries = self.state().loaded.len();
        loop {
            let mut state = self.state();
            if let Some(at) = state.free.iter().position(|(other, _)| *other == form) {
                return Ok(state.free.swap_remove(at).1);
            }
            if state.elements + form.numel <= self.limit || tries == 0 {
                state.elements += form.numel;
                drop(state);
                return self.allocate(backend, form);
            }
            if let Some((other, buffer)) = state.free.pop() {
                state.elements -= other.numel;
                drop(state);
                drop(buffer);
                continue;
            }
            tries -= 1;
            let Some(first) = state.loaded.pop_front() else {
                tries = 0;
                continue;
            };
            drop(state);
            if let Some(array) = first.upgrade()
                && !settle(&array)
            {
                self.state().loaded.push_back(first);
            }
        }
    }

    fn allocate(&self, backend: &B, form: Form) -> Result<Arc<B::Buffer>> {
        let allocated = form.allocate(backend).map_err(|failure| {
            self.state().elements -= form.numel;
            failure.of("a buffer for an array outside of memory")
        });
        let mut buffer = allocated?;
        backend.populate(&mut buffer, 0..form.numel);
        Ok(Arc::new(buffer))
    }

    /// Returns a buffer.
    pub(super) fn give(&self, buffer: Arc<B::Buffer>, form: Form) {
        let mut state = self.state();
        if state.elements > self.limit {
            state.elements -= form.numel;
            drop(state);
            drop(buffer);
        } else {
            state.free.push((form, buffer));
        }
    }

    /// Notes that an array has a buffer.
    pub(super) fn list(&self, array: &Arc<A>) {
        let mut state = self.state();
        // The list stays about as long as the number of arrays that are alive.
        for _ in 0..2 {
            if state.loaded.front().is_some_and(|first| first.strong_count() == 0) {
                state.loaded.pop_front();
            }
        }
        state.loaded.push_back(Arc::downgrade(array));
    }

    fn state(&self) -> MutexGuard<'_, State<B, A>> {
        self.state.lock().expect("no holder of the lock panics")
    }
}
