//! A service that one of several processes offers: the leader of several coordinators, or a member
//! of etcd.

use std::{io, sync::Arc, time::Duration};

use futures_util::{StreamExt, TryFutureExt, future::select_all, stream::FuturesUnordered};
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tonic::{Status, transport::Endpoint};
use tower::Service;
use zeroshard_model::{Error, Result};
use zeroshard_proto::status::from_status;

use super::{
    CONNECT_TIMEOUT, Connection, Credentials, endpoint,
    network::{self, Stream},
    silence::Watched,
    tls::Tls,
};

/// The pause before another address is dialled again.
const PAUSE: Duration = Duration::from_millis(500);

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

    /// A connection that is opened before the first call, and opened again after it has broken.
    pub fn connect_lazy(&self, credentials: &Credentials) -> Connection {
        let (endpoint, tls) = (&self.endpoint, credentials.tls());
        credentials.connection(if self.is_plain(tls) {
            endpoint.connect_lazy()
        } else {
            endpoint.connect_with_connector_lazy(connector(self.dialled.clone(), tls.cloned()))
        })
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no address answers, and [`Error::Tls`] if the connection cannot be
    /// encrypted.
    pub async fn connect(&self, credentials: &Credentials) -> Result<Connection> {
        let (endpoint, tls) = (&self.endpoint, credentials.tls());
        let opened = if self.is_plain(tls) {
            endpoint.connect().await
        } else {
            let connector = connector(self.dialled.clone(), tls.cloned());
            endpoint.connect_with_connector(connector).await
        };
        let peer = self.dialled.join(",");
        let failed = |error| from_status(&Status::from_error(Box::new(error)), &peer);
        Ok(credentials.connection(opened.map_err(failed)?))
    }

    /// Returns whether tonic opens the connections. It supports only one address, and reads TLS
    /// files only once.
    fn is_plain(&self, tls: Option<&Tls>) -> bool {
        tls.is_none() && self.dialled.len() == 1 && network::simulated().is_none()
    }
}

/// A service that connects to the first address that answers.
fn connector(
    dialled: Arc<[String]>,
    tls: Option<Tls>,
) -> impl Service<
    Uri,
    Response = TokioIo<Box<dyn Stream>>,
    Error = Error,
    Future = impl Future<Output = Result<TokioIo<Box<dyn Stream>>>> + Send,
> + Send
+ 'static {
    tower::service_fn(move |_| {
        let (dialled, tls) = (dialled.clone(), tls.clone());
        async move {
            let (address, stream) = first_that_answers(&dialled, tls.as_ref()).await?;
            Ok(TokioIo::new(watched(&dialled, &address, tls, stream)))
        }
    })
}

/// A connection to `address`, which ends when it is silent and another address answers.
fn watched(
    dialled: &[String],
    address: &str,
    tls: Option<Tls>,
    stream: Box<dyn Stream>,
) -> Box<dyn Stream> {
    let others = dialled.iter().filter(|other| *other != address).cloned();
    let others: Arc<[String]> = others.collect();
    if others.is_empty() || network::simulated().is_some() {
        return stream;
    }
    Box::new(Watched::new(stream, move || {
        let (others, tls) = (others.clone(), tls.clone());
        Box::pin(async move {
            let searches = others.iter().map(|other| Box::pin(answered(other, tls.as_ref())));
            select_all(searches).await.0.to_owned()
        })
    }))
}

/// Dials an address until it answers. Returns it.
async fn answered<'a>(address: &'a str, tls: Option<&Tls>) -> &'a str {
    while !matches!(timeout(CONNECT_TIMEOUT, dial(address, tls)).await, Ok(Ok(_))) {
        sleep(PAUSE).await;
    }
    address
}

/// Dials all addresses at the same time. Returns the one that answers first, and the connection.
async fn first_that_answers(
    dialled: &[String],
    tls: Option<&Tls>,
) -> Result<(String, Box<dyn Stream>)> {
    let tries =
        dialled.iter().map(|address| dial(address, tls).map_ok(|stream| (address.clone(), stream)));
    let mut tries: FuturesUnordered<_> = tries.collect();
    let mut errors = Vec::with_capacity(dialled.len());
    while let Some(tried) = tries.next().await {
        match tried {
            Ok(answer) => return Ok(answer),
            Err(error) => errors.push(error),
        }
    }
    if let Some(error) = errors.iter().find(|error| matches!(error, Error::Tls { .. })) {
        return Err(error.clone());
    }
    if let [error] = &errors[..] {
        return Err(error.clone());
    }
    let cause = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Err(Error::Unavailable { peer: dialled.join(","), cause })
}

/// Connects to `address`, and waits for the first byte of the server's HTTP/2 preface or of its TLS
/// handshake: for a process that is suspended, the operating system accepts connections, but the
/// process does not send anything.
async fn dial(address: &str, tls: Option<&Tls>) -> Result<Box<dyn Stream>> {
    let failed = |error: io::Error| Error::Unavailable {
        peer: address.to_owned(),
        cause: error.to_string(),
    };
    if let Some(connect) = network::simulated() {
        return connect(address.to_owned()).await.map_err(failed);
    }
    let stream = TcpStream::connect(address).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    if let Some(tls) = tls {
        return Ok(Box::new(tls.connect(stream, address).await?));
    }
    if stream.peek(&mut [0]).await.map_err(failed)? == 0 {
        return Err(failed(io::ErrorKind::ConnectionReset.into()));
    }
    Ok(Box::new(stream))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

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
        let (address, mut stream) = first_that_answers(&dialled, None).await.unwrap();
        assert_eq!(address, dialled[3]);
        assert_eq!(stream.read_u8().await.unwrap(), b'h');
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_ends_when_another_address_answers() {
        let (first, second) = (listener().await, listener().await);
        let dialled = [first.1, second.1];
        let stream = TcpStream::connect(&dialled[0]).await.unwrap();
        let mut stream = watched(&dialled, &dialled[0], None, Box::new(stream));
        let mut server = first.0.accept().await.unwrap().0;
        // The other one accepts connections, and says nothing.
        for _ in 0..3 {
            let silent = tokio::time::timeout(Duration::from_secs(60), stream.read_u8()).await;
            assert!(silent.is_err(), "no other address answers");
            server.write_all(b"x").await.unwrap();
            assert_eq!(stream.read_u8().await.unwrap(), b'x');
        }
        let answers = async {
            loop {
                let (mut stream, _) = second.0.accept().await.unwrap();
                let _ = stream.write_all(b"hello").await;
            }
        };
        let ended = tokio::select! { read = stream.read_u8() => read, () = answers => panic!() };
        assert!(ended.unwrap_err().to_string().contains(&dialled[1]));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_refuses_at_first_is_dialled_again_while_another_one_stays_silent() {
        let (first, second, silent) = (listener().await, listener().await, listener().await);
        let dialled = [first.1, second.1, silent.1];
        let stream = TcpStream::connect(&dialled[0]).await.unwrap();
        let mut stream = watched(&dialled, &dialled[0], None, Box::new(stream));
        drop(second.0);
        let still = tokio::time::timeout(Duration::from_secs(60), stream.read_u8()).await;
        assert!(still.is_err(), "no other address answers");
        let second = TcpListener::bind(&dialled[1]).await.unwrap();
        let answers = async {
            loop {
                let (mut stream, _) = second.accept().await.unwrap();
                let _ = stream.write_all(b"hello").await;
            }
        };
        let reads = tokio::time::timeout(Duration::from_secs(60), stream.read_u8());
        let ended = tokio::select! { read = reads => read, () = answers => panic!() };
        assert!(ended.expect("it ends").unwrap_err().to_string().contains(&dialled[1]));
    }

    #[tokio::test]
    async fn the_error_names_each_address() {
        let dialled = [listener().await.1, listener().await.1];
        let error = first_that_answers(&dialled, None).await.map(drop).unwrap_err().to_string();
        assert!(dialled.iter().all(|address| error.contains(address)), "{error}");
    }
}
