//! The listener of the admin port. It uses TLS if the process has a certificate.

use std::{io, net::SocketAddr};

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use tokio::net::TcpListener;
use tonic::transport::server::Connected as _;
use zeroshard_net::transport::tls::{Acceptor, PeerSecurity, ServerStream};

pub(crate) struct AdminListener {
    pub(crate) listener: TcpListener,
    pub(crate) acceptor: Acceptor,
}

impl Listener for AdminListener {
    type Io = ServerStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (ServerStream, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        (self.acceptor.accept(stream), address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The security of the connection on which a request arrived.
#[derive(Debug, Clone)]
pub(crate) struct Origin(pub(crate) PeerSecurity);

impl Connected<IncomingStream<'_, AdminListener>> for Origin {
    fn connect_info(stream: IncomingStream<'_, AdminListener>) -> Self {
        Self(stream.io().connect_info())
    }
}
