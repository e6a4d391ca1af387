//! Records what a step changes in the published values of a slice, in each dtype in which readers
//! follow the job.

use zeroshard_changes::{Recorded, Recorder, block::unchanged};
use zeroshard_kernels::{Backend, Record};
use zeroshard_loops::{
    Level,
    convert::{self, Bf16, F16, F32},
};
use zeroshard_model::{DType, Result, SliceSpec, geometry::blocks::TILE};

use crate::tier::Array;

/// The number of elements of an array that are read at once.
const READ: usize = 1 << 16;

/// Room for the values of a tile in any dtype.
type Tile = [u8; TILE * size_of::<f32>()];

/// Compares the published values before and after a step, in the dtype of each history.
pub(super) struct Recording {
    /// The dtype of the published values.
    published: DType,
    level: Level,
    numel: usize,
    views: Vec<View>,
    /// A tile of the published values before and after the step.
    tiles: [Tile; 2],
}

/// The values as the readers in one dtype get them.
struct View {
    dtype: DType,
    recorder: Recorder,
    /// A tile of the values before and after the step.
    tiles: [Tile; 2],
}

impl View {
    /// Receives at most a tile of the published values before and after the step.
    fn compare(&mut self, level: Level, published: DType, [before, after]: [&[u8]; 2]) {
        if self.dtype == published {
            return self.recorder.compare(before, after);
        }
        let size = before.len() / published.size() * self.dtype.size();
        let [old, new] = self.tiles.each_mut().map(|tile| &mut tile[..size]);
        convert::cast(level, before, published, old, self.dtype);
        convert::cast(level, after, published, new, self.dtype);
        self.recorder.compare(old, new);
    }
}

impl Recording {
    pub(super) fn new(
        published: DType,
        spec: &SliceSpec,
        dtypes: impl Iterator<Item = DType>,
    ) -> Self {
        let (first, numel) = (spec.offset as u64, spec.numel);
        let (level, tiles) = (Level::best(), [[0; size_of::<Tile>()]; 2]);
        let view =
            |dtype| View { dtype, recorder: Recorder::new(level, dtype, first, numel), tiles };
        Self { published, level, numel, views: dtypes.map(view).collect(), tiles }
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
        let Self { published, level, numel, views, .. } = self;
        let tile = TILE * published.size();
        for start in (0..*numel).step_by(READ) {
            let range = start..(start + READ).min(*numel);
            let before = before.read(backend, range.clone(), *published)?;
            let after = after.read(backend, range, *published)?;
            for (before, after) in before.chunks(tile).zip(after.chunks(tile)) {
                views.iter_mut().for_each(|view| view.compare(*level, *published, [before, after]));
            }
        }
        Ok(())
    }

    /// Returns the change in each dtype, in the order of [`Self::new`], or `None` if not all
    /// elements were compared. `is_same`: the step has not changed the values.
    pub(super) fn finish(self, is_same: bool) -> impl Iterator<Item = Option<Recorded>> {
        let Self { views, numel, .. } = self;
        let same = move || Recorded { change: unchanged(numel), hash_difference: 0, changed: 0 };
        views.into_iter().map(move |view| match is_same {
            true => Some(same()),
            false => view.recorder.finish(),
        })
    }
}

impl Record for Recording {
    fn record(&mut self, before: &[f32], after: &[f32]) {
        let Self { published, level, views, tiles, .. } = self;
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
            views.iter_mut().for_each(|view| view.compare(*level, *published, [old, new]));
        }
    }
}
