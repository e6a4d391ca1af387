//! Reading the body of a gRPC call.

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body;
use http_body_util::BodyExt;
use zeroshard_model::{Error, Result};

use super::{Decoder, Event};

/// Reads the events of a call's body, then its trailers.
#[derive(Debug)]
pub struct Reader<B> {
    body: B,
    decoder: Decoder,
    trailers: HeaderMap,
}

impl<B> Reader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    /// Creates a reader of `body` that refuses messages longer than `max_message` bytes.
    pub fn new(body: B, max_message: usize) -> Self {
        Self { body, decoder: Decoder::new(max_message), trailers: HeaderMap::new() }
    }

    /// Returns the next event, or `None` at the end.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a malformed message, [`Error::Unavailable`] if the stream breaks.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.decoder.next()? {
                return Ok(Some(event));
            }
            match self.body.frame().await {
                None => {
                    // The body of a failed call may end anywhere: its status states the reason.
                    if !self.trailers.contains_key("grpc-status") {
                        self.decoder.finish()?;
                    }
                    return Ok(None);
                }
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.decoder.feed(data),
                    Err(frame) => self.trailers.extend(frame.into_trailers().unwrap_or_default()),
                },
                Some(Err(error)) => {
                    let peer = "the other end of the stream".to_owned();
                    return Err(Error::Unavailable { peer, cause: error.to_string() });
                }
            }
        }
    }

    /// The trailers, available after the end.
    pub fn trailers(&self) -> &HeaderMap {
        &self.trailers
    }
}
