//! One optimizer step over one slice: selects the kernel and the state tensors, and works tile by
//! tile.

use std::ops::Range;

use zeroshard_model::{
    geometry::blocks::BLOCK,
    optimizer::{Optimizer, RmsProp, Sgd},
};

use super::{Buffer, Cpu};
use crate::loops::prefetch::prefetch;
use crate::loops::sum::{self, Lanes};
use crate::loops::{
    adadelta, adafactor, adagrad, adam, adamax, asgd, average, lamb, lion, nadam, radam, rmsprop,
    sgd,
};
use crate::{Output, Update};

/// The number of elements in a tile, after which a step casts the results and prefetches. It is
/// small, so that the prefetched lines do not delay the step's own loads.
const TILE: usize = 128;

/// The prefetch distance in elements: a small page, beyond which the hardware's own prefetcher does
/// not look.
const AHEAD: usize = 1_024;

// The lanes of a norm continue from tile to tile within a block.
const _: () = assert!(BLOCK.is_multiple_of(TILE) && TILE.is_multiple_of(sum::LANES));

pub(super) fn apply(
    cpu: &Cpu,
    update: &Update<'_>,
    mut master: Output<'_, Buffer>,
    mut state: Vec<Output<'_, Buffer>>,
    gradient: &Buffer,
    published: Option<&mut Buffer>,
) {
    let state = state.iter_mut().map(Array::of).collect();
    let gradient = gradient.values();
    let arrays = Arrays { master: Array::of(&mut master), state, gradient, published };
    arrays.check(update.optimizer);
    let &Update { step, coefficient, scalar_state, .. } = update;
    let level = cpu.level;
    match update.optimizer {
        Optimizer::Sgd(h) => cpu.sgd(h, &sgd::Scalars::new(h, step, coefficient), arrays),
        Optimizer::Asgd(h) => {
            let s = asgd::Scalars::new(h, scalar_state, coefficient);
            cpu.tiles(arrays, |p, [ax], g| asgd::step(level, &s, p, ax, g));
        }
        Optimizer::Adam(h) => {
            cpu.adam(&adam::Scalars::adam(h, step, coefficient), h.amsgrad, arrays);
        }
        Optimizer::AdamW(h) => {
            cpu.adam(&adam::Scalars::adamw(h, step, coefficient), h.amsgrad, arrays);
        }
        Optimizer::Adamax(h) => {
            let s = adamax::Scalars::new(h, step, coefficient);
            cpu.tiles(arrays, |p, [m, norm], g| adamax::step(level, &s, p, m, norm, g));
        }
        Optimizer::NAdam(h) => {
            let s = nadam::Scalars::new(h, step, scalar_state[0], coefficient);
            cpu.tiles(arrays, |p, [m, v], g| nadam::step(level, &s, p, m, v, g));
        }
        Optimizer::RAdam(h) => {
            let s = radam::Scalars::new(h, step, coefficient);
            cpu.tiles(arrays, |p, [m, v], g| radam::step(level, &s, p, m, v, g));
        }
        Optimizer::Adagrad(h) => {
            let s = adagrad::Scalars::new(h, step, coefficient);
            cpu.tiles(arrays, |p, [sum], g| adagrad::step(level, &s, p, sum, g));
        }
        Optimizer::Adadelta(h) => {
            let s = adadelta::Scalars::new(h, coefficient);
            cpu.tiles(arrays, |p, [square, delta], g| {
                adadelta::step(level, &s, p, square, delta, g)
            });
        }
        Optimizer::Adafactor(h) => {
            cpu.adafactor(&adafactor::Scalars::new(h, step, coefficient), arrays);
        }
        Optimizer::RmsProp(h) => cpu.rmsprop(h, &rmsprop::Scalars::new(h, coefficient), arrays),
        Optimizer::Lion(h) => {
            let s = lion::Scalars::new(h, coefficient);
            cpu.tiles(arrays, |p, [m], g| lion::step(level, &s, p, m, g));
        }
        Optimizer::Lamb(h) => cpu.lamb(&lamb::Scalars::new(h, step, coefficient), arrays),
        Optimizer::Average(_) => {
            cpu.tiles(arrays, |p, [], g| average::step(level, coefficient, p, g));
        }
    }
}

/// An array that a step reads and writes.
#[derive(Default)]
struct Array<'a> {
    values: &'a mut [f32],
    /// The earlier values, if they have not been copied into `values` yet.
    earlier: Option<&'a [f32]>,
}

impl<'a> Array<'a> {
    fn of(output: &'a mut Output<'_, Buffer>) -> Self {
        let earlier = output.earlier.as_ref().map(|earlier| earlier.values());
        let values = output.buffer.values_mut();
        assert!(earlier.is_none_or(|earlier| earlier.len() == values.len()), "of equal size");
        Self { values, earlier }
    }

    /// A part, with the earlier values. They are copied while the step has them in cache.
    fn tile(&mut self, range: Range<usize>) -> &mut [f32] {
        let values = &mut self.values[range.clone()];
        if let Some(earlier) = self.earlier {
            values.copy_from_slice(&earlier[range]);
        }
        values
    }

    /// All of it, with the earlier values.
    fn all(self) -> &'a mut [f32] {
        if let Some(earlier) = self.earlier {
            self.values.copy_from_slice(earlier);
        }
        self.values
    }

    fn prefetch(&self, range: Range<usize>) {
        if let Some(earlier) = self.earlier {
            prefetch(&earlier[range.clone()]);
        }
        prefetch(&self.values[range]);
    }

    /// The same array for a pass after which all earlier values have been copied.
    fn first_pass(&mut self) -> Array<'_> {
        Array { values: self.values, earlier: self.earlier.take() }
    }
}

/// The arrays of a step.
struct Arrays<'a> {
    master: Array<'a>,
    state: Vec<Array<'a>>,
    gradient: &'a [f32],
    published: Option<&'a mut Buffer>,
}

impl Arrays<'_> {
    fn check(&self, optimizer: &Optimizer) {
        let numel = self.master.values.len();
        assert_eq!(self.state.len(), optimizer.state().len(), "{optimizer}'s state tensors");
        let is_factored = matches!(optimizer, Optimizer::Adafactor(_));
        assert!(
            is_factored || self.state.iter().all(|state| state.values.len() == numel),
            "state is of the master's size"
        );
        assert_eq!(self.gradient.len(), numel, "the gradient is of the master's size");
        let published = self.published.as_ref().map_or(numel, |published| published.numel);
        assert_eq!(published, numel, "what is published is of the master's size");
    }

    /// The same arrays for a first pass, whose parameters must not be published yet.
    fn first_pass(&mut self) -> Arrays<'_> {
        Arrays {
            master: self.master.first_pass(),
            state: self.state.iter_mut().map(Array::first_pass).collect(),
            gradient: self.gradient,
            published: None,
        }
    }
}

impl Cpu {
    /// Runs `step` on each tile of the parameter, `N` state tensors and the gradient, and publishes
    /// the results.
    fn tiles<const N: usize>(
        &self,
        arrays: Arrays<'_>,
        mut step: impl FnMut(&mut [f32], [&mut [f32]; N], &[f32]),
    ) {
        let Arrays { mut master, state, gradient, mut published } = arrays;
        let state: Result<[Array<'_>; N], _> = state.try_into();
        let mut state = state.ok().expect("`check` counted the state tensors");
        let numel = master.values.len();
        for start in (0..numel).step_by(TILE) {
            let tile = start..(start + TILE).min(numel);
            let ahead = (tile.start + AHEAD).min(numel)..(tile.end + AHEAD).min(numel);
            master.prefetch(ahead.clone());
            state.iter().for_each(|state| state.prefetch(ahead.clone()));
            prefetch(&gradient[ahead]);
            let states = state.each_mut().map(|state| state.tile(tile.clone()));
            let parameter = master.tile(tile.clone());
            step(parameter, states, &gradient[tile.clone()]);
            if let Some(published) = &mut published {
                let dtype = published.dtype;
                self.encode(parameter, published.bytes_mut(tile), dtype);
            }
        }
    }

    fn sgd(&self, h: &Sgd, s: &sgd::Scalars, arrays: Arrays<'_>) {
        if h.momentum == 0.0 {
            self.tiles(arrays, |p, [], g| sgd::plain(self.level, s, p, g));
        } else {
            self.tiles(arrays, |p, [b], g| sgd::with_momentum(self.level, s, p, b, g));
        }
    }

    fn adam(&self, s: &adam::Scalars, amsgrad: bool, arrays: Arrays<'_>) {
        if amsgrad {
            self.tiles(arrays, |p, [m, v, max], g| adam::amsgrad(self.level, s, p, m, v, max, g));
        } else {
            self.tiles(arrays, |p, [m, v], g| adam::plain(self.level, s, p, m, v, g));
        }
    }

    fn rmsprop(&self, h: &RmsProp, s: &rmsprop::Scalars, arrays: Arrays<'_>) {
        let level = self.level;
        match (h.momentum != 0.0, h.centered) {
            (false, false) => self.tiles(arrays, |p, [v], g| rmsprop::plain(level, s, p, v, g)),
            (true, false) => self.tiles(arrays, |p, [v, b], g| {
                rmsprop::with_momentum(level, s, p, v, b, g);
            }),
            (false, true) => self.tiles(arrays, |p, [v, mean], g| {
                rmsprop::centered(level, s, p, v, mean, g);
            }),
            (true, true) => self.tiles(arrays, |p, [v, b, mean], g| {
                rmsprop::centered_with_momentum(level, s, p, v, b, mean, g);
            }),
        }
    }

    /// Two passes: first the moments and norms, then the update with the trust ratio, computed
    /// again.
    fn lamb(&self, s: &lamb::Scalars, mut arrays: Arrays<'_>) {
        let level = self.level;
        let mut scratch = [0.0; TILE];
        let (mut parameters, mut updates) = (BlockSums::default(), BlockSums::default());
        self.tiles(arrays.first_pass(), |p, [m, v], g| {
            let update = &mut scratch[..p.len()];
            lamb::moments(level, s, m, v, g);
            lamb::update(level, s, p, m, v, update);
            parameters.add(self, p);
            updates.add(self, update);
        });
        let minus_lr = s.minus_lr(parameters.total(), updates.total());
        self.tiles(arrays, |p, [m, v], _| {
            let update = &mut scratch[..p.len()];
            lamb::update(level, s, p, m, v, update);
            lamb::descend(level, p, update, minus_lr);
        });
    }

    fn adafactor(&self, s: &adafactor::Scalars, mut arrays: Arrays<'_>) {
        let level = self.level;
        let [rows, columns, variance] = &mut arrays.state[..] else {
            unreachable!("`check` counted the state tensors")
        };
        if variance.values.is_empty() {
            let rows = std::mem::take(rows).all();
            let columns = std::mem::take(columns).all();
            return self.adafactor_matrices(s, arrays, rows, columns);
        }
        arrays.state.drain(..2);
        let mut scratch = [0.0; TILE];
        let (mut parameters, mut updates) = (BlockSums::default(), BlockSums::default());
        let numel = arrays.master.values.len();
        self.tiles(arrays.first_pass(), |p, [v], g| {
            let update = &mut scratch[..p.len()];
            adafactor::vector_update(level, s, v, g, update);
            parameters.add(self, p);
            updates.add(self, update);
        });
        let minus_lr = s.minus_lr(parameters.total(), updates.total(), numel);
        self.tiles(arrays, |p, [v], g| adafactor::vector_descend(level, s, p, v, g, minus_lr));
    }

    /// Three passes over all matrices; the first two over one matrix after the other, because a
    /// small matrix is still in cache.
    fn adafactor_matrices(
        &self,
        s: &adafactor::Scalars,
        arrays: Arrays<'_>,
        rows: &mut [f32],
        columns: &mut [f32],
    ) {
        let Arrays { master, gradient, mut published, .. } = arrays;
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
                *sum = adafactor::squares(self.level, s, gradient, &mut column_sums);
            }
            s.move_moments(rows, &row_sums, width);
            s.move_moments(columns, &column_sums, height);
            let mean = s.mean(rows);
            for (gradient, &row) in gradient.chunks(width).zip(&*rows) {
                let moments = adafactor::Row { row, columns, mean };
                update_squares += adafactor::update_squares(self.level, s, gradient, moments);
            }
        }
        let parameter_squares = sum::of_squares(self.level, master);
        let minus_lr = s.minus_lr(parameter_squares, update_squares, numel);
        let mut starts = (0..numel).step_by(width);
        for (rows, columns) in rows.chunks(height).zip(columns.chunks(width)) {
            let mean = s.mean(rows);
            for (&row, start) in rows.iter().zip(&mut starts) {
                let at = start..start + width;
                let (parameter, gradient) = (&mut master[at.clone()], &gradient[at.clone()]);
                let moments = adafactor::Row { row, columns, mean };
                adafactor::descend(self.level, s, parameter, gradient, moments, minus_lr);
                if let Some(published) = &mut published {
                    let dtype = published.dtype;
                    self.encode(parameter, published.bytes_mut(at), dtype);
                }
            }
        }
    }
}

/// A sum of squares that is computed tile by tile, equal to [`sum::of_squares`] over all elements.
#[derive(Default)]
struct BlockSums {
    sum: f64,
    lanes: Lanes,
    /// The number of elements of the current block so far.
    filled: usize,
}

impl BlockSums {
    fn add(&mut self, cpu: &Cpu, tile: &[f32]) {
        sum::add_squares(cpu.level, &mut self.lanes, tile);
        self.filled += tile.len();
        if self.filled == BLOCK {
            self.sum += std::mem::take(&mut self.lanes).total();
            self.filled = 0;
        }
    }

    fn total(self) -> f64 {
        if self.filled == 0 { self.sum } else { self.sum + self.lanes.total() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_fed_tile_by_tile_equals_the_sum_of_the_whole() {
        let cpu = Cpu::new();
        for numel in [0, 1, TILE, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77] {
            let values: Vec<f32> = (0..numel).map(|i| ((i * 7919) as f32).sin()).collect();
            let mut sums = BlockSums::default();
            values.chunks(TILE).for_each(|tile| sums.add(&cpu, tile));
            assert_eq!(sums.total().to_bits(), sum::of_squares(cpu.level, &values).to_bits());
        }
    }
}
