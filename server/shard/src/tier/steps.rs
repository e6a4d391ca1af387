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

use zeroshard_kernels::{Backend, Position, Record, Update};
use zeroshard_model::direct::{PAGE, Pages};
use zeroshard_model::{DType, Error, Result, geometry::blocks::TILE, optimizer::Code};

use super::{
    array::Array,
    form::{Form, PIECE},
    paged::REQUEST,
    plan::OPTIMIZER_STATE,
};

/// The threads, and therefore the number of requests in flight.
pub(super) const THREADS: usize = 8;

/// The elements of a piece, and of a piece of a small slice: a step is over whole pieces.
const PIECES: [usize; 2] = [PAGE / DType::F32.size(), PIECE];

/// The codes of 8-bit state, in the order in which optimizers have them.
const CODES: [Code; 2] = [Code::Signed, Code::Positive];

/// The threads and buffers of a server.
pub struct Steps<B: Backend> {
    threads: rayon::ThreadPool,
    free: Mutex<Vec<Workspace<B>>>,
    returned: Condvar,
}

/// The buffers of one thread.
struct Workspace<B: Backend> {
    /// Of each size in [`PIECES`].
    pieces: [Pieces<B>; PIECES.len()],
    pages: Pages,
}

/// A piece of each array.
struct Pieces<B: Backend> {
    master: Arc<B::Buffer>,
    gradient: Arc<B::Buffer>,
    state: [Arc<B::Buffer>; OPTIMIZER_STATE],
    /// Of the codes in [`CODES`].
    coded: [Arc<B::Buffer>; CODES.len()],
}

/// The arrays of a slice in a step.
pub struct Arrays<'a, B: Backend> {
    pub master: Next<'a, B>,
    pub state: Vec<Next<'a, B>>,
    /// The codes of 8-bit state; none: it is f32.
    pub state_codes: &'static [Code],
    pub sum: &'a Array<B>,
    /// In memory.
    pub published: Option<&'a mut B::Buffer>,
    /// Receives the old and the new master weights.
    pub record: Option<&'a mut dyn Record>,
}

/// An array that a step changes.
pub struct Next<'a, B: Backend> {
    /// Receives the new values. Nobody else holds it.
    pub array: &'a mut Array<B>,
    /// The earlier values, if they are not in `array` because a reader holds them.
    pub earlier: Option<Array<B>>,
}

impl<B: Backend> Next<'_, B> {
    /// All elements have been written piece by piece.
    fn is_written(&self) {
        if let Array::Paged(paged) = &*self.array {
            paged.is_written();
        }
    }

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
        self.with_workspace(|workspace| workspace.apply(backend, update, numel, &mut arrays))
    }

    /// Moves a running average of `numel` elements by the fraction `weight` towards master weights.
    /// Changes to paged arrays have been written back.
    ///
    /// # Errors
    /// [`Error::Storage`], after which some elements have the new values and others have not.
    pub fn average(
        &self,
        backend: &B,
        weight: f64,
        (numel, master): (usize, &Array<B>),
        average: [Next<'_, B>; 2],
    ) -> Result<()> {
        self.with_workspace(|workspace| {
            workspace.average(backend, weight, (numel, master), average)
        })
    }

    /// Calls `work` with buffers that nobody else uses meanwhile.
    fn with_workspace(&self, work: impl FnOnce(&mut Workspace<B>) -> Result<()>) -> Result<()> {
        let mut workspace = self.workspace();
        let done = work(&mut workspace);
        self.free.lock().expect("no holder of the lock panics").push(workspace);
        self.returned.notify_one();
        done
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

impl<B: Backend> Pieces<B> {
    fn new(backend: &B, numel: usize) -> zeroshard_kernels::Result<Self> {
        let piece = |code| {
            let mut buffer = Form { numel, code }.allocate(backend)?;
            backend.populate(&mut buffer, 0..numel);
            Ok(Arc::new(buffer))
        };
        let [signed, positive] = CODES.map(Some);
        Ok(Self {
            master: piece(None)?,
            gradient: piece(None)?,
            state: [piece(None)?, piece(None)?, piece(None)?],
            coded: [piece(signed)?, piece(positive)?],
        })
    }
}

impl<B: Backend> Workspace<B> {
    fn new(backend: &B) -> zeroshard_kernels::Result<Self> {
        let [small, large] = PIECES;
        let pieces = [Pieces::new(backend, small)?, Pieces::new(backend, large)?];
        Ok(Self { pieces, pages: Pages::new(REQUEST) })
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
            let pieces = &mut self.pieces[size];
            apply_piece(backend, update, &range, arrays, pieces, &mut self.pages)?;
        }
        [&arrays.master].into_iter().chain(&arrays.state).for_each(Next::is_written);
        Ok(())
    }

    fn average(
        &mut self,
        backend: &B,
        weight: f64,
        (numel, master): (usize, &Array<B>),
        mut average: [Next<'_, B>; 2],
    ) -> Result<()> {
        let size = usize::from(numel > PIECES[0]);
        let Pieces { master: values, state: [high, low, ..], .. } = &mut self.pieces[size];
        let pages = &mut self.pages;
        for start in (0..numel).step_by(PIECES[size]) {
            let range = start..numel.min(start + PIECES[size]);
            master.read_piece(backend, (&range, None), exclusive(values), pages)?;
            for (next, piece) in average.iter().zip([&mut *high, &mut *low]) {
                next.earlier().read_piece(backend, (&range, None), exclusive(piece), pages)?;
            }
            let pieces = [exclusive(high).into(), exclusive(low).into()];
            backend.average(weight, values, pieces)?;
            for (next, piece) in average.iter_mut().zip([&*high, &*low]) {
                next.array.write_piece(backend, (&range, None), piece, pages)?;
            }
        }
        average.iter().for_each(Next::is_written);
        Ok(())
    }
}

/// Applies a step to a piece of a slice. Behind its end, the buffers have elements of earlier
/// pieces, which are not written. Each element is computed alone, except in a tile of 8-bit state:
/// the rest of the last one is zeros, which a step leaves as they are.
fn apply_piece<B: Backend>(
    backend: &B,
    update: &Update<'_>,
    range: &Range<usize>,
    arrays: &mut Arrays<'_, B>,
    pieces: &mut Pieces<B>,
    pages: &mut Pages,
) -> Result<()> {
    let Pieces { master, gradient, state, coded } = pieces;
    let codes = arrays.state_codes;
    debug_assert!(CODES.starts_with(codes), "the pieces have the codes in this order");
    let state = if codes.is_empty() { &mut state[..] } else { &mut coded[..] };
    let state = &mut state[..arrays.state.len()];
    let part = |position: usize| (range, codes.get(position).copied());
    let tiles = range.len().next_multiple_of(TILE);
    if !codes.is_empty() && tiles > range.len() {
        let zeros = [0; TILE * DType::F32.size()];
        for piece in [&mut *master, &mut *gradient].into_iter().chain(&mut *state) {
            backend.store(exclusive(piece), tiles - TILE..tiles, &zeros, DType::F32)?;
        }
    }
    arrays.master.earlier().read_piece(backend, (range, None), exclusive(master), pages)?;
    for (position, (next, piece)) in arrays.state.iter().zip(&mut *state).enumerate() {
        next.earlier().read_piece(backend, part(position), exclusive(piece), pages)?;
    }
    arrays.sum.read_piece(backend, (range, None), exclusive(gradient), pages)?;
    let element = update.at.element + range.start as u64;
    let update = Update { at: Position { element, ..update.at }, ..*update };
    let buffers = state.iter_mut().map(|piece| exclusive(piece).into()).collect();
    // The last piece ends behind the slice, where nothing is recorded.
    let record = arrays.record.as_mut().map(|record| &mut **record as _);
    backend.apply(&update, exclusive(master).into(), buffers, Some(gradient), None, record)?;
    if let Some(published) = &mut arrays.published {
        let values = backend.read(master, 0..range.len(), DType::F32)?;
        backend.store(published, range.clone(), &values, DType::F32)?;
    }
    arrays.master.array.write_piece(backend, (range, None), master, pages)?;
    for (position, (next, piece)) in arrays.state.iter_mut().zip(&*state).enumerate() {
        next.array.write_piece(backend, part(position), piece, pages)?;
    }
    Ok(())
}

fn exclusive<T>(piece: &mut Arc<T>) -> &mut T {
    Arc::get_mut(piece).expect("no reader holds a buffer of a step")
}
