//! An array outside of the memory of the backend: on disk, or in host memory.
//!
//! Its content is changed in two ways. A step reads and writes it piece by piece
//! ([`super::steps`]). Everything else (uploads, gradients, copies, checkpoints) arrives in chunks
//! of any size: the array is then loaded into a working buffer ([`super::working`]), and written
//! back when it is complete, or when another array needs the buffer.

use std::{
    io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use zeroshard_kernels::{Backend, Failure, fill};
use zeroshard_model::direct::{PAGE, Pages};
use zeroshard_model::{DType, Elements, Error, Result};

use super::{
    form::{Form, PIECE},
    scratch::{Extent, Scratch, blocking},
    working::Working,
};

/// The bytes that are read or written with one request.
pub(super) const REQUEST: usize = 1 << 20;

/// The bytes that are read at least, where a reader needs many short runs.
const SHORT: usize = 64 << 10;

/// The size of an element.
const SIZE: usize = DType::F32.size();

/// An array in scratch space, which readers may hold. It is changed only while nobody else holds
/// it.
pub struct Paged<B: Backend> {
    shared: Arc<Shared<B>>,
}

/// The part of an array that the pool of working buffers refers to as well.
pub(super) struct Shared<B: Backend> {
    working: Arc<Working<B, Self>>,
    extent: Extent,
    /// The slice, for errors.
    slice: u32,
    form: Form,
    cell: Mutex<Cell<B>>,
}

/// The content of an array.
pub struct Cell<B: Backend> {
    content: Content,
    loaded: Option<Loaded<B>>,
    /// `true` if the pool of working buffers knows that the array may have one.
    is_listed: bool,
}

/// The content in scratch space.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Content {
    /// Elements are written before they are read.
    Undefined,
    /// All elements have this value.
    Filled(f32),
    Written,
}

struct Loaded<B: Backend> {
    /// INVARIANT: only this array holds it.
    buffer: Arc<B::Buffer>,
    is_dirty: bool,
}

impl<B: Backend> Paged<B> {
    /// An array of slice number `slice`; `filled`: the value of its elements, 0 for 8-bit state.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the disk is full, or there is no memory; [`Error::Storage`].
    pub(super) fn new(
        working: &Arc<Working<B, Shared<B>>>,
        scratch: &Arc<Scratch>,
        slice: u32,
        form: Form,
        filled: Option<f32>,
    ) -> Result<Self> {
        let bytes = form.bytes();
        let extent = scratch.take(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => Error::OutOfMemory {
                what: format!("slice {slice} in {}: the disk is full", scratch.name()),
                bytes,
            },
            io::ErrorKind::OutOfMemory => {
                Error::OutOfMemory { what: format!("slice {slice} in {}", scratch.name()), bytes }
            }
            _ => Error::Storage {
                action: format!("reserve {bytes} bytes for slice {slice} in"),
                url: scratch.name(),
                cause: error.to_string(),
            },
        })?;
        let content = filled.map_or(Content::Undefined, Content::Filled);
        let cell = Cell { content, loaded: None, is_listed: false };
        let cell = Mutex::new(cell);
        let shared = Shared { working: working.clone(), extent, slice, form, cell };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Another array of the same size, of undefined content.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub(super) fn another(&self) -> Result<Self> {
        let Shared { working, extent, slice, form, .. } = &*self.shared;
        Self::new(working, extent.scratch(), *slice, *form, None)
    }

    pub(super) fn form(&self) -> Form {
        self.shared.form
    }

    /// Forgets the content: elements are written before they are read again.
    pub(super) fn forget(&self) {
        let cell = &mut *self.shared.cell();
        cell.content = Content::Undefined;
        if let Some(loaded) = cell.loaded.take() {
            self.shared.working.give(loaded.buffer, self.shared.form);
        }
    }

    /// The content in a working buffer, for changes.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::OutOfMemory`].
    pub(super) fn load(&self, backend: &B) -> Result<MutexGuard<'_, Cell<B>>> {
        let mut cell = self.shared.cell();
        if cell.loaded.is_none() {
            let working = &self.shared.working;
            let settle = |array: &Shared<B>| array.try_settle(backend);
            let mut buffer = working.take(backend, self.shared.form, settle)?;
            let target = Arc::get_mut(&mut buffer).expect("nobody holds a free buffer");
            let filled = match cell.content {
                Content::Undefined => Ok(()),
                Content::Filled(value) => fill(backend, target, value).map_err(Into::into),
                Content::Written => self.shared.read_into(backend, target),
            };
            if let Err(error) = filled {
                working.give(buffer, self.shared.form);
                return Err(error);
            }
            cell.loaded = Some(Loaded { buffer, is_dirty: false });
            if !std::mem::replace(&mut cell.is_listed, true) {
                working.list(&self.shared);
            }
        }
        if let Some(loaded) = &mut cell.loaded {
            loaded.is_dirty = true;
        }
        Ok(cell)
    }

    /// Writes changes to scratch space, and returns the working buffer.
    ///
    /// # Errors
    /// [`Error::Storage`], after which the changes are still in the buffer.
    pub(super) fn settle(&self, backend: &B) -> Result<()> {
        self.shared.settle(backend, &mut self.shared.cell())
    }

    /// Elements as little-endian bytes of `dtype`.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::OutOfMemory`] for the memory of a conversion.
    pub(super) fn read(&self, backend: &B, from: &Elements, dtype: DType) -> Result<Bytes> {
        let bytes = self.bytes(backend, from)?;
        if dtype == DType::F32 {
            return Ok(bytes);
        }
        let numel = from.numel();
        let of_conversion = |failure: Failure| failure.of("a conversion of elements that are read");
        let mut buffer = backend.allocate(DType::F32, numel).map_err(of_conversion)?;
        backend.store(&mut buffer, 0..numel, &bytes, DType::F32)?;
        Ok(backend.read(&Arc::new(buffer), 0..numel, dtype)?)
    }

    fn bytes(&self, backend: &B, from: &Elements) -> Result<Bytes> {
        let cell = self.shared.cell();
        if let Some(loaded) = &cell.loaded {
            // A reference to the buffer would outlive the lock.
            return Ok(Bytes::copy_from_slice(&backend.read(
                &loaded.buffer,
                from.clone(),
                DType::F32,
            )?));
        }
        match cell.content {
            Content::Undefined => Ok(vec![0; from.numel() * SIZE].into()),
            Content::Filled(value) => Ok(value.to_le_bytes().repeat(from.numel()).into()),
            Content::Written => {
                // The array does not change while a reader holds it.
                drop(cell);
                match self.shared.form.code {
                    None => self.shared.read_runs(from),
                    Some(_) => self.shared.decode_runs(backend, from),
                }
            }
        }
    }

    /// Reads elements of a settled array into the beginning of `piece`.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(super) fn read_piece(
        &self,
        backend: &B,
        range: &Range<usize>,
        piece: &mut B::Buffer,
        pages: &mut Pages,
    ) -> Result<()> {
        let (content, form) = (self.shared.cell().content, self.shared.form);
        let length = form.bytes_of(range.len());
        match content {
            // 0 for 8-bit state, too.
            Content::Undefined => pages.bytes(0..length).fill(0),
            Content::Filled(_) if form.code.is_some() => pages.bytes(0..length).fill(0),
            Content::Filled(value) => {
                let elements = pages.bytes(0..length).as_chunks_mut().0;
                elements.iter_mut().for_each(|element| *element = value.to_le_bytes());
            }
            Content::Written => {
                let whole = pages.bytes(0..length.next_multiple_of(PAGE));
                self.shared.read(whole, form.position(range.start))?;
            }
        }
        form.store(backend, piece, 0..range.len(), pages.bytes(0..length))?;
        Ok(())
    }

    /// Writes the beginning of `piece` to elements of a settled array. After the last piece,
    /// [`Self::is_written`] must be called.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(super) fn write_piece(
        &self,
        backend: &B,
        range: &Range<usize>,
        piece: &Arc<B::Buffer>,
        pages: &mut Pages,
    ) -> Result<()> {
        let form = self.shared.form;
        let bytes = form.read(backend, piece, 0..range.len())?;
        self.shared.write(&bytes, form.position(range.start), pages)
    }

    /// All elements have been written piece by piece.
    pub(super) fn is_written(&self) {
        self.shared.cell().content = Content::Written;
    }
}

impl<B: Backend> Cell<B> {
    /// The working buffer.
    pub(super) fn buffer(&self) -> &B::Buffer {
        &self.loaded.as_ref().expect("`load` has loaded it").buffer
    }

    pub(super) fn buffer_mut(&mut self) -> &mut B::Buffer {
        let loaded = self.loaded.as_mut().expect("`load` has loaded it");
        Arc::get_mut(&mut loaded.buffer).expect("only this array holds it")
    }
}

impl<B: Backend> Shared<B> {
    fn cell(&self) -> MutexGuard<'_, Cell<B>> {
        self.cell.lock().expect("no holder of the lock panics")
    }

    /// Writes changes to scratch space, and returns the working buffer, unless the array is in use.
    /// False if the array keeps its buffer.
    fn try_settle(&self, backend: &B) -> bool {
        let Ok(mut cell) = self.cell.try_lock() else { return false };
        // The owner of the array finds the same error when it writes the array itself.
        let is_settled = self.settle(backend, &mut cell).is_ok();
        cell.is_listed &= !is_settled;
        is_settled
    }

    fn settle(&self, backend: &B, cell: &mut Cell<B>) -> Result<()> {
        let Some(loaded) = &mut cell.loaded else { return Ok(()) };
        if loaded.is_dirty {
            let mut pages = Pages::new(REQUEST);
            for piece in self.form.pieces() {
                let at = self.form.position(piece.start);
                self.write(&self.form.read(backend, &loaded.buffer, piece)?, at, &mut pages)?;
            }
            loaded.is_dirty = false;
            cell.content = Content::Written;
        }
        if let Some(loaded) = cell.loaded.take() {
            self.working.give(loaded.buffer, self.form);
        }
        Ok(())
    }

    fn read_into(&self, backend: &B, target: &mut B::Buffer) -> Result<()> {
        let mut pages = Pages::new(REQUEST);
        for piece in self.form.pieces() {
            let bytes = self.form.bytes_of(piece.len());
            let at = self.form.position(piece.start);
            self.read(pages.bytes(0..bytes.next_multiple_of(PAGE)), at)?;
            self.form.store(backend, target, piece, pages.bytes(0..bytes))?;
        }
        Ok(())
    }

    /// The values of 8-bit state that is in scratch space, as f32.
    fn decode_runs(&self, backend: &B, from: &Elements) -> Result<Bytes> {
        let mut bytes = Vec::with_capacity(from.numel() * SIZE);
        let (mut pages, mut loaded) = (Pages::new(REQUEST), None);
        for mut run in from.runs() {
            while !run.is_empty() {
                let start = run.start - run.start % PIECE;
                let piece = start..self.form.numel.min(start + PIECE);
                let (_, buffer) = match loaded.take() {
                    Some(found @ (number, _)) if number == start => found,
                    _ => (start, self.load_piece(backend, &piece, &mut pages)?),
                };
                let part = run.start..run.end.min(piece.end);
                let inside = part.start - start..part.end - start;
                bytes.extend_from_slice(&backend.read(&buffer, inside, DType::F32)?);
                loaded = Some((start, buffer));
                run.start = part.end;
            }
        }
        Ok(bytes.into())
    }

    /// A piece that is in scratch space, in memory of its own.
    fn load_piece(
        &self,
        backend: &B,
        piece: &Range<usize>,
        pages: &mut Pages,
    ) -> Result<Arc<B::Buffer>> {
        let form = Form { numel: piece.len(), ..self.form };
        let of_piece = |failure: Failure| failure.of("a piece of an array that is read");
        let mut buffer = form.allocate(backend).map_err(of_piece)?;
        let length = form.bytes_of(piece.len());
        let at = self.form.position(piece.start);
        self.read(pages.bytes(0..length.next_multiple_of(PAGE)), at)?;
        form.store(backend, &mut buffer, 0..piece.len(), pages.bytes(0..length))?;
        Ok(Arc::new(buffer))
    }

    /// The bytes of f32 elements that are in scratch space.
    fn read_runs(&self, from: &Elements) -> Result<Bytes> {
        let end = (self.form.numel * SIZE).next_multiple_of(PAGE);
        let mut bytes = Vec::with_capacity(from.numel() * SIZE);
        let (mut pages, mut window) = (Pages::new(REQUEST), 0..0);
        for run in from.runs() {
            let (mut at, until) = (run.start * SIZE, run.end * SIZE);
            while at < until {
                if !window.contains(&at) {
                    let first = at - at % PAGE;
                    let last = until.max(first + SHORT).next_multiple_of(PAGE);
                    window = first..last.min(first + REQUEST).min(end);
                    self.read(pages.bytes(0..window.len()), first)?;
                }
                let upto = until.min(window.end);
                let found = pages.bytes(at - window.start..upto - window.start);
                bytes.extend_from_slice(found);
                at = upto;
            }
        }
        Ok(bytes.into())
    }

    fn read(&self, pages: &mut [u8], at: usize) -> Result<()> {
        blocking(|| self.extent.read(pages, at)).map_err(|error| self.error("read", "from", &error))
    }

    /// Writes bytes to a position at the beginning of a page, through `pages` if they do not begin
    /// with a page themselves.
    fn write(&self, bytes: &[u8], at: usize, pages: &mut Pages) -> Result<()> {
        let is_aligned = bytes.len().is_multiple_of(PAGE) && bytes.as_ptr().align_offset(PAGE) == 0;
        let whole = match is_aligned {
            true => bytes,
            false => {
                let length = bytes.len().next_multiple_of(PAGE);
                pages.bytes(0..bytes.len()).copy_from_slice(bytes);
                pages.bytes(bytes.len()..length).fill(0);
                &*pages.bytes(0..length)
            }
        };
        blocking(|| self.extent.write(whole, at)).map_err(|error| self.error("write", "to", &error))
    }

    fn error(&self, action: &str, preposition: &str, error: &io::Error) -> Error {
        Error::Storage {
            action: format!("{action} slice {} {preposition}", self.slice),
            url: self.extent.scratch().name(),
            cause: error.to_string(),
        }
    }
}

impl<B: Backend> Drop for Shared<B> {
    fn drop(&mut self) {
        let cell = self.cell.get_mut().expect("no holder of the lock panics");
        if let Some(loaded) = cell.loaded.take() {
            self.working.give(loaded.buffer, self.form);
        }
    }
}
