//! Content that one rank of each set of contributors sends: initial values, and the values that
//! replace them.

use zeroshard_kernels::Backend;
use zeroshard_model::{
    Result,
    geometry::{Ranks, SliceContributors},
    optimizer::StateShape,
};

use super::factors;
use crate::{ranges::Ranges, round::Chunk};

/// The elements that have arrived.
#[derive(Debug)]
pub(super) struct Received {
    /// INVARIANT: one for each set of contributors.
    parts: Vec<Part>,
    /// The rank that sends the content of each.
    sender: fn(&Ranks) -> u32,
}

#[derive(Debug, Clone, Default)]
struct Part {
    received: Ranges,
    /// `true` if anything was stored, in whatever attempt.
    is_written: bool,
}

impl Received {
    pub(super) fn new(contributors: &[SliceContributors], sender: fn(&Ranks) -> u32) -> Self {
        Self { parts: vec![Part::default(); contributors.len()], sender }
    }

    pub(super) fn clear(&mut self) {
        self.parts.iter_mut().for_each(|part| part.received.clear());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.iter().all(|part| part.received.is_empty())
    }

    /// Returns whether all elements have arrived.
    pub(super) fn is_complete(&self, contributors: &[SliceContributors]) -> bool {
        self.missing_rank(contributors).is_none()
    }

    /// The first rank that has not sent everything.
    pub(super) fn missing_rank(&self, contributors: &[SliceContributors]) -> Option<u32> {
        let mut both = contributors.iter().zip(&self.parts);
        let missing = both.find(|(of, part)| !part.received.is_all(of.elements.numel()));
        missing.map(|(of, _)| (self.sender)(&of.ranks))
    }

    /// Returns whether all elements of `chunk` have arrived before.
    pub(super) fn contains(&self, contributors: &[SliceContributors], chunk: &Chunk) -> bool {
        self.parts[self.index(contributors, chunk.rank)].received.contains(&chunk.range())
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
        let index = self.index(contributors, chunk.rank);
        let (elements, part) = (&contributors[index].elements, &mut self.parts[index]);
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
        let index = self.index(contributors, rank);
        let (numel, part) = (contributors[index].elements.numel(), &mut self.parts[index]);
        if !part.is_written {
            part.received.insert(0..numel);
        }
        part.received.is_all(numel)
    }

    /// The set of contributors for which `rank` sends the content.
    fn index(&self, contributors: &[SliceContributors], rank: u32) -> usize {
        let index = contributors.iter().position(|of| (self.sender)(&of.ranks) == rank);
        index.expect("the caller checked that the rank sends it")
    }
}
