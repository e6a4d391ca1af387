//! The part of an optimizer that computes: a file for each in `loops`, and the choice between them.

use zeroshard_model::optimizer::Optimizer;

pub(crate) use crate::{
    Update,
    cpu::{Cpu, step::Arrays},
    cuda::{
        launch::Launch,
        step::{Scratch, Step},
    },
};

/// An optimizer's step. `self` are the hyperparameters.
pub(crate) trait Kernel {
    /// Runs the step over a slice on the CPU.
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>);

    /// The launches of the step over a slice on a GPU, in order. The bits are those of
    /// [`Kernel::step`].
    fn launches(&self, update: &Update<'_>, step: &Step, scratch: Scratch) -> Vec<Launch>;

    /// Returns whether the step reads each element of the gradient before it writes the parameter,
    /// and not again.
    fn reads_gradient_once(&self) -> bool {
        true
    }

    /// The values of [`Optimizer::scalar_state`] before the first step.
    fn scalars_before(&self) -> [f32; 2] {
        [0.0; 2]
    }

    /// The values of [`Optimizer::scalar_state`] after a step.
    fn scalars_after(&self, _: &Update<'_>) -> [f32; 2] {
        [0.0; 2]
    }
}

/// Returns whether a step of the optimizer reads each element of the gradient before it writes the
/// parameter, and not again, so that the parameter can take the gradient's place.
pub fn reads_gradient_once(optimizer: &Optimizer) -> bool {
    of(optimizer).reads_gradient_once()
}

/// Implements [`Kernel`] with the loop `step` of the file and one kernel, both over elements.
macro_rules! elementwise {
    ($kind:ident, $kernel:literal, [$($state:ident),*]) => {
        use $crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step};

        impl Kernel for $kind {
            fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
                let s = Scalars::new(self, update);
                cpu.tiles(arrays, |p, [$($state),*], g| step(cpu.level, &s, p, $($state,)* g));
            }

            fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
                step.one($kernel, Scalars::new(self, update))
            }
        }
    };
}
pub(crate) use elementwise;

macro_rules! choose {
    ($($(#[$doc:meta])* $kind:ident $name:ident $table:tt)*) => {
        /// The step of an optimizer.
        pub(crate) fn of(optimizer: &Optimizer) -> &dyn Kernel {
            match optimizer {
                $(Optimizer::$kind(hyperparameters) => hyperparameters,)*
            }
        }
    };
}

zeroshard_model::optimizers!(choose);
