//! Adam, with and without AMSGrad, with the operation order of `torch.optim.Adam` (single tensor),
//! and the loops of AdamW.
//!
//! Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Reddi, Kale and Kumar, "On
//! the Convergence of Adam and Beyond" (2018).

use zeroshard_model::optimizer::Adam;

use super::{Lerp, code::step::TwoStates, decayed, power, signed, vectorised};
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    /// Weight decay that is added to the gradient: 0 for AdamW.
    weight_decay: f32,
    /// The factor that decoupled weight decay applies to a parameter: 1 for Adam.
    pub(super) kept: f32,
    first_moment: Lerp,
    beta2: f32,
    one_minus_beta2: f32,
    correction2_sqrt: f32,
    eps: f32,
    minus_step_size: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(adam: &Adam, update: &Update<'_>) -> Scalars {
        let correction2 = 1.0 - power(adam.beta2, update.step);
        Scalars {
            gradient: signed(update.coefficient, adam.maximize),
            weight_decay: adam.weight_decay as f32,
            kept: 1.0,
            first_moment: Lerp::keeping(adam.beta1),
            beta2: adam.beta2 as f32,
            one_minus_beta2: (1.0 - adam.beta2) as f32,
            correction2_sqrt: correction2.sqrt() as f32,
            eps: adam.eps as f32,
            minus_step_size: -(adam.lr / (1.0 - power(adam.beta1, update.step))) as f32,
        }
    }

    /// The scalars of a step with 8-bit state. Multiplying by the root of the correction, instead
    /// of dividing by it, saves one of two divisions of each element.
    fn for_codes(self, adam: &Adam, update: &Update<'_>) -> Scalars {
        let correction2_sqrt = (1.0 - power(adam.beta2, update.step)).sqrt();
        let step_size = adam.lr * correction2_sqrt / (1.0 - power(adam.beta1, update.step));
        Scalars {
            correction2_sqrt: 1.0,
            eps: (adam.eps * correction2_sqrt) as f32,
            minus_step_size: -step_size as f32,
            ..self
        }
    }

    /// A step on the CPU.
    pub(super) fn step(self, adam: &Adam, update: &Update<'_>, cpu: &Cpu, arrays: Arrays<'_>) {
        if arrays.are_coded() {
            let s = self.for_codes(adam, update);
            return match self.weight_decay == 0.0 {
                true => cpu.step_two(&WithoutDecay(s), update, arrays),
                false => cpu.step_two(&s, update, arrays),
            };
        }
        match adam.amsgrad {
            false => cpu.tiles(arrays, |p, [m, v], g| plain(cpu.level, &self, p, m, v, g)),
            true => cpu.tiles(arrays, |p, [m, v, max], g| {
                amsgrad(cpu.level, &self, p, m, v, max, g);
            }),
        }
    }

    /// A step on a GPU.
    pub(super) fn launches(self, adam: &Adam, update: &Update<'_>, step: &Step) -> Vec<Launch> {
        match (step.rounding.is_some(), adam.amsgrad) {
            (true, _) => step.one("adam_int8", self.for_codes(adam, update)),
            (false, true) => step.one("adam_amsgrad", self),
            (false, false) => step.one("adam", self),
        }
    }

    /// The new moments.
    #[inline(always)]
    fn moments(&self, gradient: f32, parameter: f32, m: f32, v: f32) -> (f32, f32) {
        let g = decayed(gradient * self.gradient, parameter, self.weight_decay);
        (self.first_moment.to(m, g), v * self.beta2 + self.one_minus_beta2 * g * g)
    }

    /// The new parameter.
    #[inline(always)]
    fn parameter(&self, parameter: f32, m: f32, v: f32) -> f32 {
        let denominator = v.sqrt() / self.correction2_sqrt + self.eps;
        parameter * self.kept + self.minus_step_size * m / denominator
    }
}

impl TwoStates for Scalars {
    #[inline(always)]
    fn step(&self, p: f32, (m, v): (f32, f32), gradient: f32) -> (f32, (f32, f32)) {
        let (m, v) = self.moments(gradient, p, m, v);
        let p = p * self.kept + self.minus_step_size * m / (v.sqrt() + self.eps);
        (p, (m, v))
    }
}

/// The same for gradients without weight decay, which the loop need not look for.
struct WithoutDecay(Scalars);

impl TwoStates for WithoutDecay {
    #[inline(always)]
    fn step(&self, p: f32, state: (f32, f32), gradient: f32) -> (f32, (f32, f32)) {
        TwoStates::step(&Scalars { weight_decay: 0.0, ..self.0 }, p, state, gradient)
    }
}

impl Kernel for Adam {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        Scalars::new(self, update).step(self, update, cpu, arrays);
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        Scalars::new(self, update).launches(self, update, step)
    }
}

vectorised! {
    /// A step.
    pub fn plain(
        s: &Scalars,
        parameter: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (exp_avg, exp_avg_sq) = (&mut exp_avg[..n], &mut exp_avg_sq[..n]);
        let gradient = &gradient[..n];
        for i in 0..n {
            let (m, v) = s.moments(gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            parameter[i] = s.parameter(parameter[i], m, v);
        }
    }
}

vectorised! {
    /// A step that divides by the maximum of all second moments so far.
    pub fn amsgrad(
        s: &Scalars,
        parameter: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        max_exp_avg_sq: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (exp_avg, exp_avg_sq) = (&mut exp_avg[..n], &mut exp_avg_sq[..n]);
        let (largest, gradient) = (&mut max_exp_avg_sq[..n], &gradient[..n]);
        for i in 0..n {
            let (m, v) = s.moments(gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            let max = if v > largest[i] { v } else { largest[i] };
            largest[i] = max;
            parameter[i] = s.parameter(parameter[i], m, max);
        }
    }
}
