//! Steps of slices of which some arrays are outside of memory.
//!
//! A thread reads a piece of each array, computes, writes the piece, and goes on to the next. Some
//! threads do so for different slices, in the order of the slices: while one computes, the others
//! read and write, so that the disk always has several requests. The buffers are allocated when the
//! server starts. A decided step needs no further memory.

use std::{
    ops::Range,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use zeroshard_kernels::{Backend, Update};
use zeroshard_model::direct::{PAGE, Pages};
use zeroshard_model::{DType, Error, Result};

use super::{array::Array, paged::REQUEST, plan::MAX_STATE};

/// The threads, and therefore the number of requests in flight.
pub(super) const THREADS: usize = 8;

/// The elements of a piece, and of a piece of a small slice: a step is over whole pieces.
const PIECES: [usize; 2] = [PAGE / DType::F32.size(), REQUEST / DType::F32.size()];

/// The arrays of a piece: master weights, state, gradient.
const ARRAYS: usize = 1 + MAX_STATE + 1;

/// The threads and buffers of a server.
pub struct Steps<B: Backend> {
    threads: rayon::ThreadPool,
    free: Mutex<Vec<Workspace<B>>>,
    returned: Condvar,
}

/// The buffers of one thread.
struct Workspace<B: Backend> {
    /// Of each size in [`PIECES`].
    arrays: [Vec<Arc<B::Buffer>>; PIECES.len()],
    pages: Pages,
}

/// The arrays of a slice in a step.
pub struct Arrays<'a, B: Backend> {
    pub master: Next<'a, B>,
    pub state: Vec<Next<'a, B>>,
    pub sum: &'a Array<B>,
    /// In memory.
    pub published: Option<&'a mut B::Buffer>,
}

/// An array that a step changes.
pub struct Next<'a, B: Backend> {
    /// Receives the new values. Nobody else holds it.
    pub array: &'a mut Array<B>,
    /// The earlier values, if they are not in `array` because a reader holds them.
    pub earlier: Option<Array<B>>,
}

impl<B: Backend> Next<'_, B> {
    fn earlier(&self) -> &Array<B> {
        self.earlier.as_ref().unwrap_or(self.array)
    }
}

impl<B: Backend> Steps<B> {
    /// Starts the threads and allocates their buffers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Internal`] if the threads cannot be started.
    pub(super) fn new(backend: &B) -> Result<Self> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(THREADS)
            .thread_name(|number| format!("zeroshard-tier-{number}"))
            .build();
        let threads = threads.map_err(|error| Error::Internal {
            cause: format!("cannot start the threads for slices outside of memory: {error}"),
        })?;
        let workspace = |_| Workspace::new(backend);
        let free = (0..THREADS).map(workspace).collect::<zeroshard_kernels::Result<_>>();
        let free = free
            .map_err(|failure| failure.of("the buffers of steps with slices outside of memory"))?;
        Ok(Self { threads, free: Mutex::new(free), returned: Condvar::new() })
    }

    /// Runs `step` for the numbers up to `slices`, in order, each on the next free thread, and
    /// `beside` on this one. After an error, no further number is begun.
    ///
    /// # Errors
    /// The first one.
    pub fn run(
        &self,
        slices: usize,
        step: impl Fn(usize) -> Result<()> + Sync,
        beside: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failed = Mutex::new(Ok(()));
        let note = |error| {
            stop.store(true, Ordering::Relaxed);
            let mut failed = failed.lock().expect("no holder of the lock panics");
            if failed.is_ok() {
                *failed = Err(error);
            }
        };
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= slices {
                    return;
                }
                if let Err(error) = step(number) {
                    note(error);
                }
            }
        };
        self.threads.in_place_scope(|scope| {
            (0..THREADS.min(slices)).for_each(|_| scope.spawn(|_| work()));
            if let Err(error) = beside() {
                note(error);
            }
        });
        failed.into_inner().expect("no holder of the lock panics")
    }

    /// Applies a step to the arrays of a slice with `numel` elements. Changes to paged arrays have
    /// been written back.
    ///
    /// # Errors
    /// [`Error::Storage`], after which some elements have the new values and others have not.
    pub fn apply(
        &self,
        backend: &B,
        update: &Update<'_>,
        numel: usize,
        mut arrays: Arrays<'_, B>,
    ) -> Result<()> {
        let mut workspace = self.workspace();
        let applied = workspace.apply(backend, update, numel, &mut arrays);
        self.free.lock().expect("no holder of the lock panics").push(workspace);
        self.returned.notify_one();
        applied
    }

    fn workspace(&self) -> Workspace<B> {
        let mut free = self.free.lock().expect("no holder of the lock panics");
        loop {
            match free.pop() {
                Some(workspace) => return workspace,
                // Only tests call from other threads than those of this pool.
                None => free = self.returned.wait(free).expect("no holder of the lock panics"),
            }
        }
    }
}

impl<B: Backend> Workspace<B> {
    fn new(backend: &B) -> zeroshard_kernels::Result<Self> {
        let arrays = |numel| {
            let array = || {
                let mut buffer = backend.allocate(DType::F32, numel)?;
                backend.populate(&mut buffer, 0..numel);
                Ok(Arc::new(buffer))
            };
            (0..ARRAYS).map(|_| array()).collect::<zeroshard_kernels::Result<Vec<_>>>()
        };
        let [small, large] = PIECES;
        Ok(Self { arrays: [arrays(small)?, arrays(large)?], pages: Pages::new(REQUEST) })
    }

    fn apply(
        &mut self,
        backend: &B,
        update: &Update<'_>,
        numel: usize,
        arrays: &mut Arrays<'_, B>,
    ) -> Result<()> {
        let size = usize::from(numel > PIECES[0]);
        for start in (0..numel).step_by(PIECES[size]) {
            let range = start..numel.min(start + PIECES[size]);
            let pieces = &mut self.arrays[size];
            apply_piece(backend, update, &range, arrays, pieces, &mut self.pages)?;
        }
        for next in [&mut arrays.master].into_iter().chain(&mut arrays.state) {
            if let Array::Paged(paged) = &*next.array {
                paged.is_written();
            }
        }
        Ok(())
    }
}

/// Applies a step to a piece of a slice. Behind its end, the buffers have elements of earlier
/// pieces: each element is computed alone, and they are not written.
fn apply_piece<B: Backend>(
    backend: &B,
    update: &Update<'_>,
    range: &Range<usize>,
    arrays: &mut Arrays<'_, B>,
    pieces: &mut [Arc<B::Buffer>],
    pages: &mut Pages,
) -> Result<()> {
    let changed = 1 + arrays.state.len();
    let (outputs, rest) = pieces.split_at_mut(changed);
    let gradient = &mut rest[0];
    let targets = || [&arrays.master].into_iter().chain(&arrays.state);
    for (next, piece) in targets().zip(&mut *outputs) {
        next.earlier().read_piece(backend, range, exclusive(piece), pages)?;
    }
    arrays.sum.read_piece(backend, range, exclusive(gradient), pages)?;
    let mut buffers = outputs.iter_mut().map(|piece| exclusive(piece).into());
    let master = buffers.next().expect("there are master weights");
    backend.apply(update, master, buffers.collect(), gradient, None)?;
    if let Some(published) = &mut arrays.published {
        let values = backend.read(&outputs[0], 0..range.len(), DType::F32)?;
        backend.store(published, range.clone(), &values, DType::F32)?;
    }
    let targets = [&mut arrays.master].into_iter().chain(&mut arrays.state);
    for (next, piece) in targets.zip(&*outputs) {
        next.array.write_piece(backend, range, piece, pages)?;
    }
    Ok(())
}

fn exclusive<T>(piece: &mut Arc<T>) -> &mut T {
    Arc::get_mut(piece).expect("no reader holds a buffer of a step")
}
