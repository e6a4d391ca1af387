//! Access control for the admin pages. They are open to callers with the token of the cluster, or
//! with a token or certificate of the role `admin` or `server`.
//!
//! A program sends the token as `Authorization: Bearer TOKEN`. A browser asks for a user name,
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
use zeroshard_model::Error;
use zeroshard_net::transport::tls::Security;

use super::listener::Origin;
use crate::access::Accepted;

/// The challenge in the answer to a browser without a credential.
const CHALLENGE: &str = "Basic realm=\"ZeroShard: any user name, and a token as the password\", \
                         charset=\"UTF-8\"";

/// The access rules of the admin pages.
#[derive(Debug, Clone)]
pub(super) struct Access {
    pub(super) accepted: Accepted,
    /// `true` if the listener is on a loopback address.
    pub(super) is_local: bool,
}

/// Passes on a request if its caller may see the admin pages.
pub(super) async fn check(
    State(Access { accepted, is_local }): State<Access>,
    ConnectInfo(Origin(security)): ConnectInfo<Origin>,
    mut request: Request,
    next: Next,
) -> Response {
    if is_local && let Err(refusal) = check_host(request.headers()) {
        return (StatusCode::FORBIDDEN, refusal).into_response();
    }
    if let Some(bearer) = request.headers().get(header::AUTHORIZATION).and_then(bearer) {
        request.headers_mut().insert(header::AUTHORIZATION, bearer);
    }
    match may_see(&accepted, request.headers(), security.get()) {
        Ok(()) => next.run(request).await,
        Err(error @ (Error::Forbidden { .. } | Error::Tls { .. })) => {
            (StatusCode::FORBIDDEN, format!("{error}\n")).into_response()
        }
        Err(error) => {
            let challenge = [(header::WWW_AUTHENTICATE, CHALLENGE)];
            (StatusCode::UNAUTHORIZED, challenge, format!("{error}\n")).into_response()
        }
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

fn may_see(accepted: &Accepted, headers: &HeaderMap, security: Security) -> Result<(), Error> {
    accepted.caller(headers, security)?.check_observe()
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
    use std::fs;

    use zeroshard_net::{Token, Tokens};

    use super::*;
    use crate::config::Common;

    fn token(text: &str) -> Token {
        Token::from(text.to_owned())
    }

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

    #[test]
    fn the_roles_admin_and_server_see_the_pages_and_jobs_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        let roles = ["admin", "server", "job:a", "job:a:read"];
        let lines = roles.map(|role| Tokens::line(&role.parse().unwrap(), &token(role)));
        fs::write(&path, lines.join("\n")).unwrap();
        let common = Common { tokens: Some(path), ..Common::default() };
        let accepted = Accepted::new(&common).unwrap();
        let see = |token: &str| {
            let value = format!("Bearer {token}").parse().unwrap();
            may_see(
                &accepted,
                &HeaderMap::from_iter([(header::AUTHORIZATION, value)]),
                Security::Plain,
            )
        };
        assert_eq!((see("admin"), see("server")), (Ok(()), Ok(())));
        for refused in [see("job:a"), see("job:a:read")] {
            assert!(matches!(refused, Err(Error::Forbidden { .. })), "{refused:?}");
        }
        assert!(matches!(see("other"), Err(Error::Unauthenticated { .. })));
        let without = may_see(&accepted, &HeaderMap::new(), Security::Plain);
        assert!(matches!(without, Err(Error::Unauthenticated { .. })));
    }
}
