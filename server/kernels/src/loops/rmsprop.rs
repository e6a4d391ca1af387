//! RMSprop with the operation order of `torch.optim.RMSprop`: Tieleman and Hinton, lecture 6.5
//! (2012); the centered variant is Graves, "Generating Sequences With Recurrent Neural Networks"
//! (2013). Paddle's formula differs in the place of epsilon and of the learning rate; adding 0 and
//! multiplying by 1 at the other place changes no bit.

use zeroshard_model::optimizer::RmsProp;

use super::{Lerp, decayed, signed, vectorised};
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    weight_decay: f32,
    alpha: f32,
    one_minus_alpha: f32,
    mean: Lerp,
    /// Added under the square root.
    inner_eps: f32,
    /// Added to the square root.
    eps: f32,
    momentum: f32,
    minus_lr: f32,
    /// The factors of an update when it enters the momentum buffer, and of the buffer.
    buffer_lr: f32,
    minus_descent: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(rmsprop: &RmsProp, update: &Update<'_>) -> Scalars {
        let (eps, lr) = (rmsprop.eps as f32, rmsprop.lr as f32);
        let of = |paddle: f32, torch| if rmsprop.paddle { paddle } else { torch };
        Scalars {
            gradient: signed(update.coefficient, rmsprop.maximize),
            weight_decay: rmsprop.weight_decay as f32,
            alpha: rmsprop.alpha as f32,
            one_minus_alpha: (1.0 - rmsprop.alpha) as f32,
            mean: Lerp::keeping(rmsprop.alpha),
            inner_eps: of(eps, 0.0),
            eps: of(0.0, eps),
            momentum: rmsprop.momentum as f32,
            minus_lr: -lr,
            buffer_lr: of(lr, 1.0),
            minus_descent: of(-1.0, -lr),
        }
    }

    #[inline(always)]
    fn gradient(&self, gradient: f32, parameter: f32) -> f32 {
        decayed(gradient * self.gradient, parameter, self.weight_decay)
    }

    #[inline(always)]
    fn square(&self, average: f32, g: f32) -> f32 {
        average * self.alpha + self.one_minus_alpha * g * g
    }

    #[inline(always)]
    fn without_momentum(&self, parameter: f32, g: f32, variance: f32) -> f32 {
        parameter + self.minus_lr * g / self.deviation(variance)
    }

    #[inline(always)]
    fn buffer(&self, buffer: f32, g: f32, variance: f32) -> f32 {
        buffer * self.momentum + self.buffer_lr * g / self.deviation(variance)
    }

    #[inline(always)]
    fn deviation(&self, variance: f32) -> f32 {
        (variance + self.inner_eps).sqrt() + self.eps
    }
}

impl Kernel for RmsProp {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        let (level, s) = (cpu.level, &Scalars::new(self, update));
        match (self.momentum != 0.0, self.centered) {
            (false, false) => cpu.tiles(arrays, |p, [v], g| plain(level, s, p, v, g)),
            (true, false) => cpu.tiles(arrays, |p, [v, b], g| with_momentum(level, s, p, v, b, g)),
            (false, true) => cpu.tiles(arrays, |p, [v, mean], g| centered(level, s, p, v, mean, g)),
            (true, true) => cpu.tiles(arrays, |p, [v, b, mean], g| {
                centered_with_momentum(level, s, p, v, b, mean, g);
            }),
        }
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        let kernel = match (self.momentum != 0.0, self.centered) {
            (false, false) => "rmsprop",
            (true, false) => "rmsprop_momentum",
            (false, true) => "rmsprop_centered",
            (true, true) => "rmsprop_centered_momentum",
        };
        step.one(kernel, Scalars::new(self, update))
    }
}

vectorised! {
    /// A step without momentum.
    pub fn plain(s: &Scalars, parameter: &mut [f32], square_avg: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (square_avg, gradient) = (&mut square_avg[..n], &gradient[..n]);
        for i in 0..n {
            let g = s.gradient(gradient[i], parameter[i]);
            let square = s.square(square_avg[i], g);
            square_avg[i] = square;
            parameter[i] = s.without_momentum(parameter[i], g, square);
        }
    }
}

vectorised! {
    /// A step with momentum.
    pub fn with_momentum(
        s: &Scalars,
        parameter: &mut [f32],
        square_avg: &mut [f32],
        momentum_buffer: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (square_avg, buffer) = (&mut square_avg[..n], &mut momentum_buffer[..n]);
        let gradient = &gradient[..n];
        for i in 0..n {
            let g = s.gradient(gradient[i], parameter[i]);
            let square = s.square(square_avg[i], g);
            square_avg[i] = square;
            buffer[i] = s.buffer(buffer[i], g, square);
            parameter[i] += buffer[i] * s.minus_descent;
        }
    }
}

vectorised! {
    /// A centered step without momentum.
    pub fn centered(
        s: &Scalars,
        parameter: &mut [f32],
        square_avg: &mut [f32],
        grad_avg: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (square_avg, grad_avg) = (&mut square_avg[..n], &mut grad_avg[..n]);
        let gradient = &gradient[..n];
        for i in 0..n {
            let g = s.gradient(gradient[i], parameter[i]);
            let (square, mean) = (s.square(square_avg[i], g), s.mean.to(grad_avg[i], g));
            square_avg[i] = square;
            grad_avg[i] = mean;
            parameter[i] = s.without_momentum(parameter[i], g, square - mean * mean);
        }
    }
}

vectorised! {
    /// A centered step with momentum.
    pub fn centered_with_momentum(
        s: &Scalars,
        parameter: &mut [f32],
        square_avg: &mut [f32],
        momentum_buffer: &mut [f32],
        grad_avg: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (square_avg, grad_avg) = (&mut square_avg[..n], &mut grad_avg[..n]);
        let (buffer, gradient) = (&mut momentum_buffer[..n], &gradient[..n]);
        for i in 0..n {
            let g = s.gradient(gradient[i], parameter[i]);
            let (square, mean) = (s.square(square_avg[i], g), s.mean.to(grad_avg[i], g));
            square_avg[i] = square;
            grad_avg[i] = mean;
            buffer[i] = s.buffer(buffer[i], g, square - mean * mean);
            parameter[i] += buffer[i] * s.minus_descent;
        }
    }
}
