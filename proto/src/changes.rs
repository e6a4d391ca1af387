//! Reads which slices a reader follows, and packs their changes into messages of limited size.

use bytes::Bytes;
use zeroshard_model::{Error, Manifest, Result, View};

use crate::{Wire, convert::boxes, pb};

/// The maximum number of bytes of changes in one message.
const ROOM: usize = 1 << 20;

/// Returns the slices of a request, each as the reader has its tensor. The caller checks that the
/// job has these slices.
///
/// # Errors
/// [`Error::Invalid`] for an unknown dtype or one that no reader has, and for a box that does not
/// fit its tensor; [`Error::Refused`] for slices that are not ascending, and for more slices than
/// the job has.
pub fn followed(messages: &[pb::FollowedSlices], manifest: &Manifest) -> Result<Vec<(u32, View)>> {
    let mut all = Vec::new();
    for message in messages {
        let wire = Wire::of_message(message.dtype, || "dtype of a reader".to_owned())?;
        let Wire::Plain(dtype) = wire else {
            return Err(Error::invalid("dtype of a reader", wire, "f32, bf16 or f16"));
        };
        if !message.slices.is_sorted_by(|one, other| one < other) {
            return Err(Error::refused("the slices of a reader's request are not ascending"));
        }
        let boxes = boxes(manifest, &message.boxes)?;
        all.extend(message.slices.iter().map(|&slice| {
            let spec = manifest.slices().get(slice as usize);
            let bounds = spec.and_then(|spec| boxes.get(&spec.tensor));
            (slice, View::new(dtype, bounds.cloned()))
        }));
    }
    if all.len() > manifest.slices().len() {
        return Err(Error::refused("a reader's request has a slice in more than one dtype"));
    }
    Ok(all)
}

/// The rest of the change of one slice that is still to be sent.
#[derive(Debug, Clone)]
pub struct Rest {
    /// The index of the slice.
    pub slice: u32,
    /// The bytes that are still to be sent.
    pub change: Bytes,
    /// The hash of the reader's values after the change.
    pub hash: u64,
}

/// A message that is being filled. Small changes share a message, and a large one is split.
#[derive(Debug, Default)]
pub struct Packed {
    changes: Vec<pb::SliceChange>,
    /// The number of bytes of changes.
    bytes: usize,
}

impl Packed {
    /// Adds as much of a change as there is room for. Leaves the rest, or `None` if all is added.
    pub fn add(&mut self, rest: &mut Option<Rest>) {
        let Some(Rest { slice, change, hash }) = rest else { return };
        let part = change.split_to(change.len().min(ROOM - self.bytes));
        self.bytes += part.len();
        let is_last = change.is_empty();
        let hash = is_last.then_some(*hash);
        self.changes.push(pb::SliceChange { slice: *slice, change: part, hash });
        if is_last {
            *rest = None;
        }
    }

    /// Returns whether there is no more room.
    pub fn is_full(&self) -> bool {
        self.bytes == ROOM
    }

    /// The number of bytes of changes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Returns the message.
    pub fn message(self) -> pb::ChangesResponse {
        pb::ChangesResponse { changes: self.changes, ..Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_changes_share_a_message_and_a_large_one_is_split() {
        let sizes = [3, 0, ROOM + 5, ROOM - 5, 1];
        let mut all = sizes.iter().enumerate().map(|(slice, &size)| Rest {
            slice: slice as u32,
            change: vec![slice as u8; size].into(),
            hash: slice as u64,
        });
        let (mut rest, mut messages) = (all.next(), Vec::new());
        while rest.is_some() {
            let mut packed = Packed::default();
            while rest.is_some() && !packed.is_full() {
                packed.add(&mut rest);
                if rest.is_none() {
                    rest = all.next();
                }
            }
            assert!(packed.bytes() <= ROOM as u64);
            messages.push(packed.message());
        }
        let parts: Vec<Vec<_>> = messages
            .iter()
            .map(|message| {
                let of = message.changes.iter();
                of.map(|part| (part.slice, part.change.len(), part.hash)).collect()
            })
            .collect();
        let expected = [
            vec![(0, 3, Some(0)), (1, 0, Some(1)), (2, ROOM - 3, None)],
            vec![(2, 8, Some(2)), (3, ROOM - 8, None)],
            vec![(3, 3, Some(3)), (4, 1, Some(4))],
        ];
        assert_eq!(parts, expected);
    }
}
