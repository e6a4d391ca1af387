//! Adafactor, as in torch: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear
//! Memory Cost" (2018), with torch's use of the learning rate and of epsilon.
//!
//! The second moments of a matrix are estimated from those of its rows and of its columns. They
//! must be known before the update, and the root mean square of the update before a parameter
//! changes. So there are three passes over the gradient of a matrix, and two over that of a vector.
//! The last pass computes the update again, which gives the same bits and needs no memory.
//!
//! Element `i` of a row is added to lane `i % 16` in f64, and the lanes are added as a tree. The
//! sums of the rows are added in order. A column is added in the order of the rows.

use zeroshard_model::optimizer::Adafactor;

use super::{Lerp, real_power, signed, vectorised};

/// The number of partial sums of a row: few, because a row may have three elements.
const LANES: usize = 16;

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    second_moment: Lerp,
    eps1: f32,
    eps1_squared: f32,
    /// The factor of the parameter.
    decay: f32,
    eps2: f64,
    step_size: f64,
    d: f64,
}

impl Scalars {
    /// The scalars of applied step `step` (from 1).
    pub fn new(h: &Adafactor, step: u64, coefficient: f32) -> Scalars {
        let t = step as f64;
        Scalars {
            gradient: signed(coefficient, h.maximize),
            second_moment: Lerp::by(real_power(t, h.beta2_decay)),
            eps1: h.eps1 as f32,
            eps1_squared: (h.eps1 * h.eps1) as f32,
            decay: (1.0 - h.lr * h.weight_decay) as f32,
            eps2: h.eps2,
            step_size: h.lr.min(1.0 / t.sqrt()),
            d: h.d,
        }
    }

    /// The factor of the update, from the sums of squares of the tensor before the step and of the
    /// update, over `numel` elements.
    pub fn minus_lr(&self, parameter_squares: f64, update_squares: f64, numel: usize) -> f32 {
        let root_mean = |squares: f64| (squares / numel as f64).sqrt();
        let lr = root_mean(parameter_squares).max(self.eps2) * self.step_size;
        -(lr / (root_mean(update_squares) / self.d).max(1.0)) as f32
    }

    /// Moves the second moments of rows or columns towards the mean of `of` squares, given their
    /// sums.
    pub fn move_moments(&self, moments: &mut [f32], sums: &[f64], of: usize) {
        for (moment, sum) in moments.iter_mut().zip(sums) {
            *moment = self.second_moment.to(*moment, (sum / of as f64) as f32);
        }
    }

    /// The mean second moment of the rows of a matrix, at least `eps1`.
    pub fn mean(&self, rows: &[f32]) -> f32 {
        let sum = rows.iter().fold(0.0, |sum, &row| sum + f64::from(row));
        at_least((sum / rows.len() as f64) as f32, self.eps1)
    }

    /// The update, given the gradient and the estimated second moment.
    #[inline(always)]
    fn update(&self, gradient: f32, moment: f32) -> f32 {
        gradient * self.gradient / at_least(moment, self.eps1_squared).sqrt()
    }
}

/// The maximum; NaN if `value` is NaN, as `torch.clamp`.
#[inline(always)]
fn at_least(value: f32, minimum: f32) -> f32 {
    if value < minimum { minimum } else { value }
}

/// The second moments of a row of a matrix: `row * columns[i] / mean`.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The second moment of the row.
    pub row: f32,
    /// The second moments of all columns.
    pub columns: &'a [f32],
    /// The mean of all rows, from [`Scalars::mean`].
    pub mean: f32,
}

#[inline(always)]
fn total(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

vectorised! {
    /// First pass over a row of a matrix: adds its squares to the sums of the columns, and returns
    /// their sum.
    pub fn squares(s: &Scalars, gradient: &[f32], columns: &mut [f64]) -> f64 {
        let mut lanes = [0.0; LANES];
        for (gradient, columns) in gradient.chunks(LANES).zip(columns.chunks_mut(LANES)) {
            for ((&g, column), lane) in gradient.iter().zip(columns).zip(&mut lanes) {
                let g = f64::from(g * s.gradient);
                *column += g * g;
                *lane += g * g;
            }
        }
        total(lanes)
    }
}

vectorised! {
    /// Second pass over a row of a matrix: the sum of squares of the update.
    pub fn update_squares(s: &Scalars, gradient: &[f32], moments: Row<'_>) -> f64 {
        let mut lanes = [0.0; LANES];
        for (gradient, columns) in gradient.chunks(LANES).zip(moments.columns.chunks(LANES)) {
            for ((&g, &column), lane) in gradient.iter().zip(columns).zip(&mut lanes) {
                let update = f64::from(s.update(g, moments.row * column / moments.mean));
                *lane += update * update;
            }
        }
        total(lanes)
    }
}

vectorised! {
    /// Third pass over a row of a matrix: the new parameters.
    pub fn descend(
        s: &Scalars,
        parameter: &mut [f32],
        gradient: &[f32],
        moments: Row<'_>,
        minus_lr: f32,
    ) {
        let n = parameter.len();
        let (gradient, columns) = (&gradient[..n], &moments.columns[..n]);
        for i in 0..n {
            let update = s.update(gradient[i], moments.row * columns[i] / moments.mean);
            parameter[i] = parameter[i] * s.decay + update * minus_lr;
        }
    }
}

vectorised! {
    /// First pass over a vector: the new second moments and the update.
    pub fn vector_update(s: &Scalars, variance: &mut [f32], gradient: &[f32], update: &mut [f32]) {
        let n = gradient.len();
        let (variance, update) = (&mut variance[..n], &mut update[..n]);
        for i in 0..n {
            let g = gradient[i] * s.gradient;
            variance[i] = s.second_moment.to(variance[i], g * g);
            update[i] = s.update(gradient[i], variance[i]);
        }
    }
}

vectorised! {
    /// Second pass over a vector: the new parameters.
    pub fn vector_descend(
        s: &Scalars,
        parameter: &mut [f32],
        variance: &[f32],
        gradient: &[f32],
        minus_lr: f32,
    ) {
        let n = parameter.len();
        let (variance, gradient) = (&variance[..n], &gradient[..n]);
        for i in 0..n {
            let update = s.update(gradient[i], variance[i]);
            parameter[i] = parameter[i] * s.decay + update * minus_lr;
        }
    }
}
