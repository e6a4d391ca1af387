//! A step whose new values take the place of the gradient, because readers hold the old ones.
//!
//! A worker that maps the parameters holds each version until it has the next one. A step then
//! reads the gradient, and writes the new values where it was. The next gradient is added up where
//! the old values were. So two arrays are enough, and no byte more is moved than by a step in
//! place. Only a gradient that arrives before all workers have the new values gets a third array.

use zeroshard_kernels::Backend;
use zeroshard_model::Result;

use super::{Inner, Slice, versioned::Versioned};

impl<B: Backend> Slice<B> {
    /// Returns whether a reader can hold each version until it has the next one: new values take
    /// the place of the gradient, unless something else reads that at the moment.
    pub fn rotates(&self) -> bool {
        self.lock().is_shared(&self.backend)
    }
}

impl<B: Backend> Inner<B> {
    /// Returns whether processes on this host can map the values, and the gradient.
    fn is_shared(&self, backend: &B) -> bool {
        let has_place = |array: &Versioned<B>| {
            array.current().memory().is_some_and(|memory| backend.place(memory).is_some())
        };
        self.open.as_ref().is_some_and(|open| has_place(&self.master) && has_place(&open.sum))
    }

    /// Returns whether the next values can take the place of the gradient.
    pub(super) fn can_rotate(&self, backend: &B) -> bool {
        // A step beside a checkpoint uses memory that it has reserved within a budget.
        self.saves == 0
            && !self.master.has_spare()
            && self.is_shared(backend)
            && self.open.as_ref().is_some_and(|open| !open.sum.current().is_read())
    }

    /// Ensures that the next step succeeds beside the readers, as long as none is added without
    /// another call.
    ///
    /// # Errors
    /// Those of [`Versioned::reserve`].
    pub(super) fn reserve_versions(&mut self, backend: &B) -> Result<()> {
        let rotates = self.can_rotate(backend);
        let master = [&mut self.master].into_iter().filter(|_| !rotates);
        let mut buffers = self.published.iter_mut().chain(master).chain(&mut self.state);
        buffers.try_for_each(|buffer| buffer.reserve(backend))
    }
}
