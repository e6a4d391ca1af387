//! Averaged stochastic gradient descent with the operation order of `torch.optim.ASGD` (single
//! tensor): Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992).

use zeroshard_model::optimizer::Asgd;

use super::{decayed, real_power, signed, vectorised};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    weight_decay: f32,
    kept: f32,
    minus_eta: f32,
    /// The weight of the parameters in their average. With 1 the average is the parameters.
    mu: f32,
}

impl Scalars {
    /// The scalars of a step. `eta` and `mu` are those that the step before it has set.
    pub fn new(asgd: &Asgd, [eta, mu]: [f32; 2], coefficient: f32) -> Scalars {
        Scalars {
            gradient: signed(coefficient, asgd.maximize),
            weight_decay: asgd.weight_decay as f32,
            kept: (1.0 - asgd.lambd * f64::from(eta)) as f32,
            minus_eta: -eta,
            mu,
        }
    }
}

/// The learning rate and the weight of the average that step `step` sets for the next step.
pub fn eta_and_mu_after(asgd: &Asgd, step: u64) -> [f32; 2] {
    let step = step as f64;
    let eta = asgd.lr / real_power(1.0 + asgd.lambd * asgd.lr * step, asgd.alpha);
    let mu = 1.0 / (step - asgd.t0).max(1.0);
    [eta as f32, mu as f32]
}

vectorised! {
    /// A step.
    pub fn step(s: &Scalars, parameter: &mut [f32], ax: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (ax, gradient) = (&mut ax[..n], &gradient[..n]);
        for i in 0..n {
            let g = decayed(gradient[i] * s.gradient, parameter[i], s.weight_decay);
            let w = parameter[i] * s.kept + s.minus_eta * g;
            ax[i] = if s.mu == 1.0 { w } else { ax[i] + (w - ax[i]) * s.mu };
            parameter[i] = w;
        }
    }
}
