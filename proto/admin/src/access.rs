//! Access control for the pages.
//!
//! A program sends its token as `Authorization: Bearer TOKEN`. A browser asks for a user name,
//! which may be anything, and a password, which is the token. A listener on a loopback address
//! requires no credential. The address of the peer would not be sufficient for this exception,
//! because a proxy on the same host and `kubectl port-forward` also connect from a loopback
//! address.

use std::net::IpAddr;

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use zeroshard_model::{Error, Result};
use zeroshard_net::transport::tls::Security;

use crate::listener::Origin;

/// The challenge in the answer to a browser without a credential.
const CHALLENGE: &str = "Basic realm=\"ZeroShard: any user name, and a token as the password\", \
                         charset=\"UTF-8\"";

/// Decides who may see the pages.
pub trait Access: Clone + Send + Sync + 'static {
    /// Checks the token in the headers of a request, or the certificate of its connection.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`], [`Error::Forbidden`], [`Error::Tls`]; any other error if the
    /// caller could not be checked.
    fn check(
        &self,
        headers: &HeaderMap,
        security: Security,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// The access rules of a listener.
#[derive(Debug, Clone)]
pub(crate) struct Guard<A> {
    pub(crate) access: A,
    /// `true` if the listener is on a loopback address.
    pub(crate) is_local: bool,
}

/// Passes on a request if its caller may see the admin pages.
pub(crate) async fn check<A: Access>(
    State(Guard { access, is_local }): State<Guard<A>>,
    ConnectInfo(Origin(security)): ConnectInfo<Origin>,
    mut request: Request,
    next: Next,
) -> Response {
    if is_local {
        return match check_host(request.headers()) {
            Ok(()) => next.run(request).await,
            Err(refusal) => (StatusCode::FORBIDDEN, refusal).into_response(),
        };
    }
    if let Some(bearer) = request.headers().get(header::AUTHORIZATION).and_then(bearer) {
        request.headers_mut().insert(header::AUTHORIZATION, bearer);
    }
    match access.check(request.headers(), security.get()).await {
        Ok(()) => next.run(request).await,
        Err(error @ (Error::Forbidden { .. } | Error::Tls { .. })) => {
            (StatusCode::FORBIDDEN, format!("{error}\n")).into_response()
        }
        Err(error @ Error::Unauthenticated { .. }) => {
            let challenge = [(header::WWW_AUTHENTICATE, CHALLENGE)];
            (StatusCode::UNAUTHORIZED, challenge, format!("{error}\n")).into_response()
        }
        // The caller could not be checked.
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

/// Checks the host for which a browser has made the request. A page of another site can have the
/// browser connect to a loopback address under a name of that site (DNS rebinding), and would
/// then read pages that require no credential.
fn check_host(headers: &HeaderMap) -> Result<(), String> {
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
    let is_local = authority.as_ref().is_some_and(|authority| {
        let name = authority.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    });
    match is_local {
        true => Ok(()),
        false => Err(format!(
            "the host of the request is {host:?}; a server on a loopback address accepts only \
             localhost and IP addresses\n"
        )),
    }
}

/// Converts a `Basic` credential to a bearer token, which is its password.
fn bearer(value: &HeaderValue) -> Option<HeaderValue> {
    let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let at = decoded.iter().position(|&byte| byte == b':')?;
    let mut bearer = HeaderValue::from_bytes(&[b"Bearer ", &decoded[at + 1..]].concat()).ok()?;
    bearer.set_sensitive(true);
    Some(bearer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_becomes_a_token() {
        let basic = |text: &str| {
            let value = format!("basic {}", STANDARD.encode(text));
            bearer(&value.parse().unwrap()).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(basic("me:s3cret"), Some("Bearer s3cret".to_owned()));
        assert_eq!(basic(":a:b"), Some("Bearer a:b".to_owned()));
        assert_eq!(basic("s3cret"), None);
        for other in ["Bearer s3cret", "Basic", "Basic ???", "Basic"] {
            assert_eq!(bearer(&other.parse().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn a_local_server_accepts_no_host_name_of_another_site() {
        let check =
            |host: &str| check_host(&HeaderMap::from_iter([(header::HOST, host.parse().unwrap())]));
        for own in ["localhost", "LOCALHOST:9400", "127.0.0.1:9400", "[::1]:9400", "10.0.0.5"] {
            assert_eq!(check(own), Ok(()), "{own}");
        }
        for other in ["example.com", "localhost.example.com:9400", "127.0.0.1.nip.io", "", "a b"] {
            assert!(check(other).is_err(), "{other}");
        }
        assert_eq!(check_host(&HeaderMap::new()), Ok(()), "HTTP/1.0");
    }
}
