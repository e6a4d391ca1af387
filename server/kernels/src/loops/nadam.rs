//! NAdam with the operation order of `torch.optim.NAdam` (single tensor): Dozat, "Incorporating
//! Nesterov Momentum into Adam" (2016).

use zeroshard_model::optimizer::NAdam;

use super::{Lerp, decayed, power, real_power, signed, vectorised};
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    /// Weight decay that is added to the gradient: 0 if it is decoupled.
    weight_decay: f32,
    /// The factor that decoupled weight decay applies to a parameter: 1 if it is not decoupled.
    kept: f32,
    first_moment: Lerp,
    beta2: f32,
    one_minus_beta2: f32,
    correction2: f32,
    eps: f32,
    /// The factors of the gradient and of the first moment in the change of a parameter.
    gradient_step: f32,
    moment_step: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(nadam: &NAdam, update: &Update<'_>) -> Scalars {
        let decay = |decoupled| match nadam.decoupled_weight_decay == decoupled {
            true => nadam.weight_decay,
            false => 0.0,
        };
        let (now, next) = momenta(nadam, update.step);
        let product = f64::from(mu_product_after(nadam, update));
        Scalars {
            gradient: signed(update.coefficient, nadam.maximize),
            weight_decay: decay(false) as f32,
            kept: (1.0 - nadam.lr * decay(true)) as f32,
            first_moment: Lerp::keeping(nadam.beta1),
            beta2: nadam.beta2 as f32,
            one_minus_beta2: (1.0 - nadam.beta2) as f32,
            correction2: (1.0 - power(nadam.beta2, update.step)) as f32,
            eps: nadam.eps as f32,
            gradient_step: (-nadam.lr * (1.0 - now) / (1.0 - product)) as f32,
            moment_step: ((-nadam.lr * next) / (1.0 - product * next)) as f32,
        }
    }
}

impl Kernel for NAdam {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        let s = Scalars::new(self, update);
        cpu.tiles(arrays, |p, [m, v], g| step(cpu.level, &s, p, m, v, g));
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        step.one("nadam", Scalars::new(self, update))
    }

    fn scalars_before(&self) -> [f32; 2] {
        [1.0, 0.0]
    }

    fn scalars_after(&self, update: &Update<'_>) -> [f32; 2] {
        [mu_product_after(self, update), 0.0]
    }
}

/// The product of all momenta after this step. torch keeps it in f32.
fn mu_product_after(nadam: &NAdam, update: &Update<'_>) -> f32 {
    update.scalar_state[0] * momenta(nadam, update.step).0 as f32
}

/// The momenta of step `step` and of the step after it.
fn momenta(nadam: &NAdam, step: u64) -> (f64, f64) {
    let decay = nadam.momentum_decay;
    let momentum = |power| nadam.beta1 * (1.0 - 0.5 * power);
    if nadam.paddle {
        let power = real_power(f64::from(power_in_f32(step)), decay);
        return (momentum(power), momentum(power * real_power(0.96, decay)));
    }
    let of = |step| momentum(real_power(0.96, step as f64 * decay));
    (of(step), of(step + 1))
}

/// 0.96 to the power of `step` as Paddle computes it: by one f32 multiplication in each step, which
/// does not change a number of less than 13 times the smallest one.
fn power_in_f32(step: u64) -> f32 {
    let mut power = 1.0;
    for _ in 0..step {
        let next = power * 0.96;
        if next == power {
            break;
        }
        power = next;
    }
    power
}

vectorised! {
    /// A step.
    pub fn step(
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
            let kept = parameter[i] * s.kept;
            let g = decayed(gradient[i] * s.gradient, kept, s.weight_decay);
            let m = s.first_moment.to(exp_avg[i], g);
            let v = exp_avg_sq[i] * s.beta2 + s.one_minus_beta2 * g * g;
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            let denominator = (v / s.correction2).sqrt() + s.eps;
            let w = kept + s.gradient_step * g / denominator;
            parameter[i] = w + s.moment_step * m / denominator;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The powers are `momentum_decay_pow` of `paddle.optimizer.NAdam` in Paddle 3.3.1 on a CPU.
    #[test]
    fn the_momentum_of_paddle_stays_constant_when_its_power_does() {
        let known = [(2_000, 3.486_951_458_694_916e-36), (2_450, 3.923_635_700_109_488e-44)];
        for (step, power) in [&known[..], &[(2_500, STAYS), (3_200, STAYS)]].concat() {
            assert_eq!(f64::from(power_in_f32(step)), power);
        }
        let torch = NAdam::default();
        let paddle = NAdam { paddle: true, ..torch };
        let difference = |step| (momenta(&paddle, step).0 - momenta(&torch, step).0).abs();
        assert!(difference(2_000) < 1e-6 && difference(10_000) > 0.1);
    }

    const STAYS: f64 = 1.681_558_157_189_780_5e-44;
}
