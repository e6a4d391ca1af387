//! An array of a slice: in memory, or outside of it.

use std::{
    ops::{Deref, DerefMut, Range},
    sync::{Arc, MutexGuard},
};

use bytes::Bytes;
use zeroshard_kernels::{Backend, Failure};
use zeroshard_model::direct::Pages;
use zeroshard_model::{DType, Elements, Result, optimizer::Code};

use super::{
    form::Form,
    paged::{Cell, Paged},
};

/// A version of an array. Clones are references, which readers hold.
pub enum Array<B: Backend> {
    Memory(Arc<B::Buffer>),
    /// Outside of the memory of the backend. Of f32, or 8-bit state.
    Paged(Arc<Paged<B>>),
}

impl<B: Backend> Clone for Array<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Memory(buffer) => Self::Memory(buffer.clone()),
            Self::Paged(paged) => Self::Paged(paged.clone()),
        }
    }
}

impl<B: Backend> Array<B> {
    pub fn numel(&self, backend: &B) -> usize {
        match self {
            Self::Memory(buffer) => backend.numel(buffer),
            Self::Paged(paged) => paged.form().numel,
        }
    }

    pub fn dtype(&self, backend: &B) -> DType {
        match self {
            Self::Memory(buffer) => backend.dtype(buffer),
            Self::Paged(_) => DType::F32,
        }
    }

    /// The size in bytes.
    pub fn bytes(&self, backend: &B) -> u64 {
        match self {
            Self::Memory(buffer) => backend.bytes(buffer) as u64,
            Self::Paged(paged) => paged.form().bytes(),
        }
    }

    /// The buffer of an array in memory.
    pub fn memory(&self) -> Option<&Arc<B::Buffer>> {
        match self {
            Self::Memory(buffer) => Some(buffer),
            Self::Paged(_) => None,
        }
    }

    /// Returns whether anybody else holds the array.
    pub fn is_read(&self) -> bool {
        match self {
            Self::Memory(buffer) => Arc::strong_count(buffer) > 1,
            Self::Paged(paged) => Arc::strong_count(paged) > 1,
        }
    }

    /// Elements as little-endian bytes of `dtype`. If the array is in memory, they may share it.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Storage`]; [`zeroshard_model::Error::OutOfMemory`].
    pub fn read(&self, backend: &B, from: impl Into<Elements>, dtype: DType) -> Result<Bytes> {
        match self {
            Self::Memory(buffer) => Ok(backend.read(buffer, from, dtype)?),
            Self::Paged(paged) => paged.read(backend, &from.into(), dtype),
        }
    }

    /// Another array of the same size in the same tier, with its memory or room.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`], [`zeroshard_model::Error::Storage`].
    pub fn another(&self, backend: &B) -> Result<Self> {
        match self {
            Self::Memory(buffer) => {
                let of_version = |failure: Failure| {
                    failure.of("a second version beside the one that is being read")
                };
                let mut another = backend.another(buffer).map_err(of_version)?;
                backend.populate(&mut another, 0..backend.numel(buffer));
                Ok(Self::Memory(Arc::new(another)))
            }
            Self::Paged(paged) => Ok(Self::Paged(Arc::new(paged.another()?))),
        }
    }

    /// Access for changes, to an array that nobody else holds.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Storage`]; [`zeroshard_model::Error::OutOfMemory`] for a working
    /// buffer.
    pub fn write(&mut self, backend: &B) -> Result<Writing<'_, B>> {
        match self {
            Self::Memory(buffer) => Ok(Writing::Memory(exclusive(buffer))),
            Self::Paged(paged) => paged.load(backend).map(Writing::Paged),
        }
    }

    /// Copies `from`, which has the same size and dtype, into this array, which nobody else holds.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn copy_from(&mut self, backend: &B, from: &Self) -> Result<()> {
        match (self, from) {
            (Self::Memory(to), Self::Memory(from)) => backend.copy(from, exclusive(to))?,
            (to, from) => {
                let (numel, dtype) = (from.numel(backend), from.dtype(backend));
                to.forget();
                let mut to = to.write(backend)?;
                for start in (0..numel).step_by(1 << 18) {
                    let range = start..numel.min(start + (1 << 18));
                    let bytes = from.read(backend, range.clone(), dtype)?;
                    backend.store(&mut to, range, &bytes, dtype)?;
                }
            }
        }
        Ok(())
    }

    /// The content is not needed any more: elements are written before they are read again.
    pub fn forget(&self) {
        if let Self::Paged(paged) = self {
            paged.forget();
        }
    }

    /// Writes the changes of a paged array.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Storage`].
    pub fn settle(&self, backend: &B) -> Result<()> {
        match self {
            Self::Memory(_) => Ok(()),
            Self::Paged(paged) => paged.settle(backend),
        }
    }

    /// Provides the memory of elements, if nobody else holds the array.
    pub fn populate(&mut self, backend: &B, range: Range<usize>) {
        if let Self::Memory(buffer) = self
            && let Some(buffer) = Arc::get_mut(buffer)
        {
            backend.populate(buffer, range);
        }
    }

    /// Reads elements into the beginning of `piece`, which has the same code. Changes to a paged
    /// array have been written back.
    pub(super) fn read_piece(
        &self,
        backend: &B,
        (range, code): (&Range<usize>, Option<Code>),
        piece: &mut B::Buffer,
        pages: &mut Pages,
    ) -> Result<()> {
        match self {
            Self::Memory(buffer) => {
                let form = Form { numel: range.len(), code };
                let bytes = form.read(backend, buffer, range.clone())?;
                Ok(form.store(backend, piece, 0..range.len(), &bytes)?)
            }
            Self::Paged(paged) => paged.read_piece(backend, range, piece, pages),
        }
    }

    /// Writes the beginning of `piece`, which has the same code, to elements of an array that
    /// nobody else holds.
    pub(super) fn write_piece(
        &mut self,
        backend: &B,
        (range, code): (&Range<usize>, Option<Code>),
        piece: &Arc<B::Buffer>,
        pages: &mut Pages,
    ) -> Result<()> {
        match self {
            Self::Memory(buffer) => {
                let form = Form { numel: range.len(), code };
                let bytes = form.read(backend, piece, 0..range.len())?;
                Ok(form.store(backend, exclusive(buffer), range.clone(), &bytes)?)
            }
            Self::Paged(paged) => paged.write_piece(backend, range, piece, pages),
        }
    }
}

fn exclusive<T>(buffer: &mut Arc<T>) -> &mut T {
    Arc::get_mut(buffer).expect("the caller has checked that nobody else holds it")
}

/// Write access to an array; for a paged array, to its working buffer.
pub enum Writing<'a, B: Backend> {
    Memory(&'a mut B::Buffer),
    Paged(MutexGuard<'a, Cell<B>>),
}

impl<B: Backend> Deref for Writing<'_, B> {
    type Target = B::Buffer;

    fn deref(&self) -> &B::Buffer {
        match self {
            Self::Memory(buffer) => buffer,
            Self::Paged(cell) => cell.buffer(),
        }
    }
}

impl<B: Backend> DerefMut for Writing<'_, B> {
    fn deref_mut(&mut self) -> &mut B::Buffer {
        match self {
            Self::Memory(buffer) => buffer,
            Self::Paged(cell) => cell.buffer_mut(),
        }
    }
}
