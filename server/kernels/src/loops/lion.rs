//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.

use zeroshard_model::optimizer::Lion;

use super::{code::step::OneState, signed, vectorised};
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    kept: f32,
    lr: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(lion: &Lion, update: &Update<'_>) -> Scalars {
        Scalars {
            gradient: signed(update.coefficient, lion.maximize),
            beta1: lion.beta1 as f32,
            one_minus_beta1: (1.0 - lion.beta1) as f32,
            beta2: lion.beta2 as f32,
            one_minus_beta2: (1.0 - lion.beta2) as f32,
            kept: (1.0 - lion.lr * lion.weight_decay) as f32,
            lr: lion.lr as f32,
        }
    }
}

impl OneState for Scalars {
    /// The sign of zero is zero.
    #[inline(always)]
    fn step(&self, parameter: f32, m: f32, gradient: f32) -> (f32, f32) {
        let g = gradient * self.gradient;
        let c = m * self.beta1 + g * self.one_minus_beta1;
        let change = if c == 0.0 { 0.0 } else { self.lr.copysign(c) };
        (parameter * self.kept - change, m * self.beta2 + g * self.one_minus_beta2)
    }
}

impl Kernel for Lion {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        let s = Scalars::new(self, update);
        match arrays.are_coded() {
            false => cpu.tiles(arrays, |p, [m], g| step(cpu.level, &s, p, m, g)),
            true => cpu.step_one(&s, update, arrays),
        }
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        let kernel = if step.rounding.is_some() { "lion_int8" } else { "lion" };
        step.one(kernel, Scalars::new(self, update))
    }
}

vectorised! {
    /// A step.
    pub fn step(s: &Scalars, parameter: &mut [f32], exp_avg: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (exp_avg, gradient) = (&mut exp_avg[..n], &gradient[..n]);
        for i in 0..n {
            (parameter[i], exp_avg[i]) = s.step(parameter[i], exp_avg[i], gradient[i]);
        }
    }
}
