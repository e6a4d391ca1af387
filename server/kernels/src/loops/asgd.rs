//! Averaged stochastic gradient descent with the operation order of `torch.optim.ASGD` (single
//! tensor): Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992).

use zeroshard_model::optimizer::Asgd;

use super::{decayed, real_power, signed, vectorised};
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

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
    /// The scalars of a step. The step before it has set `eta` and `mu`.
    pub fn new(asgd: &Asgd, update: &Update<'_>) -> Scalars {
        let [eta, mu] = update.scalar_state;
        Scalars {
            gradient: signed(update.coefficient, asgd.maximize),
            weight_decay: asgd.weight_decay as f32,
            kept: (1.0 - asgd.lambd * f64::from(eta)) as f32,
            minus_eta: -eta,
            mu,
        }
    }
}

impl Kernel for Asgd {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        let s = Scalars::new(self, update);
        cpu.tiles(arrays, |p, [ax], g| step(cpu.level, &s, p, ax, g));
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        step.one("asgd", Scalars::new(self, update))
    }

    fn scalars_before(&self) -> [f32; 2] {
        [self.lr as f32, 1.0]
    }

    fn scalars_after(&self, update: &Update<'_>) -> [f32; 2] {
        let step = update.step as f64;
        let eta = self.lr / real_power(1.0 + self.lambd * self.lr * step, self.alpha);
        let mu = 1.0 / (step - self.t0).max(1.0);
        [eta as f32, mu as f32]
    }
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
