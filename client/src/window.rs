//! A window: memory that this process shares with a shard server on the same host, for one job.
//!
//! Parameters are shown or copied from where the server has them. What is pushed is written into
//! pieces of an outbox; a piece is used again when the server has read it. Descriptors, ends of
//! holds and acknowledgements go over a Unix socket; the memory ends with it.

use std::{
    collections::HashMap,
    io,
    os::{linux::net::SocketAddrExt, unix::net},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{net::UnixStream, sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use zeroshard_model::{Error, Result};
use zeroshard_net::numbers::{NUMBER, Numbers};
use zeroshard_proto::{frame::Reference, pb};
use zeroshard_shm::{Piece, Pieces, View, descriptors};

/// The largest piece of an outbox.
const MAX_PIECE: usize = 1 << 20;

/// A window. Its socket is closed when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Window {
    number: u64,
    /// The process that has opened it.
    process: u32,
    parameters: Arc<View>,
    outbox: Arc<Outbox>,
    socket: Arc<Numbers>,
    reader: JoinHandle<()>,
}

#[derive(Debug)]
struct Outbox {
    pieces: Arc<Pieces>,
    /// The pieces that the server has not read, by the number that it returns.
    sent: Mutex<HashMap<u64, Piece>>,
    last: AtomicU64,
    /// Notified when a piece is free again.
    freed: Notify,
    /// Cancelled when the window must not be used for another call.
    ended: CancellationToken,
}

impl Drop for Window {
    fn drop(&mut self) {
        self.outbox.ended.cancel();
        self.reader.abort();
    }
}

impl Window {
    /// Connects to the socket of a window. Pieces have up to `piece` bytes.
    ///
    /// # Errors
    /// Those of the system: the server is on another host, for example.
    pub(crate) async fn connect(of: &pb::OpenWindowResponse, piece: usize) -> io::Result<Self> {
        let address = net::SocketAddr::from_abstract_name(&of.socket)?;
        let socket = net::UnixStream::connect_addr(&address)?;
        socket.set_nonblocking(true)?;
        let socket = Numbers::new(UnixStream::from_std(socket)?);
        socket.send_pair([of.window, of.secret]).await?;
        let files = receive(socket.socket()).await?;
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let (parameters, outbox) = (size(of.parameter_bytes)?, size(of.outbox_bytes)?);
        let [first, second] = <[_; 2]>::try_from(files).map_err(|_| io::ErrorKind::InvalidData)?;
        let piece = piece.clamp(zeroshard_shm::PAGE, MAX_PIECE);
        let outbox = Arc::new(Outbox {
            pieces: Pieces::new(second, outbox, piece)?,
            sent: Mutex::default(),
            last: AtomicU64::new(0),
            freed: Notify::new(),
            ended: CancellationToken::new(),
        });
        let socket = Arc::new(socket);
        let (of_reader, taking) = (socket.clone(), outbox.clone());
        let reader = tokio::spawn(async move {
            // The end of the server, and a failure of the socket, are the same here.
            let _ = of_reader.run(|number| taking.take_back(number)).await;
            taking.ended.cancel();
        });
        let parameters = Arc::new(View::new(first, parameters)?);
        let (number, process) = (of.window, std::process::id());
        Ok(Self { number, process, parameters, outbox, socket, reader })
    }

    /// The number of the window, for requests.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Cancelled when the window must not be used for another call.
    pub(crate) fn ended(&self) -> &CancellationToken {
        &self.outbox.ended
    }

    /// Uses the window for no further call, because nobody knows what the server still reads in the
    /// outbox, or which holds it has.
    pub(crate) fn retire(&self) {
        self.outbox.ended.cancel();
    }

    /// Elements to which the server refers, and which it keeps as long as a [`Hold`] exists.
    ///
    /// # Errors
    /// [`Error::Internal`] if they are outside of the window.
    pub(crate) fn parameters(&self, reference: Reference) -> Result<&[u8]> {
        let Reference { at, bytes, .. } = reference;
        self.parameters.bytes(at, bytes).ok_or_else(|| Error::Internal {
            cause: format!(
                "a shard server referred to {bytes} bytes from byte {at}, outside of the window"
            ),
        })
    }

    /// The segment with the parameters.
    pub(crate) fn view(&self) -> &Arc<View> {
        &self.parameters
    }

    /// Tells the server that the elements of a hold are read.
    fn end_hold(&self, hold: u64) {
        // A server that does not read its socket learns it from the end of the window.
        if !self.socket.send(hold) {
            self.retire();
        }
    }

    /// Gives the memory of the outbox that nothing uses back to the system, if it can.
    pub(crate) fn release_unused(&self) {
        if let Err(error) = self.outbox.pieces.release() {
            tracing::debug!(%error, "an outbox keeps unused memory");
        }
    }

    /// The size of a piece of the outbox, in bytes.
    pub(crate) fn piece_bytes(&self) -> usize {
        self.outbox.pieces.size()
    }

    /// A free piece, if there is one.
    pub(crate) fn try_piece(&self) -> Option<Piece> {
        self.outbox.pieces.take()
    }

    /// Waits for a free piece; `None` if the window has ended.
    pub(crate) async fn piece(&self) -> Option<Piece> {
        loop {
            let mut freed = std::pin::pin!(self.outbox.freed.notified());
            // A piece that is freed from now on is not missed.
            freed.as_mut().enable();
            if let Some(piece) = self.outbox.pieces.take() {
                return Some(piece);
            }
            tokio::select! {
                () = freed => {}
                () = self.outbox.ended.cancelled() => return None,
            }
        }
    }
}

impl Outbox {
    /// The server has read what it was sent with this number.
    fn take_back(&self, number: u64) {
        let piece = self.sent.lock().expect("no holder of the lock panics").remove(&number);
        drop(piece);
        // One waiter takes it. If it does not need it any more, the next one is told.
        self.freed.notify_one();
    }
}

/// Elements that the server keeps, until this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    window: Arc<Window>,
    number: u64,
}

impl Hold {
    pub(crate) fn new(window: &Arc<Window>, number: u64) -> Self {
        Self { window: window.clone(), number }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A forked child has the socket of its parent, which may still read the elements.
        if std::process::id() == self.window.process {
            self.window.end_hold(self.number);
        }
    }
}

/// A call that sends pieces of an outbox. If it is dropped before [`Self::end`], the window is
/// retired, because the server may still read them.
#[derive(Debug)]
pub(crate) struct Sender {
    window: Arc<Window>,
    /// The numbers of the pieces that were sent; `None` after the end of the call.
    numbers: Mutex<Option<Vec<u64>>>,
}

impl Sender {
    pub(crate) fn new(window: Arc<Window>) -> Arc<Self> {
        Arc::new(Self { window, numbers: Mutex::new(Some(Vec::new())) })
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// Sends the first `bytes` bytes of a piece; `None` after the end of the call.
    pub(crate) fn send(&self, piece: Piece, bytes: usize) -> Option<Reference> {
        let mut numbers = self.numbers.lock().expect("no holder of the lock panics");
        let outbox = &self.window.outbox;
        let hold = outbox.last.fetch_add(1, Ordering::Relaxed) + 1;
        numbers.as_mut()?.push(hold);
        let at = piece.at();
        outbox.sent.lock().expect("no holder of the lock panics").insert(hold, piece);
        Some(Reference { at, bytes: bytes as u64, hold, lasts: false })
    }

    /// The server has answered, and reads nothing more of this call.
    pub(crate) fn end(&self) {
        let numbers = self.numbers.lock().expect("no holder of the lock panics").take();
        numbers.into_iter().flatten().for_each(|number| self.window.outbox.take_back(number));
    }
}

/// Retires the window of a call that ends before [`Self::disarm`].
#[derive(Debug)]
pub(crate) struct Guard(Option<Arc<Window>>);

impl Guard {
    pub(crate) fn new(window: Option<Arc<Window>>) -> Self {
        Self(window)
    }

    /// The server has ended the call.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(window) = &self.0 {
            window.retire();
        }
    }
}

/// Receives the first message of the server, with its descriptors.
async fn receive(socket: &UnixStream) -> io::Result<Vec<std::os::fd::OwnedFd>> {
    let mut hello = [0; NUMBER];
    let receive = || descriptors::receive(socket, &mut hello);
    match socket.async_io(tokio::io::Interest::READABLE, receive).await? {
        (NUMBER, files) => Ok(files),
        _ => Err(io::Error::new(io::ErrorKind::ConnectionRefused, "the server closed the socket")),
    }
}
