//! Content that the first rank of each lane sends: what a job begins with, a buffer's next content.

use crate::{
    backend::Backend,
    shard::{lane::Lane, ranges::Ranges, round::Piece},
};

/// What has come of it.
#[derive(Debug)]
pub(super) struct Filling {
    /// INVARIANT: one for each lane.
    received: Vec<Ranges>,
}

impl Filling {
    pub(super) fn new(lanes: &[Lane]) -> Self {
        Self { received: vec![Ranges::default(); lanes.len()] }
    }

    pub(super) fn clear(&mut self) {
        self.received.iter_mut().for_each(Ranges::clear);
    }

    pub(super) fn is_untouched(&self) -> bool {
        self.received.iter().all(|received| received.pieces() == 0)
    }

    /// Whether nothing is missing.
    pub(super) fn is_complete(&self, lanes: &[Lane]) -> bool {
        self.missing_rank(lanes).is_none()
    }

    /// The first rank that has not sent everything.
    pub(super) fn missing_rank(&self, lanes: &[Lane]) -> Option<u32> {
        let mut both = lanes.iter().zip(&self.received);
        both.find(|(lane, received)| !received.is_all(lane.area.numel()))
            .map(|(lane, _)| lane.uploader())
    }

    /// Whether all of `piece` has come before.
    pub(super) fn knows(&self, lanes: &[Lane], piece: &Piece) -> bool {
        self.received[lane_of(lanes, piece)].contains(&piece.range())
    }

    /// Stores what is new of `piece`. Returns how many elements that were.
    pub(super) fn store<B: Backend>(
        &mut self,
        backend: &B,
        lanes: &[Lane],
        content: &mut B::Buffer,
        piece: &Piece,
    ) -> u64 {
        let lane = lane_of(lanes, piece);
        let (area, received) = (&lanes[lane].area, &mut self.received[lane]);
        let mut new = 0;
        for (range, _) in received.split(piece.range()).into_iter().filter(|(_, known)| !known) {
            let part = piece.part(range.clone());
            backend.store(content, area.elements(range.clone()), &part.bytes, part.dtype);
            new += range.len() as u64;
            received.insert(range);
        }
        new
    }
}

fn lane_of(lanes: &[Lane], piece: &Piece) -> usize {
    let lane = lanes.iter().position(|lane| lane.uploader() == piece.rank);
    lane.expect("the caller asked who uploads")
}
