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

use super::{Lerp, real_power, signed, sum, vectorised};
use crate::{
    cpu::step::{BlockSums, TILE},
    cuda::launch::{Address, Array},
    kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update},
};

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
    /// The scalars of a step.
    pub fn new(h: &Adafactor, update: &Update<'_>) -> Scalars {
        let t = update.step as f64;
        Scalars {
            gradient: signed(update.coefficient, h.maximize),
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

impl Kernel for Adafactor {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, mut arrays: Arrays<'_>) {
        let (level, s) = (cpu.level, &Scalars::new(self, update));
        let state = arrays.state.values();
        let [rows, columns, variance] = &mut state[..] else {
            unreachable!("`check` counted the state tensors")
        };
        if variance.values.is_empty() {
            let rows = std::mem::take(rows).all();
            let columns = std::mem::take(columns).all();
            return step_matrices(cpu, s, arrays, rows, columns);
        }
        state.drain(..2);
        let mut scratch = [0.0; TILE];
        let (mut parameters, mut updates) = (BlockSums::default(), BlockSums::default());
        let numel = arrays.master.values.len();
        cpu.tiles(arrays.first_pass(), |p, [v], g| {
            let update = &mut scratch[..p.len()];
            vector_update(level, s, v, g, update);
            parameters.add(cpu, p);
            updates.add(cpu, update);
        });
        let minus_lr = s.minus_lr(parameters.total(), updates.total(), numel);
        cpu.tiles(arrays, |p, [v], g| vector_descend(level, s, p, v, g, minus_lr));
    }

    fn reads_gradient_once(&self) -> bool {
        false
    }

    fn launches(&self, update: &Update<'_>, step: &Step, scratch: Scratch) -> Vec<Launch> {
        let s = Scalars::new(self, update);
        let [rows, columns, variance] = step.state[..] else {
            unreachable!("Adafactor has three state tensors")
        };
        match variance {
            (_, 0) => launch_matrices(step, s, rows, columns, scratch),
            (variance, _) => launch_vector(step, s, variance, scratch),
        }
    }
}

/// Three passes over all matrices; the first two over one matrix after the other, because a
/// small matrix is still in cache.
fn step_matrices(
    cpu: &Cpu,
    s: &Scalars,
    arrays: Arrays<'_>,
    rows: &mut [f32],
    columns: &mut [f32],
) {
    let gradient = arrays.gradient();
    let Arrays { master, mut published, mut record, .. } = arrays;
    let master = master.all();
    let numel = master.len();
    if numel == 0 {
        return;
    }
    // The state tensors have a value for each row and for each column of all matrices.
    let (width, height) = (numel / rows.len(), numel / columns.len());
    assert!(
        width * rows.len() == numel && height * columns.len() == numel,
        "the state tensors are of the matrices' size"
    );
    let mut row_sums = vec![0.0; height];
    let mut column_sums = vec![0.0; width];
    let mut update_squares = 0.0;
    let matrices = gradient.chunks(width * height);
    let moments = rows.chunks_mut(height).zip(columns.chunks_mut(width));
    for (gradient, (rows, columns)) in matrices.zip(moments) {
        column_sums.fill(0.0);
        for (gradient, sum) in gradient.chunks(width).zip(&mut row_sums) {
            *sum = squares(cpu.level, s, gradient, &mut column_sums);
        }
        s.move_moments(rows, &row_sums, width);
        s.move_moments(columns, &column_sums, height);
        let mean = s.mean(rows);
        for (gradient, &row) in gradient.chunks(width).zip(&*rows) {
            let moments = Row { row, columns, mean };
            update_squares += self::update_squares(cpu.level, s, gradient, moments);
        }
    }
    let parameter_squares = sum::of_squares(cpu.level, master);
    let minus_lr = s.minus_lr(parameter_squares, update_squares, numel);
    let mut before = vec![0.0; if record.is_some() { width } else { 0 }];
    let mut starts = (0..numel).step_by(width);
    for (rows, columns) in rows.chunks(height).zip(columns.chunks(width)) {
        let mean = s.mean(rows);
        for (&row, start) in rows.iter().zip(&mut starts) {
            let at = start..start + width;
            let (parameter, gradient) = (&mut master[at.clone()], &gradient[at.clone()]);
            let moments = Row { row, columns, mean };
            if record.is_some() {
                before.copy_from_slice(parameter);
            }
            descend(cpu.level, s, parameter, gradient, moments, minus_lr);
            if let Some(record) = &mut record {
                record.record(&before, parameter);
            }
            if let Some(published) = &mut published {
                let dtype = published.dtype();
                cpu.encode(parameter, published.bytes_mut(at), dtype);
            }
        }
    }
}

/// The matrices of a slice.
#[derive(Clone, Copy)]
#[repr(C)]
struct Matrices {
    height: u64,
    width: u64,
    count: u64,
}

fn launch_vector(step: &Step, s: Scalars, variance: Array, mut scratch: Scratch) -> Vec<Launch> {
    let sums = step.sum_blocks();
    let [parameters, updates, rate] = [8 * sums, 8 * sums, 4].map(|bytes| scratch.take(bytes));
    vec![
        Launch::over_sums("adafactor_vector", step.numel)
            .with(s)
            .with(step.numel)
            .with(step.gradient)
            .with(step.master.from)
            .with(variance)
            .with(parameters)
            .with(updates),
        launch_rate(step, s, (parameters, sums), (updates, sums), rate),
        Launch::over_elements("adafactor_vector_descend", step.numel)
            .with(s)
            .with(step.numel)
            .with(step.gradient)
            .with(variance.to)
            .with(rate)
            .with(step.published)
            .with(step.master),
    ]
}

fn launch_matrices(
    step: &Step,
    s: Scalars,
    (rows, height): (Array, usize),
    (columns, width): (Array, usize),
    mut scratch: Scratch,
) -> Vec<Launch> {
    // The state tensors have a value for each row and for each column of all matrices.
    let of = Matrices {
        height: (step.numel / width) as u64,
        width: (step.numel / height) as u64,
        count: (height * width / step.numel) as u64,
    };
    let sums = step.sum_blocks();
    let parameters = scratch.take(8 * sums);
    let updates = scratch.take(8 * height);
    let means = scratch.take(4 * of.count as usize);
    let rate = scratch.take(4);
    let with = |launch: Launch| launch.with(s).with(of).with(step.gradient);
    vec![
        Launch::over_sums("squares", step.numel)
            .with(step.master.from)
            .with(step.numel)
            .with(parameters),
        with(Launch::over_rows("adafactor_rows", height)).with(rows),
        with(Launch::over_elements("adafactor_columns", width)).with(columns),
        Launch::over_elements("adafactor_means", of.count as usize)
            .with(s)
            .with(of)
            .with(rows.to)
            .with(means),
        with(Launch::over_rows("adafactor_update_squares", height))
            .with(rows.to)
            .with(columns.to)
            .with(means)
            .with(updates),
        launch_rate(step, s, (parameters, sums), (updates, height), rate),
        with(Launch::over_elements("adafactor_descend", step.numel))
            .with(rows.to)
            .with(columns.to)
            .with(means)
            .with(rate)
            .with(step.published)
            .with(step.master),
    ]
}

fn launch_rate(
    step: &Step,
    s: Scalars,
    (parameters, parameter_sums): (Address, usize),
    (updates, update_sums): (Address, usize),
    rate: Address,
) -> Launch {
    Launch::over_elements("adafactor_rate", 1)
        .with(s)
        .with(step.numel)
        .with(parameters)
        .with(parameter_sums)
        .with(updates)
        .with(update_sums)
        .with(rate)
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
