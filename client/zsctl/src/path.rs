//! Measures the network path to an address: the time to connect, and the packet size.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use socket2::SockRef;
use tokio::{net::TcpStream, time::timeout};

/// The bytes of the headers of an IPv4 packet: 20 for IPv4, and 32 for TCP with timestamps.
const HEADERS: u32 = 52;
/// The additional bytes of an IPv6 header.
const HEADERS_V6: u32 = 20;

/// A measured path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    /// The time to open a connection.
    pub(crate) connect: Duration,
    /// The approximate MTU, computed from the segment size of TCP; `None` if the system does not
    /// report it.
    pub(crate) mtu: Option<u32>,
}

/// Opens a connection to `address` (`host:port` or a URI), and closes it.
///
/// # Errors
/// The error of the system, or [`io::ErrorKind::TimedOut`] after `limit`.
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
    async fn a_listening_address_has_a_path_and_a_closed_one_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let path = probe(&format!("http://{address}"), Duration::from_secs(5)).await.unwrap();
        assert!(path.mtu.is_none_or(|mtu| mtu > 1000), "{path:?}");
        drop(listener);
        assert!(probe(&address, Duration::from_secs(5)).await.is_err());
    }
}
