//! TLS on the side that opens the connection.

use std::{future::poll_fn, io, pin::Pin};

use rustls::{AlertDescription, CertificateError, InvalidMessage, pki_types::ServerName};
use tokio::{io::AsyncBufRead, net::TcpStream};
use tokio_rustls::{TlsConnector, client::TlsStream};
use zeroshard_model::{Error, Result};

use super::Tls;

impl Tls {
    /// Encrypts a connection to `address` (`host:port`). The certificate of the server must be
    /// valid for this host.
    ///
    /// # Errors
    /// [`Error::Tls`] if one side does not trust the other, and [`Error::Unavailable`] if the
    /// connection breaks.
    pub(in crate::transport) async fn connect(
        &self,
        stream: TcpStream,
        address: &str,
    ) -> Result<TlsStream<TcpStream>> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| Error::invalid("host", format!("{host:?}"), "a DNS name"))?;
        let connector = TlsConnector::from(self.client_config());
        let failed = |error| failure(&error, address, self.flags);
        // etcd without TLS closes the connection, but so may a server that is being stopped.
        let handshake_failed = |error| match failed(error) {
            Error::Unavailable { peer, cause } => {
                let cause = format!("{cause}, in the TLS handshake; the server may not use TLS");
                Error::Unavailable { peer, cause }
            }
            error => error,
        };
        let mut stream = connector.connect(name, stream).await.map_err(handshake_failed)?;
        // In TLS 1.3, the server verifies the certificate of the client after the handshake has
        // finished for the client. The first bytes of the server, its HTTP/2 settings, show that it
        // has accepted the certificate.
        let first = poll_fn(|cx| Pin::new(&mut stream).poll_fill_buf(cx).map_ok(<[u8]>::is_empty));
        match first.await {
            Ok(false) => Ok(stream),
            Ok(true) => Err(failed(io::ErrorKind::ConnectionReset.into())),
            Err(error) => Err(failed(error)),
        }
    }
}

/// The error of a connection that could not be encrypted.
fn failure(error: &io::Error, address: &str, flags: &str) -> Error {
    let peer = format!("server at {address}");
    let Some(found) = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>())
    else {
        return Error::Unavailable { peer, cause: error.to_string() };
    };
    Error::Tls { peer, cause: explain(found, flags) }
}

/// The cause of a failed handshake, and its remedy. `flags`: the beginning of the flags with our
/// files.
fn explain(error: &rustls::Error, flags: &str) -> String {
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage as BadMessage};
    let (found, remedy) = match error {
        InvalidCertificate(cause) => return explain_certificate(cause, flags),
        AlertReceived(AlertDescription::CertificateExpired) => {
            ("it refuses our certificate, which has expired".to_owned(), "issue a new one".into())
        }
        // Some versions of etcd do not distinguish a missing certificate from a bad one.
        AlertReceived(AlertDescription::CertificateRequired | AlertDescription::BadCertificate) => {
            (
                "it requires a certificate, and we sent none, or one that it refuses".to_owned(),
                format!("set {flags}-cert and {flags}-key to one that it trusts"),
            )
        }
        AlertReceived(AlertDescription::CertificateRevoked) => (
            "it refuses our certificate, which is in its revocation list".to_owned(),
            format!("issue a new one, and set {flags}-cert and {flags}-key to it"),
        ),
        AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => (
            "it refuses our certificate, because it does not trust its authority, or has \
             revocation lists but none of this authority"
                .to_owned(),
            format!("set {flags}-cert to a certificate from the authority of the cluster"),
        ),
        AlertReceived(alert) => {
            (format!("it refuses the connection ({alert:?})"), "see its log for the reason".into())
        }
        BadMessage(InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion) => {
            (
                "it does not use TLS".to_owned(),
                format!("start it with a certificate, or connect without {flags}-ca"),
            )
        }
        other => (other.to_string(), "check the certificates of both sides".into()),
    };
    format!("{found}; {remedy}")
}

fn explain_certificate(cause: &CertificateError, flags: &str) -> String {
    use CertificateError::{
        BadSignature, Expired, ExpiredContext, NotValidForName, NotValidForNameContext,
        NotValidYet, NotValidYetContext, Revoked, UnknownIssuer, UnknownRevocationStatus,
    };
    let (found, remedy) = match cause {
        // A signature is also invalid if another authority has the same name.
        UnknownIssuer | BadSignature => (
            format!(
                "its certificate is signed by an authority that is not in the file of {flags}-ca"
            ),
            format!("set {flags}-ca to the authority of the cluster"),
        ),
        Expired | ExpiredContext { .. } => {
            ("its certificate has expired".to_owned(), "issue a new one for the server".into())
        }
        NotValidYet | NotValidYetContext { .. } => (
            "its certificate is not valid yet".to_owned(),
            "compare the clocks of both machines".into(),
        ),
        Revoked => (
            format!("its certificate is in the revocation list ({flags}-crl)"),
            "issue a new one for the server".into(),
        ),
        UnknownRevocationStatus => (
            format!("{flags}-crl has no list of the authority that has signed its certificate"),
            "add the list of this authority".into(),
        ),
        NotValidForNameContext { expected, presented } => (
            format!(
                "its certificate is for {}, not for {}",
                presented.join(", "),
                expected.to_str()
            ),
            "connect to one of these names, or issue a certificate for the name that you use"
                .into(),
        ),
        NotValidForName => (
            "its certificate is for another name".to_owned(),
            "connect to a name in the certificate, or issue one for the name that you use".into(),
        ),
        other => (format!("its certificate is invalid ({other})"), "issue a new one".into()),
    };
    format!("{found}; {remedy}")
}
