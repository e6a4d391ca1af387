//! Averaging: the parameters become the mean gradient.

use zeroshard_model::optimizer::Average;

use super::vectorised;
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

impl Kernel for Average {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        cpu.tiles(arrays, |p, [], g| step(cpu.level, update.coefficient, p, g));
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        step.one("average", update.coefficient)
    }
}

vectorised! {
    /// A step: `parameter = gradient * coefficient`, regardless of the previous parameter.
    pub fn step(coefficient: f32, parameter: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let gradient = &gradient[..n];
        for i in 0..n {
            parameter[i] = gradient[i] * coefficient;
        }
    }
}
