//! The frames of a push: elements as payloads, or references to where they are in an outbox.

use std::{collections::VecDeque, convert::Infallible, ops::Range, sync::Arc};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http_body::Frame;
use zeroshard_loops::int8::Rounding;
use zeroshard_proto::{
    Wire,
    frame::{Extent, Spare, Writer},
};

use super::{Encoding, SliceValues};
use crate::window::Sender;

/// Up to this many bytes are sent as a payload, also to a server on this host, because the writer
/// gathers small messages.
const INLINE: usize = 16 << 10;

/// What is left of a push.
pub(super) struct Frames {
    writer: Writer,
    /// The memory of payloads.
    spare: Spare,
    values: VecDeque<SliceValues>,
    /// The number of elements of the first slice that have been sent.
    sent: usize,
    encoding: Encoding,
    /// Elements per message.
    chunk: usize,
    /// Sends elements through shared memory, if there is a window.
    sender: Option<Arc<Sender>>,
}

impl Frames {
    /// The frames of `values` after what `writer` has gathered. A message has at most `chunk_bytes`
    /// bytes of elements, and at most a piece of the outbox.
    pub(super) fn new(
        writer: Writer,
        values: Vec<SliceValues>,
        encoding: Encoding,
        chunk_bytes: usize,
        sender: Option<Arc<Sender>>,
    ) -> Self {
        let largest = sender.as_ref().map_or(usize::MAX, |sender| sender.window().piece_bytes());
        let chunk = encoding.wire.elements_within(chunk_bytes.min(largest));
        let spare = Spare::default();
        Self { writer, spare, values: values.into(), sent: 0, encoding, chunk, sender }
    }

    /// The body of the request.
    pub(super) fn stream(self) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
        stream::unfold(self, |mut frames| async {
            let frame = frames.next_frame().await?;
            Some((Ok(Frame::data(frame)), frames))
        })
    }

    async fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.writer.next_frame() {
                return Some(frame);
            }
            let Some(values) = self.values.front() else {
                self.writer.flush();
                return self.writer.next_frame();
            };
            let end = values.range.len().min(self.sent + self.chunk);
            let range = values.range.start + self.sent..values.range.start + end;
            let offset = (values.offset + self.sent) as u64;
            let extent = Extent { slice: values.slice, offset, wire: self.encoding.wire };
            let bytes = extent.wire.bytes(range.len());
            match self.sender.as_ref().filter(|_| bytes > INLINE) {
                None => {
                    let payload = values.encode(range, offset, self.encoding, &mut self.spare);
                    self.writer.extent(extent, payload);
                }
                Some(sender) => {
                    let mut piece = match sender.window().try_piece() {
                        Some(piece) => piece,
                        None => {
                            // What is gathered must not wait.
                            self.writer.flush();
                            if let Some(frame) = self.writer.next_frame() {
                                return Some(frame);
                            }
                            // After the end of the window the call fails, and is tried again.
                            sender.window().piece().await?
                        }
                    };
                    values.encode_into(range, offset, self.encoding, &mut piece[..bytes]);
                    self.writer.reference(extent, sender.send(piece, bytes)?);
                    self.writer.flush();
                }
            }
            self.sent = end;
            if self.sent == values.range.len() {
                self.sent = 0;
                self.values.pop_front();
            }
        }
    }
}

impl SliceValues {
    /// The elements `range` of the values, of which the first is number `offset` in the slice. What
    /// already has the dtype of the wire is not copied.
    fn encode(
        &self,
        range: Range<usize>,
        offset: u64,
        encoding: Encoding,
        spare: &mut Spare,
    ) -> Bytes {
        match encoding.wire {
            Wire::Plain(dtype) if dtype == self.data.dtype() => self.data.encode(range, dtype),
            wire => spare.payload(wire.bytes(range.len()), |payload| {
                self.encode_into(range, offset, encoding, payload);
            }),
        }
    }

    /// Encodes elements like [`Self::encode`], into `to`, which has their size.
    fn encode_into(&self, range: Range<usize>, offset: u64, encoding: Encoding, to: &mut [u8]) {
        let Encoding { wire, seed, step } = encoding;
        match wire {
            Wire::Plain(dtype) => self.data.encode_into(range, dtype, to),
            Wire::Int8 => {
                let rounding = Rounding::of_gradient(seed, step, self.tensor, self.lowest);
                self.data.encode_int8(range, self.origin as u64 + offset, &rounding, to);
            }
        }
    }
}
