//! The arrays of an optimizer step over one slice, and the loop over their tiles.

use std::ops::Range;

use zeroshard_model::optimizer::StateShape;

use super::{Buffer, Cpu, coded::Coded};
use crate::loops::prefetch::prefetch;
use crate::loops::{
    running_average,
    sum::{self, Lanes},
};
use crate::{
    Output, Record,
    kernel::{self, Update},
};

// A step goes over one tile after the other: it decodes the state, casts the results, and
// prefetches. A tile is small, so that the prefetched lines do not delay the step's own loads.
pub(crate) use zeroshard_model::geometry::blocks::{BLOCK, TILE};

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
    gradient: Option<&Buffer>,
    published: Option<&mut Buffer>,
    record: Option<&mut dyn Record>,
) {
    let gradient = gradient.map(Buffer::values);
    let (master, state) = (Array::of(&mut master), State::of(&mut state));
    let record = record.map(|record| record as _);
    let arrays = Arrays { master, state, gradient, published, record };
    arrays.check(update);
    kernel::of(update.optimizer).step(cpu, update, arrays);
}

/// Moves a running average towards `values`.
pub(super) fn average(
    cpu: &Cpu,
    weight: f64,
    values: &Buffer,
    mut high: Output<'_, Buffer>,
    mut low: Output<'_, Buffer>,
) {
    let (values, mut high, mut low) = (values.values(), Array::of(&mut high), Array::of(&mut low));
    let lengths = [high.values.len(), low.values.len()];
    assert_eq!(lengths, [values.len(); 2], "an average is of its parameters' size");
    for start in (0..values.len()).step_by(TILE) {
        let tile = start..(start + TILE).min(values.len());
        let (high, low) = (high.tile(tile.clone()), low.tile(tile.clone()));
        running_average::step(cpu.level, weight, &values[tile], high, low);
    }
}

/// An array that a step reads and writes.
#[derive(Default)]
pub(crate) struct Array<'a> {
    pub(crate) values: &'a mut [f32],
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
    #[inline]
    fn tile(&mut self, range: Range<usize>) -> &mut [f32] {
        let values = &mut self.values[range.clone()];
        if let Some(earlier) = self.earlier {
            values.copy_from_slice(&earlier[range]);
        }
        values
    }

    /// All of it, with the earlier values.
    pub(crate) fn all(self) -> &'a mut [f32] {
        if let Some(earlier) = self.earlier {
            self.values.copy_from_slice(earlier);
        }
        self.values
    }

    /// The same array for a pass after which all earlier values have been copied.
    fn first_pass(&mut self) -> Array<'_> {
        Array { values: self.values, earlier: self.earlier.take() }
    }
}

impl Array<'_> {
    #[inline]
    fn prefetch_earlier(&self, range: Range<usize>) {
        if let Some(earlier) = self.earlier {
            prefetch(&earlier[range]);
        }
    }
}

impl Prefetch for Array<'_> {
    const STEP_PREFETCHES: bool = false;

    fn prefetch(&self, range: Range<usize>) {
        self.prefetch_earlier(range.clone());
        prefetch(&self.values[range]);
    }
}

/// An array that a step reads and writes tile by tile.
pub(super) trait Prefetch {
    /// `true` if the step prefetches what it reads and writes by itself, except earlier values.
    const STEP_PREFETCHES: bool;

    fn prefetch(&self, range: Range<usize>);
}

/// The state tensors of a step.
pub(crate) enum State<'a> {
    Values(Vec<Array<'a>>),
    Coded(Vec<Coded<'a>>),
}

impl<'a> State<'a> {
    fn of(outputs: &'a mut [Output<'_, Buffer>]) -> Self {
        match outputs.iter().any(|output| output.buffer.layout.code().is_some()) {
            false => Self::Values(outputs.iter_mut().map(Array::of).collect()),
            true => Self::Coded(outputs.iter_mut().map(Coded::of).collect()),
        }
    }

    /// The numbers of elements.
    fn lengths(&self) -> Vec<usize> {
        match self {
            Self::Values(arrays) => arrays.iter().map(|array| array.values.len()).collect(),
            Self::Coded(arrays) => arrays.iter().map(Coded::len).collect(),
        }
    }

    /// The state tensors of a step over 8-bit state.
    pub(super) fn take_coded(&mut self) -> Vec<Coded<'a>> {
        match self {
            Self::Values(_) => unreachable!("the caller has asked `are_coded`"),
            Self::Coded(arrays) => std::mem::take(arrays),
        }
    }

    /// The state tensors of a step that needs their values: it has no codes.
    pub(crate) fn values(&mut self) -> &mut Vec<Array<'a>> {
        match self {
            Self::Values(arrays) => arrays,
            Self::Coded(_) => unreachable!("`check` compared the codes with the optimizer's"),
        }
    }
}

/// The arrays of a step.
pub(crate) struct Arrays<'a> {
    pub(crate) master: Array<'a>,
    pub(crate) state: State<'a>,
    /// `None`: it is in `master.values`.
    gradient: Option<&'a [f32]>,
    pub(crate) published: Option<&'a mut Buffer>,
    /// Receives the old and the new parameters.
    pub(crate) record: Option<&'a mut dyn Record>,
}

impl<'a> Arrays<'a> {
    /// The gradient, for a step that reads it more than once.
    pub(crate) fn gradient(&self) -> &'a [f32] {
        self.gradient.expect("a gradient that is read more than once is not overwritten")
    }

    /// Returns whether the state tensors are 8-bit state.
    pub(crate) fn are_coded(&self) -> bool {
        matches!(self.state, State::Coded(_))
    }

    fn check(&self, update: &Update<'_>) {
        let (optimizer, numel) = (update.optimizer, self.master.values.len());
        let lengths = self.state.lengths();
        assert_eq!(lengths.len(), optimizer.state().len(), "{optimizer}'s state tensors");
        let is_factored =
            optimizer.state_shapes(&[1, 1]).iter().any(|of| *of != StateShape::Elements);
        assert!(
            is_factored || lengths.iter().all(|&length| length == numel),
            "state is of the master's size"
        );
        if let State::Coded(arrays) = &self.state {
            let codes: Vec<_> = arrays.iter().map(Coded::code).collect();
            assert_eq!(Some(&codes[..]), optimizer.state_codes(), "{optimizer}'s codes");
            assert!(update.at.element.is_multiple_of(TILE as u64), "the arrays begin with a tile");
        }
        match self.gradient {
            Some(gradient) => assert_eq!(gradient.len(), numel, "of the master's size"),
            None => {
                let is_possible = kernel::reads_gradient_once(optimizer);
                assert!(is_possible && self.master.earlier.is_some(), "both are needed");
            }
        }
        let published = self.published.as_ref().map_or(numel, |published| published.numel);
        assert_eq!(published, numel, "what is published is of the master's size");
    }

    /// The same arrays for a first pass, whose parameters must not be published yet.
    pub(crate) fn first_pass(&mut self) -> Arrays<'_> {
        Arrays {
            master: self.master.first_pass(),
            state: State::Values(self.state.values().iter_mut().map(Array::first_pass).collect()),
            gradient: self.gradient,
            published: None,
            record: None,
        }
    }
}

impl Cpu {
    /// Runs `step` on each tile of the parameter, `N` state tensors and the gradient, and publishes
    /// the results.
    pub(crate) fn tiles<const N: usize>(
        &self,
        mut arrays: Arrays<'_>,
        mut step: impl FnMut(&mut [f32], [&mut [f32]; N], &[f32]),
    ) {
        let state = std::mem::take(arrays.state.values());
        self.each_tile(arrays, state, |tile, parameter, state: &mut [Array<'_>; N], gradient| {
            let state = state.each_mut().map(|state| state.tile(tile.clone()));
            step(parameter, state, gradient);
        });
    }

    /// Runs `step` on the range of each tile, the parameter, the state tensors and the gradient.
    pub(super) fn each_tile<A: Prefetch, const N: usize>(
        &self,
        arrays: Arrays<'_>,
        state: Vec<A>,
        mut step: impl FnMut(Range<usize>, &mut [f32], &mut [A; N], &[f32]),
    ) {
        let Arrays { mut master, gradient, mut published, mut record, .. } = arrays;
        let state: Result<[A; N], _> = state.try_into();
        let mut state = state.ok().expect("`check` counted the state tensors");
        let numel = master.values.len();
        let mut replaced = [0.0; TILE];
        let mut before = [0.0; TILE];
        for start in (0..numel).step_by(TILE) {
            let tile = start..(start + TILE).min(numel);
            let ahead = (tile.start + AHEAD).min(numel)..(tile.end + AHEAD).min(numel);
            state.iter().for_each(|state| state.prefetch(ahead.clone()));
            if A::STEP_PREFETCHES {
                master.prefetch_earlier(ahead);
            } else {
                master.prefetch(ahead.clone());
                gradient.iter().for_each(|gradient| prefetch(&gradient[ahead.clone()]));
            }
            let gradient = match gradient {
                Some(gradient) => &gradient[tile.clone()],
                None => {
                    let replaced = &mut replaced[..tile.len()];
                    replaced.copy_from_slice(&master.values[tile.clone()]);
                    replaced
                }
            };
            let parameter = master.tile(tile.clone());
            let before = &mut before[..tile.len()];
            if record.is_some() {
                before.copy_from_slice(parameter);
            }
            step(tile.clone(), parameter, &mut state, gradient);
            if let Some(record) = &mut record {
                record.record(before, parameter);
            }
            if let Some(published) = &mut published {
                let dtype = published.dtype();
                self.encode(parameter, published.bytes_mut(tile), dtype);
            }
        }
    }
}

/// A sum of squares that is computed tile by tile, equal to [`sum::of_squares`] over all elements.
#[derive(Default)]
pub(crate) struct BlockSums {
    sum: f64,
    lanes: Lanes,
    /// The number of elements of the current block so far.
    filled: usize,
}

impl BlockSums {
    pub(crate) fn add(&mut self, cpu: &Cpu, tile: &[f32]) {
        sum::add_squares(cpu.level, &mut self.lanes, tile);
        self.filled += tile.len();
        if self.filled == BLOCK {
            self.sum += std::mem::take(&mut self.lanes).total();
            self.filled = 0;
        }
    }

    pub(crate) fn total(self) -> f64 {
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
