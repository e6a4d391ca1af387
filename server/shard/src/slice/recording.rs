//! Records what a step changes in the published values of a slice, in the dtypes of those who
//! follow the job.

use zeroshard_changes::{Recorded, Recorder, block::unchanged};
use zeroshard_kernels::{Backend, Record};
use zeroshard_loops::{
    Level,
    convert::{self, Bf16, F16, F32},
};
use zeroshard_model::{DType, Result, SliceSpec};

use crate::tier::Array;

/// The elements that are cast at once: a tile of a step.
const PIECE: usize = 128;

/// The elements of an array that are read at once.
const READ: usize = 1 << 16;

/// The change that a step makes.
pub(super) struct Recording {
    /// The dtype of the published values.
    published: DType,
    recorders: Vec<(DType, Recorder)>,
    numel: usize,
    level: Level,
    before: Cast,
    after: Cast,
    is_unknown: bool,
}

impl Recording {
    pub(super) fn new(
        published: DType,
        spec: &SliceSpec,
        dtypes: impl Iterator<Item = DType>,
    ) -> Self {
        let (first, numel) = (spec.offset as u64, spec.numel);
        let level = Level::best();
        let recorder = |dtype| (dtype, Recorder::new(level, dtype, first, numel));
        let recorders = dtypes.map(recorder).collect();
        let [before, after] = [(); 2].map(|()| Cast::default());
        Self { published, recorders, numel, level, before, after, is_unknown: false }
    }

    /// The values change in a way that is not recorded.
    pub(super) fn is_unknown(&mut self) {
        self.is_unknown = true;
    }

    /// Records that the values of `after` take the place of those of `before`: both are the
    /// published values, or both are f32 master weights.
    ///
    /// # Errors
    /// Those of [`Array::read`].
    pub(super) fn compare<B: Backend>(
        &mut self,
        backend: &B,
        [before, after]: [&Array<B>; 2],
    ) -> Result<()> {
        for start in (0..self.numel).step_by(READ) {
            let range = start..self.numel.min(start + READ);
            if after.dtype(backend) == self.published {
                for (dtype, recorder) in &mut self.recorders {
                    let before = before.read(backend, range.clone(), *dtype)?;
                    recorder.compare(&before, &after.read(backend, range.clone(), *dtype)?);
                }
                continue;
            }
            let [mut old, mut new] = [(); 2].map(|()| vec![0.0; range.len()]);
            for (array, values) in [(before, &mut old), (after, &mut new)] {
                let bytes = array.read(backend, range.clone(), DType::F32)?;
                convert::decode::<F32>(self.level, &bytes, values);
            }
            self.record(&old, &new);
        }
        Ok(())
    }

    /// The change in each dtype, in the order in which they were given. `None`: it is not known.
    /// `is_same`: the step has not changed the values.
    pub(super) fn finish(self, is_same: bool) -> impl Iterator<Item = Option<Recorded>> {
        let Self { recorders, numel, is_unknown, .. } = self;
        let same = move || Recorded { change: unchanged(numel), hash_difference: 0, changed: 0 };
        recorders.into_iter().map(move |(_, recorder)| match is_same {
            _ if is_unknown => None,
            true => Some(same()),
            false => recorder.finish(),
        })
    }
}

impl Record for Recording {
    fn record(&mut self, before: &[f32], after: &[f32]) {
        let Self { published, recorders, level, before: old, after: new, .. } = self;
        for (before, after) in before.chunks(PIECE).zip(after.chunks(PIECE)) {
            for (dtype, recorder) in &mut *recorders {
                let dtypes = [*published, *dtype];
                recorder.compare(old.of(*level, before, dtypes), new.of(*level, after, dtypes));
            }
        }
    }
}

/// Master weights as a reader gets them: rounded to the dtype of the tensor, and cast to its own.
struct Cast {
    published: [u8; PIECE * 4],
    read: [u8; PIECE * 4],
}

impl Default for Cast {
    fn default() -> Self {
        Self { published: [0; PIECE * 4], read: [0; PIECE * 4] }
    }
}

impl Cast {
    fn of(&mut self, level: Level, master: &[f32], [published, dtype]: [DType; 2]) -> &[u8] {
        let rounded = &mut self.published[..master.len() * published.size()];
        match published {
            DType::F32 => convert::encode::<F32>(level, master, rounded),
            DType::Bf16 => convert::encode::<Bf16>(level, master, rounded),
            DType::F16 => convert::encode::<F16>(level, master, rounded),
        }
        if published == dtype {
            return rounded;
        }
        let read = &mut self.read[..master.len() * dtype.size()];
        convert::cast(level, rounded, published, read, dtype);
        read
    }
}
