//! A service that one of several processes offers: the leader of several coordinators, or a member
//! of etcd.

use std::{io, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Error as TransportError};

use super::{endpoint, network};
use crate::{Error, Result};

/// One or more addresses, of which one answers at a time. Each time a connection is opened, all of
/// them are dialled, and the first that answers is used.
#[derive(Debug, Clone)]
pub struct Addresses {
    /// The endpoint of the first address, with the settings of the connection.
    endpoint: Endpoint,
    /// All addresses, as `host:port`.
    dialled: Arc<[String]>,
}

impl Addresses {
    /// Parses addresses, `host:port` or URIs, that are separated by commas.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid address.
    pub fn parse(text: &str) -> Result<Self> {
        let endpoints = text.split(',').map(|address| endpoint(address.trim()));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        let dialled = endpoints.iter().map(|endpoint| {
            let authority = endpoint.uri().authority().map(|authority| authority.as_str());
            authority.unwrap_or_default().to_owned()
        });
        let dialled = dialled.collect();
        let endpoint = endpoints.into_iter().next().ok_or_else(|| {
            Error::invalid("addresses", format!("{text:?}"), "one or more HOST:PORT")
        })?;
        Ok(Self { endpoint, dialled })
    }

    /// The same addresses with a time limit for opening a connection.
    #[must_use]
    pub fn connect_timeout(self, limit: Duration) -> Self {
        Self { endpoint: self.endpoint.connect_timeout(limit), ..self }
    }

    /// A channel that opens a connection before the first call, and again after it has broken.
    pub fn connect_lazy(&self) -> Channel {
        match &*self.dialled {
            [_] => network::connect_lazy(&self.endpoint),
            _ => self.endpoint.connect_with_connector_lazy(self.connector()),
        }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// Those of the transport, if no address answers.
    pub async fn connect(&self) -> Result<Channel, TransportError> {
        match &*self.dialled {
            [_] => network::connect(&self.endpoint).await,
            _ => self.endpoint.connect_with_connector(self.connector()).await,
        }
    }

    fn connector(
        &self,
    ) -> impl tower::Service<
        http::Uri,
        Response = TokioIo<TcpStream>,
        Error = io::Error,
        Future = impl Future<Output = io::Result<TokioIo<TcpStream>>> + Send,
    > + Send
    + 'static {
        let dialled = self.dialled.clone();
        tower::service_fn(move |_| {
            let dialled = dialled.clone();
            async move { first_that_answers(&dialled).await.map(TokioIo::new) }
        })
    }
}

/// Dials all addresses at the same time.
async fn first_that_answers(dialled: &[String]) -> io::Result<TcpStream> {
    let mut tries: FuturesUnordered<_> = dialled
        .iter()
        .map(|address| async move {
            let failed = |e: io::Error| io::Error::new(e.kind(), format!("{address}: {e}"));
            dial(address).await.map_err(failed)
        })
        .collect();
    let mut errors = Vec::with_capacity(dialled.len());
    while let Some(tried) = tries.next().await {
        match tried {
            Ok(stream) => return Ok(stream),
            Err(error) => errors.push(error),
        }
    }
    let all = errors.iter().map(io::Error::to_string).collect::<Vec<_>>().join("; ");
    Err(io::Error::other(all))
}

/// Connects, and waits for the first byte of the server's HTTP/2 preface. The system accepts
/// connections to a process that stands still, but the process does not send anything.
async fn dial(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    match stream.peek(&mut [0]).await? {
        0 => Err(io::ErrorKind::ConnectionReset.into()),
        _ => Ok(stream),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use tokio::{io::AsyncWriteExt, net::TcpListener};

    use super::*;

    async fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    #[test]
    fn addresses_are_separated_by_commas() {
        let addresses = Addresses::parse("a:1, http://b:2,[::1]:3").unwrap();
        assert_eq!(*addresses.dialled, ["a:1", "b:2", "[::1]:3"]);
        for bad in ["", "a:1,", "a:1,b", ",a:1"] {
            assert!(matches!(Addresses::parse(bad), Err(Error::Invalid { .. })), "{bad}");
        }
    }

    #[tokio::test]
    async fn the_first_address_that_answers_is_used() {
        // One refuses connections, one accepts them and stays silent, one closes them, one answers.
        let refused = listener().await.1;
        let (silent, closed, answering) = (listener().await, listener().await, listener().await);
        let dialled = [refused, silent.1.clone(), closed.1, answering.1.clone()];
        tokio::spawn(async move { while closed.0.accept().await.is_ok() {} });
        tokio::spawn(async move {
            let (mut stream, _) = answering.0.accept().await.unwrap();
            stream.write_all(b"hello").await.unwrap();
            std::future::pending::<()>().await;
        });
        let stream = first_that_answers(&dialled).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap().to_string(), answering.1);
    }

    #[tokio::test]
    async fn the_error_names_each_address() {
        let dialled = [listener().await.1, listener().await.1];
        let error = first_that_answers(&dialled).await.unwrap_err().to_string();
        assert!(dialled.iter().all(|address| error.contains(address)), "{error}");
    }
}
