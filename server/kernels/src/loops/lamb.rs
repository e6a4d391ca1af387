//! LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
//! (2020), algorithm 2.
//!
//! The norm of the update must be known before a parameter changes, so there are two passes. The
//! second pass computes the update again from the moments, which gives the same bits and needs no
//! memory.

use zeroshard_model::optimizer::Lamb;

use super::{Lerp, power, signed, vectorised};
use crate::{
    cpu::step::{BlockSums, TILE},
    kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update},
};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    first_moment: Lerp,
    beta2: f32,
    one_minus_beta2: f32,
    /// Reciprocals: one division per element, instead of three, keeps both passes near the memory
    /// bandwidth.
    inverse_correction1: f32,
    inverse_correction2_sqrt: f32,
    eps: f32,
    weight_decay: f32,
    lr: f64,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(lamb: &Lamb, update: &Update<'_>) -> Scalars {
        Scalars {
            gradient: signed(update.coefficient, lamb.maximize),
            first_moment: Lerp::keeping(lamb.beta1),
            beta2: lamb.beta2 as f32,
            one_minus_beta2: (1.0 - lamb.beta2) as f32,
            inverse_correction1: (1.0 / (1.0 - power(lamb.beta1, update.step))) as f32,
            inverse_correction2_sqrt: (1.0 / (1.0 - power(lamb.beta2, update.step)).sqrt()) as f32,
            eps: lamb.eps as f32,
            weight_decay: lamb.weight_decay as f32,
            lr: lamb.lr,
        }
    }

    /// The factor of the update, from the sums of squares of the tensor.
    pub fn minus_lr(&self, parameter_squares: f64, update_squares: f64) -> f32 {
        let trust = if parameter_squares > 0.0 && update_squares > 0.0 {
            parameter_squares.sqrt() / update_squares.sqrt()
        } else {
            1.0
        };
        -(self.lr * trust) as f32
    }
}

impl Kernel for Lamb {
    /// Two passes: first the moments and norms, then the update with the trust ratio, computed
    /// again.
    fn step(&self, cpu: &Cpu, update: &Update<'_>, mut arrays: Arrays<'_>) {
        let (level, s) = (cpu.level, &Scalars::new(self, update));
        let mut scratch = [0.0; TILE];
        let (mut parameters, mut updates) = (BlockSums::default(), BlockSums::default());
        cpu.tiles(arrays.first_pass(), |p, [m, v], g| {
            let update = &mut scratch[..p.len()];
            moments(level, s, m, v, g);
            self::update(level, s, p, m, v, update);
            parameters.add(cpu, p);
            updates.add(cpu, update);
        });
        let minus_lr = s.minus_lr(parameters.total(), updates.total());
        cpu.tiles(arrays, |p, [m, v], _| {
            let update = &mut scratch[..p.len()];
            self::update(level, s, p, m, v, update);
            descend(level, p, update, minus_lr);
        });
    }

    fn reads_gradient_once(&self) -> bool {
        false
    }

    fn launches(&self, update: &Update<'_>, step: &Step, mut scratch: Scratch) -> Vec<Launch> {
        let s = Scalars::new(self, update);
        let [(m, _), (v, _)] = step.state[..] else { unreachable!("LAMB has two moments") };
        let sums = step.sum_blocks();
        let [parameters, updates, rate] = [8 * sums, 8 * sums, 4].map(|bytes| scratch.take(bytes));
        vec![
            Launch::over_sums("lamb_moments", step.numel)
                .with(s)
                .with(step.numel)
                .with(step.gradient)
                .with(step.master.from)
                .with(m)
                .with(v)
                .with(parameters)
                .with(updates),
            Launch::over_elements("lamb_rate", 1)
                .with(s)
                .with(sums)
                .with(parameters)
                .with(updates)
                .with(rate),
            Launch::over_elements("lamb_descend", step.numel)
                .with(s)
                .with(step.numel)
                .with(m.to)
                .with(v.to)
                .with(rate)
                .with(step.published)
                .with(step.master),
        ]
    }
}

vectorised! {
    /// The first pass: the new moments.
    pub fn moments(s: &Scalars, exp_avg: &mut [f32], exp_avg_sq: &mut [f32], gradient: &[f32]) {
        let n = gradient.len();
        let (exp_avg, exp_avg_sq) = (&mut exp_avg[..n], &mut exp_avg_sq[..n]);
        for i in 0..n {
            let g = gradient[i] * s.gradient;
            exp_avg[i] = s.first_moment.to(exp_avg[i], g);
            exp_avg_sq[i] = exp_avg_sq[i] * s.beta2 + s.one_minus_beta2 * g * g;
        }
    }
}

vectorised! {
    /// Both passes: the update, before the trust ratio and the learning rate.
    pub fn update(
        s: &Scalars,
        parameter: &[f32],
        exp_avg: &[f32],
        exp_avg_sq: &[f32],
        update: &mut [f32],
    ) {
        let n = parameter.len();
        let (exp_avg, exp_avg_sq, update) = (&exp_avg[..n], &exp_avg_sq[..n], &mut update[..n]);
        for i in 0..n {
            let denominator = exp_avg_sq[i].sqrt() * s.inverse_correction2_sqrt + s.eps;
            let ratio = exp_avg[i] * s.inverse_correction1 / denominator;
            update[i] = ratio + parameter[i] * s.weight_decay;
        }
    }
}

vectorised! {
    /// The second pass: the new parameters.
    pub fn descend(parameter: &mut [f32], update: &[f32], minus_lr: f32) {
        let n = parameter.len();
        let update = &update[..n];
        for i in 0..n {
            parameter[i] += update[i] * minus_lr;
        }
    }
}
