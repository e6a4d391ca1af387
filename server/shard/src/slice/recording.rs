//! Records what a step changes in the published values of a slice, in each view in which readers
//! follow the tensor.

use std::ops::Range;

use zeroshard_changes::{Recorded, Recorder, block::unchanged};
use zeroshard_kernels::{Backend, Record};
use zeroshard_loops::{
    Level,
    convert::{self, Bf16, F16, F32},
};
use zeroshard_model::{DType, Elements, Result, SliceSpec, View, geometry::blocks::TILE};

use crate::tier::Array;

/// The number of elements of an array that are read at once.
const READ: usize = 1 << 16;

/// Room for the values of a tile in any dtype.
type Tile = [u8; TILE * size_of::<f32>()];

const EMPTY: [Tile; 2] = [[0; size_of::<Tile>()]; 2];

/// Compares the published values before and after a step, in the view of each history.
pub(super) struct Recording {
    /// The dtype of the published values.
    published: DType,
    level: Level,
    /// The number of elements of the slice.
    numel: usize,
    /// The number of elements that were compared.
    seen: usize,
    views: Vec<Seen>,
    /// A tile of the published values before and after the step.
    tiles: [Tile; 2],
}

/// The values as the readers in one view get them.
struct Seen {
    dtype: DType,
    /// The number of the view's elements in the slice.
    numel: usize,
    runs: Runs,
    recorder: Recorder,
    /// The view's elements of a tile, before and after the step.
    packed: [Tile; 2],
    /// The same elements in the dtype of the view.
    rounded: [Tile; 2],
}

/// The runs of a view's elements in the slice that were not compared yet.
struct Runs {
    elements: Elements,
    /// The rest of the current run; empty after the last one.
    run: Range<usize>,
    /// The number of elements up to the end of the current run.
    taken: usize,
}

impl Runs {
    fn new(elements: Elements) -> Self {
        let mut runs = Self { elements, run: 0..0, taken: 0 };
        runs.advance();
        runs
    }

    fn advance(&mut self) {
        let rest = self.elements.select(self.taken..self.elements.numel());
        self.run = rest.runs().next().unwrap_or_default();
        self.taken += self.run.len();
    }

    /// Takes the next run of elements before `end`, or the part of it before `end`.
    fn before(&mut self, end: usize) -> Option<Range<usize>> {
        if self.run.is_empty() || self.run.start >= end {
            return None;
        }
        let part = self.run.start..self.run.end.min(end);
        self.run.start = part.end;
        if self.run.is_empty() {
            self.advance();
        }
        Some(part)
    }
}

impl Seen {
    fn new(level: Level, view: &View, spec: &SliceSpec) -> Self {
        let (dtype, elements) = (view.dtype(), view.elements(spec));
        let (first, numel) = (view.positions(spec).start as u64, elements.numel());
        let recorder = Recorder::new(level, dtype, first, numel);
        let runs = Runs::new(elements);
        Self { dtype, numel, runs, recorder, packed: EMPTY, rounded: EMPTY }
    }

    /// Receives at most a tile of the published values before and after the step. `start` is the
    /// position of the first one in the slice.
    fn compare(
        &mut self,
        (level, published): (Level, DType),
        start: usize,
        [before, after]: [&[u8]; 2],
    ) {
        let Self { dtype, runs, recorder, packed, rounded, .. } = self;
        let size = published.size();
        let end = start + before.len() / size;
        let bytes = |run: Range<usize>| (run.start - start) * size..(run.end - start) * size;
        let dtypes = (level, published, *dtype);
        let Some(first) = runs.before(end) else { return };
        let Some(second) = runs.before(end) else {
            let run = bytes(first);
            return compare([&before[run.clone()], &after[run]], dtypes, rounded, recorder);
        };
        let [old, new] = packed;
        let rest = std::iter::from_fn(|| runs.before(end));
        let mut filled = 0;
        for run in [first, second].into_iter().chain(rest).map(bytes) {
            let room = filled..filled + run.len();
            filled = room.end;
            old[room.clone()].copy_from_slice(&before[run.clone()]);
            new[room].copy_from_slice(&after[run]);
        }
        compare([&old[..filled], &new[..filled]], dtypes, rounded, recorder);
    }
}

/// Rounds published values to the dtype of a view, and compares them.
fn compare(
    [before, after]: [&[u8]; 2],
    (level, published, dtype): (Level, DType, DType),
    rounded: &mut [Tile; 2],
    recorder: &mut Recorder,
) {
    if dtype == published {
        return recorder.compare(before, after);
    }
    let size = before.len() / published.size() * dtype.size();
    let [old, new] = rounded.each_mut().map(|tile| &mut tile[..size]);
    convert::cast(level, before, published, old, dtype);
    convert::cast(level, after, published, new, dtype);
    recorder.compare(old, new);
}

impl Recording {
    pub(super) fn new<'a>(
        published: DType,
        spec: &SliceSpec,
        views: impl Iterator<Item = &'a View>,
    ) -> Self {
        let level = Level::best();
        let views = views.map(|view| Seen::new(level, view, spec)).collect();
        Self { published, level, numel: spec.numel, seen: 0, views, tiles: EMPTY }
    }

    /// Records that the master weights `after` replace the master weights `before`.
    ///
    /// # Errors
    /// Those of [`Array::read`].
    pub(super) fn compare<B: Backend>(
        &mut self,
        backend: &B,
        [before, after]: [&Array<B>; 2],
    ) -> Result<()> {
        let Self { published, level, numel, seen, views, .. } = self;
        let tile = TILE * published.size();
        for start in (0..*numel).step_by(READ) {
            let range = start..(start + READ).min(*numel);
            let before = before.read(backend, range.clone(), *published)?;
            let after = after.read(backend, range, *published)?;
            for (before, after) in before.chunks(tile).zip(after.chunks(tile)) {
                let of = (*level, *published);
                views.iter_mut().for_each(|view| view.compare(of, *seen, [before, after]));
                *seen += before.len() / published.size();
            }
        }
        Ok(())
    }

    /// Returns the change in each view, in the order of [`Self::new`], or `None` if not all
    /// elements were compared. `is_same`: the step has not changed the values.
    pub(super) fn finish(self, is_same: bool) -> impl Iterator<Item = Option<Recorded>> {
        self.views.into_iter().map(move |view| match is_same {
            true => {
                let change = unchanged(view.numel);
                Some(Recorded { change, hash_difference: 0, changed: 0 })
            }
            false => view.recorder.finish(),
        })
    }
}

impl Record for Recording {
    fn record(&mut self, before: &[f32], after: &[f32]) {
        let Self { published, level, seen, views, tiles, .. } = self;
        for (before, after) in before.chunks(TILE).zip(after.chunks(TILE)) {
            let [old, new] =
                tiles.each_mut().map(|tile| &mut tile[..before.len() * published.size()]);
            for (master, rounded) in [(before, &mut *old), (after, &mut *new)] {
                match published {
                    DType::F32 => convert::encode::<F32>(*level, master, rounded),
                    DType::Bf16 => convert::encode::<Bf16>(*level, master, rounded),
                    DType::F16 => convert::encode::<F16>(*level, master, rounded),
                }
            }
            let of = (*level, *published);
            views.iter_mut().for_each(|view| view.compare(of, *seen, [old, new]));
            *seen += before.len();
        }
    }
}
