//! Stochastic gradient descent with the operation order of `torch.optim.SGD`.

use zeroshard_model::optimizer::Sgd;

use super::{code::step::OneState, decayed, signed, vectorised};
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    weight_decay: f32,
    momentum: f32,
    undampened: f32,
    nesterov: bool,
    first: bool,
    minus_lr: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(sgd: &Sgd, update: &Update<'_>) -> Scalars {
        Scalars {
            gradient: signed(update.coefficient, sgd.maximize),
            weight_decay: sgd.weight_decay as f32,
            momentum: sgd.momentum as f32,
            undampened: (1.0 - sgd.dampening) as f32,
            nesterov: sgd.nesterov,
            first: update.step == 1,
            minus_lr: -sgd.lr as f32,
        }
    }
}

impl OneState for Scalars {
    /// The first step initialises the buffer with the undampened gradient.
    #[inline(always)]
    fn step(&self, parameter: f32, buffer: f32, gradient: f32) -> (f32, f32) {
        let g = decayed(gradient * self.gradient, parameter, self.weight_decay);
        let b = if self.first { g } else { buffer * self.momentum + g * self.undampened };
        let direction = if self.nesterov { g + b * self.momentum } else { b };
        (parameter + direction * self.minus_lr, b)
    }
}

impl Kernel for Sgd {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        let s = Scalars::new(self, update);
        match self.momentum == 0.0 {
            true => cpu.tiles(arrays, |p, [], g| plain(cpu.level, &s, p, g)),
            false if arrays.are_coded() => cpu.step_one(&s, update, arrays),
            false => cpu.tiles(arrays, |p, [b], g| with_momentum(cpu.level, &s, p, b, g)),
        }
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        let kernel = match (self.momentum == 0.0, step.rounding.is_some()) {
            (true, _) => "sgd",
            (false, true) => "sgd_momentum_int8",
            (false, false) => "sgd_momentum",
        };
        step.one(kernel, Scalars::new(self, update))
    }
}

vectorised! {
    /// A step without momentum.
    pub fn plain(s: &Scalars, parameter: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let gradient = &gradient[..n];
        for i in 0..n {
            let g = decayed(gradient[i] * s.gradient, parameter[i], s.weight_decay);
            parameter[i] += g * s.minus_lr;
        }
    }
}

vectorised! {
    /// A step with momentum.
    pub fn with_momentum(s: &Scalars, parameter: &mut [f32], buffer: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (buffer, gradient) = (&mut buffer[..n], &gradient[..n]);
        for i in 0..n {
            (parameter[i], buffer[i]) = s.step(parameter[i], buffer[i], gradient[i]);
        }
    }
}
