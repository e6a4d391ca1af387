//! The path to an address: whether it accepts connections, and the size of packets.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use socket2::SockRef;
use tokio::{net::TcpStream, time::timeout};

/// The bytes of a packet beside the data of TCP, with the option for timestamps: 20 of IPv4, 32 of
/// TCP.
const HEADERS: u32 = 52;
/// The further bytes of IPv6.
const HEADERS_V6: u32 = 20;

/// A path that has been measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    /// The time for opening a connection.
    pub(crate) connect: Duration,
    /// The size of packets that the system has found, about; `None` if it does not report it.
    pub(crate) mtu: Option<u32>,
}

/// Opens a connection to `address`, `host:port` or a URI, and closes it.
///
/// # Errors
/// That of the system; [`io::ErrorKind::TimedOut`] after `limit`.
pub(crate) async fn probe(address: &str, limit: Duration) -> io::Result<Path> {
    let address = address.split_once("://").map_or(address, |(_, address)| address);
    let began = Instant::now();
    let stream = timeout(limit, TcpStream::connect(address)).await??;
    let connect = began.elapsed();
    let headers = match stream.peer_addr()? {
        SocketAddr::V4(_) => HEADERS,
        SocketAddr::V6(_) => HEADERS + HEADERS_V6,
    };
    let segment = SockRef::from(&stream).tcp_mss();
    Ok(Path { connect, mtu: segment.ok().map(|segment| segment.saturating_add(headers)) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn an_address_that_listens_has_a_path_and_another_has_none() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let path = probe(&format!("http://{address}"), Duration::from_secs(5)).await.unwrap();
        assert!(path.mtu.is_none_or(|mtu| mtu > 1000), "{path:?}");
        drop(listener);
        assert!(probe(&address, Duration::from_secs(5)).await.is_err());
    }
}
