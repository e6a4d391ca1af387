//! Stochastic gradient descent with the operation order of `torch.optim.SGD`.

use zeroshard_model::optimizer::Sgd;

use super::{decayed, signed, vectorised};

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
    /// The scalars of applied step `step` (from 1).
    pub fn new(sgd: &Sgd, step: u64, coefficient: f32) -> Scalars {
        Scalars {
            gradient: signed(coefficient, sgd.maximize),
            weight_decay: sgd.weight_decay as f32,
            momentum: sgd.momentum as f32,
            undampened: (1.0 - sgd.dampening) as f32,
            nesterov: sgd.nesterov,
            first: step == 1,
            minus_lr: -sgd.lr as f32,
        }
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
    /// A step with momentum. The first step initialises the buffer with the undampened gradient.
    pub fn with_momentum(s: &Scalars, parameter: &mut [f32], buffer: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (buffer, gradient) = (&mut buffer[..n], &gradient[..n]);
        for i in 0..n {
            let g = decayed(gradient[i] * s.gradient, parameter[i], s.weight_decay);
            let b = if s.first { g } else { buffer[i] * s.momentum + g * s.undampened };
            buffer[i] = b;
            let direction = if s.nesterov { g + b * s.momentum } else { b };
            parameter[i] += direction * s.minus_lr;
        }
    }
}
