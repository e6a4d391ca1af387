//! Reads which slices a reader follows, and packs their changes into messages of limited size.

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
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

/// The change of one slice.
#[derive(Debug, Clone)]
pub struct Change {
    /// The index of the slice.
    pub slice: u32,
    /// The encoded change.
    pub change: Bytes,
    /// The hash of the reader's values after the change.
    pub hash: u64,
}

/// Returns the messages of a response with these changes, which lead to `version`. `None` among the
/// changes means that a change is unknown: the last message says so.
pub fn messages(
    version: u64,
    changes: impl Stream<Item = Result<Option<Change>>> + Send,
) -> impl Stream<Item = Result<pb::ChangesResponse>> + Send {
    let first = pb::ChangesResponse { version: Some(version), ..Default::default() };
    let changes = Box::pin(changes.fuse());
    let packing = Packing { changes, rest: None, is_unknown: false };
    let parts = stream::try_unfold(packing, |mut packing| async {
        Ok(packing.next().await?.map(|message| (message, packing)))
    });
    stream::iter([Ok(first)]).chain(parts)
}

/// Returns the number of bytes of changes in a message.
pub fn bytes(message: &pb::ChangesResponse) -> u64 {
    message.changes.iter().map(|part| part.change.len() as u64).sum()
}

/// Packs changes into messages. Small changes share a message, and a large one is split.
struct Packing<S> {
    changes: S,
    /// The change whose last bytes are still to be sent.
    rest: Option<Change>,
    /// A change is unknown, and no message has said so yet.
    is_unknown: bool,
}

impl<S: Stream<Item = Result<Option<Change>>> + Unpin> Packing<S> {
    async fn next(&mut self) -> Result<Option<pb::ChangesResponse>> {
        let (mut changes, mut room) = (Vec::new(), ROOM);
        while room > 0 && !self.is_unknown {
            let next = match self.rest.take() {
                Some(rest) => Some(Some(rest)),
                None => self.changes.next().await.transpose()?,
            };
            match next {
                Some(Some(change)) => room -= self.add(change, room, &mut changes),
                Some(None) => self.is_unknown = true,
                None => break,
            }
        }
        if !changes.is_empty() {
            return Ok(Some(pb::ChangesResponse { changes, ..Default::default() }));
        }
        let is_unknown = std::mem::take(&mut self.is_unknown);
        Ok(is_unknown.then(|| pb::ChangesResponse { is_unknown, ..Default::default() }))
    }

    /// Adds as much of a change as there is room for, and keeps the rest. Returns the number of
    /// bytes.
    fn add(&mut self, of: Change, room: usize, changes: &mut Vec<pb::SliceChange>) -> usize {
        let Change { slice, mut change, hash } = of;
        let part = change.split_to(change.len().min(room));
        let (bytes, is_last) = (part.len(), change.is_empty());
        let of_slice = is_last.then_some(hash);
        changes.push(pb::SliceChange { slice, change: part, hash: of_slice });
        self.rest = (!is_last).then_some(Change { slice, change, hash });
        bytes
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, TryStreamExt};

    use super::*;

    fn change((slice, size): (usize, usize)) -> Change {
        let slice = slice as u32;
        Change { slice, change: vec![slice as u8; size].into(), hash: slice.into() }
    }

    /// Polls a stream that never waits.
    fn all<T>(of: impl Stream<Item = Result<T>>) -> Vec<T> {
        let all = Box::pin(of.try_collect()).as_mut().now_or_never();
        all.expect("it does not wait").unwrap()
    }

    #[test]
    fn small_changes_share_a_message_and_a_large_one_is_split() {
        let sizes = [3, 0, ROOM + 5, ROOM - 5, 1];
        let changes = sizes.into_iter().enumerate().map(|of| Ok(Some(change(of))));
        let messages = all(messages(7, stream::iter(changes)));
        assert_eq!((messages[0].version, messages[0].changes.len()), (Some(7), 0));
        let parts: Vec<Vec<_>> = messages[1..]
            .iter()
            .map(|message| {
                assert!(bytes(message) <= ROOM as u64 && !message.is_unknown);
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

    #[test]
    fn the_last_message_says_that_a_change_is_unknown() {
        let changes = [Some(change((0, 3))), Some(change((1, 4))), None, Some(change((2, 5)))];
        let messages = all(messages(7, stream::iter(changes.map(Ok))));
        let found: Vec<_> =
            messages.iter().map(|of| (of.changes.len(), bytes(of), of.is_unknown)).collect();
        assert_eq!(found[..3], [(0, 0, false), (2, 7, false), (0, 0, true)]);
    }
}
