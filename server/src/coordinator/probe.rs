//! Dials the address of a server whose control stream is missing, to learn whether its process has
//! ended: then nothing listens there, and the system refuses the connection.

use std::{
    io::{self, ErrorKind},
    time::Duration,
};

use tokio::{net::TcpStream, time::timeout};
use zeroshard_coordinator::{cluster::startup::RECOVERY, vocabulary::events::Event};
use zeroshard_model::Server;
use zeroshard_net::{
    Deadline,
    transport::{CONNECT_TIMEOUT, network},
};

use super::driver::{Driver, Inner};

/// The interval between two tries. A server that is ending may still listen at the first one.
const INTERVAL: Duration = Duration::from_millis(250);

async fn connect(address: &str) -> io::Result<()> {
    match network::simulated() {
        None => TcpStream::connect(address).await.map(drop),
        Some(connect) => connect(address.to_owned()).await.map(drop),
    }
}

impl Driver {
    /// Dials the server until it refuses a connection, has a control stream, or [`RECOVERY`] has
    /// passed.
    pub(super) fn probe(&self, inner: &mut Inner, server: Server) {
        let Some(driver) = self.me.upgrade() else { return };
        if !inner.probed.insert(server.id) {
            return;
        }
        drop(tokio::spawn(async move {
            let deadline = Deadline::after(RECOVERY);
            while !driver.is_connected(&server) && !deadline.left().is_zero() {
                let connected = timeout(CONNECT_TIMEOUT, connect(&server.address)).await;
                if let Ok(Err(error)) = connected
                    && error.kind() == ErrorKind::ConnectionRefused
                {
                    driver.probed(server.id);
                    return driver.tell(Event::Refused(server));
                }
                tokio::time::sleep(INTERVAL).await;
            }
            driver.probed(server.id);
        }));
    }

    /// Returns whether the server need not be dialled any more, also because this coordinator has
    /// stopped.
    fn is_connected(&self, server: &Server) -> bool {
        self.read(|cluster| cluster.common().servers.is_connected(server.id)).unwrap_or(true)
    }
}
