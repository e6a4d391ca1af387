//! Content that the uploading rank of each set of contributors sends: initial values, and the
//! values that replace them.

use zeroshard_kernels::Backend;
use zeroshard_model::{Result, geometry::SliceContributors, optimizer::StateShape};

use super::factors;
use crate::{ranges::Ranges, round::Chunk};

/// The elements that have arrived.
#[derive(Debug)]
pub(super) struct Received(
    /// INVARIANT: one for each set of contributors.
    Vec<Part>,
);

#[derive(Debug, Clone, Default)]
struct Part {
    received: Ranges,
    /// `true` if anything was stored, in whatever attempt.
    is_written: bool,
}

impl Received {
    pub(super) fn new(contributors: &[SliceContributors]) -> Self {
        Self(vec![Part::default(); contributors.len()])
    }

    pub(super) fn clear(&mut self) {
        self.0.iter_mut().for_each(|part| part.received.clear());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|part| part.received.is_empty())
    }

    /// Returns whether all elements have arrived.
    pub(super) fn is_complete(&self, contributors: &[SliceContributors]) -> bool {
        self.missing_rank(contributors).is_none()
    }

    /// The first rank that has not sent everything.
    pub(super) fn missing_rank(&self, contributors: &[SliceContributors]) -> Option<u32> {
        let mut both = contributors.iter().zip(&self.0);
        let missing = both.find(|(of, part)| !part.received.is_all(of.elements.numel()));
        missing.map(|(of, _)| of.ranks.uploader())
    }

    /// Returns whether all elements of `chunk` have arrived before.
    pub(super) fn contains(&self, contributors: &[SliceContributors], chunk: &Chunk) -> bool {
        self.0[uploaded_by(contributors, chunk.rank)].received.contains(&chunk.range())
    }

    /// Stores the new elements of `chunk` in `content`, which has this shape. Returns their number.
    pub(super) fn store<B: Backend>(
        &mut self,
        backend: &B,
        contributors: &[SliceContributors],
        content: &mut B::Buffer,
        shape: StateShape,
        chunk: &Chunk,
    ) -> Result<u64> {
        let index = uploaded_by(contributors, chunk.rank);
        let (elements, part) = (&contributors[index].elements, &mut self.0[index]);
        let mut new = 0;
        let ranges = part.received.split(chunk.range());
        for (range, _) in ranges.into_iter().filter(|(_, known)| !known) {
            let values = chunk.select(range.clone());
            let elements = elements.select(range.clone());
            part.is_written = true;
            factors::store(backend, shape, content, &elements, (&values.bytes, values.dtype))?;
            new += range.len() as u64;
            part.received.insert(range);
        }
        Ok(new)
    }

    /// Counts everything that `rank` uploads as received, because the content has it already. False
    /// if the rank has stored some of it, and not all of it in this attempt.
    pub(super) fn keep(&mut self, contributors: &[SliceContributors], rank: u32) -> bool {
        let index = uploaded_by(contributors, rank);
        let (numel, part) = (contributors[index].elements.numel(), &mut self.0[index]);
        if !part.is_written {
            part.received.insert(0..numel);
        }
        part.received.is_all(numel)
    }
}

fn uploaded_by(contributors: &[SliceContributors], rank: u32) -> usize {
    let index = contributors.iter().position(|of| of.ranks.uploader() == rank);
    index.expect("the caller checked that the rank uploads")
}
