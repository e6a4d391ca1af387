//! Settings and time limits of the connections among workers.

use std::net::SocketAddr;
use std::time::Duration;

use zeroshard_net::{Token, transport::tls::Tls};

/// The time that a worker that leaves or has failed waits for its peers.
pub(super) const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings of the connections among workers.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The time to wait for the connection to a peer, and for each message of a peer.
    pub deadline: Duration,
    /// The token of the cluster. Calls without it are refused.
    pub token: Token,
    /// The TLS configuration of all connections. A peer whose certificate has the same role needs
    /// no token.
    pub tls: Option<Tls>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            deadline: Duration::from_secs(60),
            token: Token::default(),
            tls: None,
        }
    }
}
