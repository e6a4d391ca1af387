//! Sends an input directly over HTTP/2, because a gRPC client would not send invalid data.

use std::time::Duration;

use bytes::Bytes;
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderMap, Request, header::AUTHORIZATION};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::input::{Ending, Input};

/// The tolerance after the deadline of a call, for a busy machine.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// The outcome of a call.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The server has ended the call with these headers or trailers.
    Status(HeaderMap),
    /// The caller has cancelled the call as planned, after it had received this number of data
    /// frames.
    Cancelled(usize),
    /// The stream or the connection was reset for this reason.
    Broken(#[expect(dead_code, reason = "it is printed")] String),
    /// The server did not end the call in time.
    Late,
}

/// A connection that is opened again after it has broken.
pub(crate) struct Connection {
    address: String,
    sender: Option<SendRequest<Bytes>>,
}

impl Connection {
    pub(crate) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), sender: None }
    }

    async fn open(&mut self) -> Result<SendRequest<Bytes>, String> {
        if let Some(sender) = self.sender.take()
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        let socket = TcpStream::connect(&self.address).await.map_err(|error| error.to_string())?;
        let opened = timeout(GRACE, h2::client::handshake(socket)).await;
        let opened = opened.map_err(|_| "no handshake".to_owned())?;
        let (sender, connection) = opened.map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        sender.ready().await.map_err(|error| error.to_string())
    }

    /// Makes a call with `token`. `stays_open` states that the answer may be an unbounded stream.
    pub(crate) async fn call(&mut self, input: &Input, token: &str, stays_open: bool) -> Answer {
        let mut sender = match self.open().await {
            Ok(sender) => sender,
            Err(error) => return Answer::Broken(error),
        };
        let sent = sender.send_request(request(&self.address, input, token), false);
        self.sender = Some(sender);
        match sent {
            Ok((response, body)) => exchange(response, body, input, stays_open).await,
            Err(error) => Answer::Broken(error.to_string()),
        }
    }
}

fn request(address: &str, input: &Input, token: &str) -> Request<()> {
    let mut request = Request::post(format!("http://{address}{}", input.path))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if !token.is_empty() {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    if input.has_deadline {
        request = request.header("grpc-timeout", format!("{}m", input.limit.as_millis()));
    }
    request.body(()).unwrap()
}

async fn exchange(
    response: ResponseFuture,
    body: SendStream<Bytes>,
    input: &Input,
    stays_open: bool,
) -> Answer {
    let mut received = 0;
    // The caller cancels a call without a deadline, and a call that is answered by a stream.
    let is_cancelled = stays_open || !input.has_deadline || input.ending == Ending::Reset;
    let limit = input.limit + if is_cancelled { Duration::ZERO } else { GRACE };
    let receiving = receive(response, &mut received);
    let answered = tokio::select! {
        biased;
        answered = timeout(limit, receiving) => answered,
        () = send(body, input) => return Answer::Cancelled(0),
    };
    match answered {
        Ok(Ok(headers)) => Answer::Status(headers),
        Ok(Err(error)) => Answer::Broken(error.to_string()),
        Err(_) if is_cancelled => Answer::Cancelled(received),
        Err(_) => Answer::Late,
    }
}

/// Sends the frames. Returns only if the input resets the stream.
async fn send(mut body: SendStream<Bytes>, input: &Input) {
    for (frame, pause) in input.frames.iter().zip(&input.pauses) {
        if !pause.is_zero() {
            sleep(*pause).await;
        }
        // An error means that the server has answered already.
        if body.send_data(frame.clone().into(), false).is_err() {
            return std::future::pending().await;
        }
    }
    match input.ending {
        Ending::Complete => _ = body.send_data(Bytes::new(), true),
        Ending::Reset => return body.send_reset(Reason::CANCEL),
        Ending::Stalled => {}
    }
    std::future::pending().await
}

/// Receives the whole answer, and counts its data frames.
async fn receive(response: ResponseFuture, received: &mut usize) -> Result<HeaderMap, h2::Error> {
    let response = response.await?;
    if response.headers().contains_key("grpc-status") {
        return Ok(response.headers().clone());
    }
    let mut body: RecvStream = response.into_body();
    while let Some(data) = body.data().await {
        let data = data?;
        *received += 1;
        body.flow_control().release_capacity(data.len())?;
    }
    Ok(body.trailers().await?.unwrap_or_default())
}
