//! A TCP proxy between a client and a server that breaks connections on demand.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
    task::JoinHandle,
};

/// Forwards connections to a server. It runs on the tokio runtime that created it, until that
/// runtime ends.
#[derive(Debug)]
pub struct FaultProxy {
    address: String,
    faults: Arc<Faults>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Faults {
    /// The `host:port` of the server. Until it is known, connections are closed at once.
    target: Mutex<Option<String>>,
    /// The number of bytes, in both directions and over all connections, until all connections are
    /// cut.
    until_cut: Mutex<Option<u64>>,
    cuts: watch::Sender<u64>,
    connections: watch::Sender<u64>,
    stalled: watch::Sender<bool>,
}

impl FaultProxy {
    /// Listens on a free port. [`Self::forward_to`] specifies the server.
    ///
    /// # Errors
    /// If the system has no free port.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let faults = Arc::new(Faults {
            target: Mutex::default(),
            until_cut: Mutex::default(),
            cuts: watch::Sender::new(0),
            connections: watch::Sender::new(0),
            stalled: watch::Sender::new(false),
        });
        let accepting = tokio::spawn(accept(listener, faults.clone()));
        Ok(Self { address, faults, accepting })
    }

    /// The address of the proxy.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// From now on, connections are forwarded to the server at `target`.
    pub fn forward_to(&self, target: &str) {
        *lock(&self.faults.target) = Some(target.to_owned());
    }

    /// Cuts all connections after this number of further bytes. Later connections are not cut.
    pub fn cut_after(&self, bytes: u64) {
        *lock(&self.faults.until_cut) = Some(bytes);
    }

    /// Cuts all connections now.
    pub fn cut(&self) {
        self.faults.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// The number of times that the proxy has cut all connections.
    pub fn cuts(&self) -> u64 {
        *self.faults.cuts.borrow()
    }

    /// The number of connections that the proxy has accepted so far.
    pub fn connections(&self) -> u64 {
        *self.faults.connections.borrow()
    }

    /// Returns whether to hold back received bytes, as a silent network does.
    pub fn stall(&self, stalled: bool) {
        self.faults.stalled.send_replace(stalled);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, faults: Arc<Faults>) {
    while let Ok((client, _)) = listener.accept().await {
        faults.connections.send_modify(|connections| *connections += 1);
        let target = lock(&faults.target).clone();
        let faults = faults.clone();
        tokio::spawn(async move {
            let mut cuts = faults.cuts.subscribe();
            let Some(target) = target else { return };
            // If the server cannot be reached, the connection is closed, as without the proxy.
            let Ok(server) = TcpStream::connect(target).await else { return };
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::select! {
                () = forward(from_client, to_server, &faults) => {}
                () = forward(from_server, to_client, &faults) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

/// Forwards bytes until one side closes or the connection is cut.
async fn forward(mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf, faults: &Faults) {
    let mut stalled = faults.stalled.subscribe();
    let mut buffer = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if stalled.wait_for(|stalled| !stalled).await.is_err() {
            return;
        }
        let (pass, cut) = faults.count(read as u64);
        if to.write_all(&buffer[..pass as usize]).await.is_err() {
            return;
        }
        if cut {
            faults.cuts.send_modify(|cuts| *cuts += 1);
            return;
        }
    }
}

impl Faults {
    /// The number of these bytes that may be forwarded, and whether the connections are cut
    /// afterwards.
    fn count(&self, bytes: u64) -> (u64, bool) {
        let mut left = lock(&self.until_cut);
        match *left {
            None => (bytes, false),
            Some(until) if until > bytes => {
                *left = Some(until - bytes);
                (bytes, false)
            }
            Some(until) => {
                *left = None;
                (until, true)
            }
        }
    }
}
