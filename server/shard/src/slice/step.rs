//! A step of a slice.

use std::sync::Weak;

use zeroshard_kernels::{Backend, Position, Update};
use zeroshard_model::{AppliedSteps, Attempt, Optimizer, Result};

use super::{
    Inner, Open, Reduced, Role, Slice,
    versioned::{Versioned, in_memory},
};
use crate::tier::{Array, Arrays};

/// The effect of a step on a slice.
pub struct Step<'a> {
    /// `None`: the step is skipped.
    pub apply: Option<Apply<'a>>,
    /// The first attempt at the following step.
    pub next: Attempt,
    /// The slices for which no rank had a gradient, ascending, for backups.
    pub absent: &'a [u32],
}

/// The parameters of an applied step that are equal for all slices.
#[derive(Clone, Copy)]
pub struct Apply<'a> {
    pub groups: &'a [Optimizer],
    /// The factor of mean gradients.
    pub coefficient: f64,
    /// The factor of mean gradients that are not clipped.
    pub unclipped: f64,
    /// Further factors by tensor; empty: all are 1.
    pub gradient_factors: &'a [f64],
}

impl<B: Backend> Slice<B> {
    /// Takes the slice to the version of `step.next`. Returns the properties of the next step's
    /// gradient if it is complete because all ranks are absent.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if a reader holds the old version and no memory was
    /// reserved, which does not happen after the gradient was reported;
    /// [`zeroshard_model::Error::Storage`] and [`zeroshard_model::Error::Device`], after which the
    /// slice can no longer be used.
    pub fn step(&self, index: u32, step: &Step<'_>) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        let stepped = self.step_of(&mut inner, index, step);
        // A part of it may be of the next version.
        inner.note(stepped)
    }

    /// Returns the master weights of the version, if the pass of the optimizer cannot compare them
    /// with the new ones: the values were `replaced` before it, or the process cannot read the
    /// memory of the device. Returns `None` if it can, or if there is no memory for the copy: the
    /// change then stays unknown.
    fn before(&self, inner: &Inner<B>, replaced: Option<&Array<B>>) -> Option<Array<B>> {
        let current = inner.master.current();
        match (replaced, current) {
            (Some(old), _) => Some(old.clone()),
            (None, Array::Memory(_)) if !self.backend.records() => {
                let mut copy = current.another(&self.backend).ok()?;
                copy.copy_from(&self.backend, current).ok()?;
                Some(copy)
            }
            (None, _) => None,
        }
    }

    fn step_of(
        &self,
        inner: &mut Inner<B>,
        index: u32,
        step: &Step<'_>,
    ) -> Result<Option<Reduced>> {
        let role = self.role();
        let is_absent = |open: &Open<B>| match role {
            Role::Primary => open.round.is_absent_everywhere(),
            Role::Backup | Role::Copying => step.absent.binary_search(&index).is_ok(),
            Role::Empty => true,
        };
        let mut recording = self.recording(&inner.histories);
        let replaced = inner.take_replacement(&self.contributors);
        let mut is_same = false;
        if let Some((group, open)) = self.group.zip(inner.open.as_ref())
            && let Some(apply) = step.apply
            && !is_absent(open)
        {
            let coefficient = if self.no_clip { apply.unclipped } else { apply.coefficient };
            let factor = apply.gradient_factors.get(self.spec.tensor).copied().unwrap_or(1.0);
            let coefficient = (coefficient * factor / self.divisor) as f32;
            let optimizer = &apply.groups[group];
            let at = Position { tensor: self.spec.tensor as u64, element: self.spec.offset as u64 };
            let update = Update { at, ..Update::after(inner.applied, optimizer, coefficient) };
            // If there is no memory, nothing has been written.
            inner.reserve_versions(&self.backend)?;
            let rotates = inner.master.current().is_read() && inner.can_rotate(&self.backend);
            let before = recording.as_ref().and_then(|_| self.before(inner, replaced.as_ref()));
            let open = inner.open.as_mut().expect("a slice that takes gradients has a sum");
            let buffers = [&inner.master, &open.sum].into_iter().chain(&inner.state);
            buffers.into_iter().try_for_each(|buffer| buffer.settle(&self.backend))?;
            let published = inner.published.as_mut().map(|p| p.next(&self.backend)).transpose()?;
            let published = published.map(|published| in_memory(published).buffer);
            let master = match rotates {
                true => inner.master.rotate(&mut open.sum),
                false => inner.master.next(&self.backend)?,
            };
            // The step keeps the state tensors that it does not use.
            let is_used = |name: &&str| optimizer.state().contains(name);
            let state = inner.state.iter_mut().zip(self.state_names);
            let state = state.filter(|(_, name)| is_used(name));
            let state = state.map(|(state, _)| state.next(&self.backend));
            let state = state.collect::<Result<Vec<_>>>()?;
            let sum = open.sum.current();
            let record = recording.as_mut().filter(|_| before.is_none());
            let record = record.map(|recording| recording as _);
            match self.tiers.as_ref().and_then(|tiers| tiers.steps()) {
                None => {
                    let state = state.into_iter().map(in_memory).collect();
                    let sum = sum.memory().expect("all arrays are in memory");
                    let sum = (!rotates).then_some(&**sum);
                    let master = in_memory(master);
                    self.backend.apply(&update, master, state, sum, published, record)?;
                }
                Some(steps) => {
                    let state_codes = &self.state_codes[..state.len().min(self.state_codes.len())];
                    let arrays = Arrays { master, state, state_codes, sum, published, record };
                    steps.apply(&self.backend, &update, self.spec.numel, arrays)?;
                }
            }
            let averaged = inner.applied.averaged;
            inner.applied = AppliedSteps { averaged, ..update.applied() };
            inner.hold = Weak::new();
            if let Some((recording, before)) = recording.as_mut().zip(before) {
                recording.compare(&*self.backend, [&before, inner.master.current()])?;
            }
        } else if let Some(old) = replaced {
            inner.cast(&self.backend)?;
            inner.settle(&self.backend)?;
            inner.hold = Weak::new();
            if let Some(recording) = &mut recording {
                recording.compare(&*self.backend, [&old, inner.master.current()])?;
            }
        } else {
            is_same = true;
        }
        self.average(inner, step.apply.is_some())?;
        inner.buffers().for_each(Versioned::release);
        if let Some(hold) = inner.hold.upgrade() {
            hold.free();
        }
        inner.restart(&self.backend, step.next, role)?;
        if let Some(recording) = recording {
            // Drops histories with an unknown step. They begin again when a reader asks.
            let mut changes = recording.finish(is_same);
            inner.histories.retain_mut(|history| history.push(changes.next().flatten()));
        }
        self.set_version(step.next.step);
        inner.reduced(&self.backend, role)
    }
}
