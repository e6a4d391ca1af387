//! The credentials that a server accepts, and what their holders may do.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use zeroshard_model::Role;
use zeroshard_model::{Error, Result};
use zeroshard_net::{
    Credential, Tokens, reloaded::Reloaded, token::Bearer, transport::tls::Security,
};

use crate::config::Common;
use crate::quota::Rate;
use zeroshard_model::quota::Holder;

/// The maximum size of the file of tokens.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The caller of a request, which [`check_token`](crate::layers::token::check_token) adds to it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Caller {
    /// May do everything: the cluster has one token, or none.
    Trusted,
    /// The caller has a token or a certificate with this role.
    Holder(Role),
}

impl Caller {
    /// The caller of a request.
    ///
    /// # Errors
    /// [`Error::Internal`] if the request has not passed the layer.
    pub(crate) fn of(extensions: &Extensions) -> Result<Self> {
        let missing = || Error::Internal { cause: "the caller of a request is unknown".to_owned() };
        extensions.get().cloned().ok_or_else(missing)
    }

    /// Returns whether the caller may read a job.
    pub(crate) fn sees(&self, job: &str) -> bool {
        match self {
            Self::Trusted => true,
            Self::Holder(role) => role.may_read(job),
        }
    }

    /// # Errors
    /// [`Error::Forbidden`] if the caller may not read a job.
    pub(crate) fn check_read(&self, job: &str) -> Result<()> {
        self.check(|role| role.may_read(job), || format!("read job {job:?}"))
    }

    /// # Errors
    /// [`Error::Forbidden`] if the caller may not change a job.
    pub(crate) fn check_train(&self, job: &str) -> Result<()> {
        self.check(|role| role.may_train(job), || format!("create, train or delete job {job:?}"))
    }

    /// # Errors
    /// [`Error::Forbidden`] if the caller may not register as a shard server.
    pub(crate) fn check_serve(&self) -> Result<()> {
        self.check(|role| *role == Role::Server, || "register a shard server".to_owned())
    }

    /// # Errors
    /// [`Error::Forbidden`] if the caller may not see the status page and the metrics, which show
    /// all jobs.
    pub(crate) fn check_observe(&self) -> Result<()> {
        let observes = |role: &Role| matches!(role, Role::Admin | Role::Server);
        self.check(observes, || "see the status page and the metrics".to_owned())
    }

    /// # Errors
    /// [`Error::Forbidden`] if the caller may not manage servers and the ranks of all jobs.
    pub(crate) fn check_operate(&self, action: &str) -> Result<()> {
        self.check(|role| *role == Role::Admin, || action.to_owned())
    }

    fn check(&self, permits: impl Fn(&Role) -> bool, action: impl Fn() -> String) -> Result<()> {
        match self {
            Self::Holder(role) if !permits(role) => {
                Err(Error::Forbidden { role: role.to_string(), action: action() })
            }
            _ => Ok(()),
        }
    }
}

/// The credentials that a server accepts. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Accepted {
    tokens: AcceptedTokens,
    /// `true` if calls must arrive on encrypted connections.
    is_encrypted: bool,
}

#[derive(Debug, Clone)]
enum AcceptedTokens {
    /// All calls are accepted, even without a token.
    Everyone,
    /// No token is accepted: a call needs a certificate with a role.
    None,
    /// The token of the cluster is accepted.
    Shared(Bearer),
    /// The tokens in a file are accepted.
    Listed(Arc<Listed>),
}

impl Accepted {
    /// Creates the accepted credentials from the configuration of a server.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a token that is not valid in an HTTP header, or an invalid file of
    /// tokens.
    pub(crate) fn new(common: &Common) -> Result<Self> {
        let is_encrypted = common.tls_cert.is_some();
        let tokens = match (common.tokens.clone(), Bearer::new(&common.token)?) {
            (Some(file), _) => AcceptedTokens::Listed(Arc::new(Listed::open(&file)?)),
            (None, Some(bearer)) => AcceptedTokens::Shared(bearer),
            (None, None) if is_encrypted && !common.insecure => AcceptedTokens::None,
            (None, None) => AcceptedTokens::Everyone,
        };
        Ok(Self { tokens, is_encrypted })
    }

    /// Accepts all calls.
    pub(crate) fn everyone() -> Self {
        Self { tokens: AcceptedTokens::Everyone, is_encrypted: false }
    }

    /// Identifies the caller from the headers of a call and the security of its connection. The
    /// role in a certificate takes precedence over a token.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`], or [`Error::Tls`] for a connection that is not encrypted but
    /// must be.
    pub(crate) fn caller(&self, headers: &HeaderMap, security: Security) -> Result<Caller> {
        match security {
            Security::Encrypted { role: Some(role) } => return Ok(Caller::Holder(role)),
            Security::Plain if self.is_encrypted => {
                let cause = "it accepts only encrypted connections; set ZEROSHARD_TLS_CA to the \
                             authority of the cluster";
                return Err(Error::Tls { peer: "this server".to_owned(), cause: cause.to_owned() });
            }
            _ => {}
        }
        let refuse = |found: &str| Error::Unauthenticated { found: found.to_owned() };
        match &self.tokens {
            AcceptedTokens::Everyone => Ok(Caller::Trusted),
            AcceptedTokens::None => Err(refuse("no certificate with a role")),
            AcceptedTokens::Shared(bearer) => bearer.check(headers).map(|()| Caller::Trusted),
            AcceptedTokens::Listed(_) if !headers.contains_key(AUTHORIZATION) => {
                Err(refuse("no token"))
            }
            AcceptedTokens::Listed(listed) => {
                let role = listed.tokens.get().role(token_in(headers)).cloned();
                Ok(Caller::Holder(role.ok_or_else(|| refuse("an unknown token"))?))
            }
        }
    }

    /// Identifies the caller, as [`Self::caller`] does, and counts the call against the limits of
    /// its token or certificate. Returns the caller, the limits, and the time that the call must
    /// wait. There are no limits if the file of tokens has none for the caller.
    ///
    /// # Errors
    /// Those of [`Self::caller`], after which the call does not count;
    /// [`Error::LimitExceeded`] if the caller has too many calls.
    pub(crate) fn admit(
        &self,
        headers: &HeaderMap,
        security: Security,
    ) -> Result<(Caller, Option<(Holder, Duration)>)> {
        let AcceptedTokens::Listed(listed) = &self.tokens else {
            return Ok((self.caller(headers, security)?, None));
        };
        let credential = match &security {
            Security::Encrypted { role: Some(role) } => Credential::Certificate(role.clone()),
            _ => Credential::token(token_in(headers)),
        };
        let caller = self.caller(headers, security)?;
        Ok((caller, listed.admit(credential)?))
    }
}

/// The token in the headers of a call; empty without a token.
fn token_in(headers: &HeaderMap) -> &[u8] {
    let value = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    value.and_then(|value| value.strip_prefix(b"Bearer ")).unwrap_or_default()
}

/// The tokens in a file, and the call rates of the credentials with a limit of requests.
#[derive(Debug)]
struct Listed {
    tokens: Reloaded<Tokens>,
    rates: Mutex<Rates>,
}

#[derive(Debug)]
struct Rates {
    of: Arc<Tokens>,
    by_credential: HashMap<Credential, Rate>,
}

impl Listed {
    fn open(file: &Path) -> Result<Self> {
        let load = {
            let file = file.to_owned();
            move || read(&file)
        };
        let tokens = Reloaded::open("the tokens", vec![file.to_owned()], load)?;
        let rates = Rates { of: tokens.get(), by_credential: HashMap::new() };
        Ok(Self { tokens, rates: Mutex::new(rates) })
    }

    fn admit(&self, credential: Credential) -> Result<Option<(Holder, Duration)>> {
        let tokens = self.tokens.get();
        let Some((role, quota)) = tokens.holder(&credential) else { return Ok(None) };
        let holder = Holder { role: role.clone(), quota: *quota };
        let Some(requests) = quota.requests else { return Ok(Some((holder, Duration::ZERO))) };
        // The state is consistent after a panic, because each change is a single assignment.
        let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&rates.of, &tokens) {
            *rates = Rates { of: tokens.clone(), by_credential: HashMap::new() };
        }
        let rate = rates.by_credential.entry(credential).or_default();
        let wait = rate.admit(requests, role, Instant::now())?;
        Ok(Some((holder, wait)))
    }
}

/// Reads a file of tokens.
fn read(file: &Path) -> Result<Tokens> {
    let unreadable = |cause: String| {
        Error::refused(format!("cannot read the file of tokens {}: {cause}", file.display()))
    };
    let found = fs::metadata(file).map_err(|cause| unreadable(cause.to_string()))?;
    if found.len() > MAX_FILE_BYTES {
        return Err(unreadable(format!("it is larger than {MAX_FILE_BYTES} bytes")));
    }
    let text = fs::read_to_string(file).map_err(|cause| unreadable(cause.to_string()))?;
    Tokens::parse(&text)
}

#[cfg(test)]
mod tests {
    use zeroshard_net::Token;

    use super::*;

    const PLAIN: Security = Security::Plain;

    fn headers(token: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, format!("Bearer {token}").parse().unwrap())])
    }

    fn line(role: &str, token: &str) -> String {
        Tokens::line(&role.parse().unwrap(), &Token::from(token.to_owned()))
    }

    #[test]
    fn the_role_of_a_token_is_that_of_its_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, format!("{}\n{}", line("server", "one"), line("job:a", "two"))).unwrap();
        let common = Common { tokens: Some(path), ..Common::default() };
        let accepted = Accepted::new(&common).unwrap();
        let server = accepted.caller(&headers("one"), PLAIN).unwrap();
        assert_eq!(server, Caller::Holder(Role::Server));
        assert_eq!(server.check_serve(), Ok(()));
        let job = accepted.caller(&headers("two"), PLAIN).unwrap();
        assert_eq!((job.check_train("a"), job.check_read("a/b")), (Ok(()), Ok(())));
        assert_eq!(Caller::Holder(Role::Admin).check_operate("drain"), Ok(()));
        let operate = [&server, &job].map(|caller| caller.check_operate("drain"));
        let refused = [job.check_train("b"), job.check_read("b"), job.check_serve()];
        for refused in refused.into_iter().chain(operate) {
            assert!(matches!(refused, Err(Error::Forbidden { .. })), "{refused:?}");
        }
        for wrong in [&headers("three"), &headers(""), &HeaderMap::new()] {
            let refused = accepted.caller(wrong, PLAIN);
            assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{refused:?}");
        }
    }

    #[test]
    fn the_certificates_of_a_role_have_the_limits_of_their_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, "job:a certificate requests=1/s weight=3\n").unwrap();
        let accepted = Accepted::new(&Common { tokens: Some(path), ..Common::default() }).unwrap();
        let call = |role: &str| {
            let security = Security::Encrypted { role: Some(role.parse().unwrap()) };
            // The certificate takes precedence over a token.
            accepted.admit(&headers("one"), security).map(|(_, limits)| limits)
        };
        let (holder, wait) = call("job:a").unwrap().unwrap();
        assert_eq!((holder.role.to_string().as_str(), holder.quota.weight), ("job:a", 3));
        assert_eq!(wait, Duration::ZERO);
        assert!(call("job:a").unwrap().unwrap().1 > Duration::ZERO);
        assert!(matches!(call("job:a"), Err(Error::LimitExceeded { limit: 1, .. })));
        // A role without a line has no limits, and a line for certificates admits no token.
        assert!(call("job:a:read").unwrap().is_none());
        assert!(accepted.caller(&headers("one"), PLAIN).is_err());
    }

    #[test]
    fn a_call_that_is_refused_does_not_count_against_the_limits_of_its_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, format!("{} requests=1/s", line("job:a", "one"))).unwrap();
        let common =
            Common { tokens: Some(path), tls_cert: Some("server.pem".into()), ..Common::default() };
        let accepted = Accepted::new(&common).unwrap();
        for _ in 0..3 {
            let refused = accepted.admit(&headers("one"), PLAIN);
            assert!(matches!(refused, Err(Error::Tls { .. })), "{refused:?}");
        }
        let encrypted = Security::Encrypted { role: None };
        let (_, limits) = accepted.admit(&headers("one"), encrypted).unwrap();
        assert_eq!(limits.unwrap().1, Duration::ZERO);
    }

    #[test]
    fn with_tls_a_call_needs_encryption_and_a_certificate_or_a_token() {
        let role = |role: Option<&str>| Security::Encrypted {
            role: role.map(|role| role.parse().unwrap()),
        };
        let with_tls = Common { tls_cert: Some("server.pem".into()), ..Common::default() };
        let with_token = Common { token: "s3cret".to_owned().into(), ..with_tls.clone() };
        for common in [&with_tls, &with_token] {
            let accepted = Accepted::new(common).unwrap();
            let plain = accepted.caller(&headers("s3cret"), PLAIN);
            assert!(matches!(plain, Err(Error::Tls { .. })), "{plain:?}");
            let certified = accepted.caller(&HeaderMap::new(), role(Some("job:a")));
            assert_eq!(certified, Ok(Caller::Holder("job:a".parse().unwrap())));
            let neither = accepted.caller(&HeaderMap::new(), role(None));
            assert!(matches!(neither, Err(Error::Unauthenticated { .. })), "{neither:?}");
            let token = accepted.caller(&headers("s3cret"), role(None));
            assert_eq!(token.is_ok(), common == &with_token);
        }
        let insecure = Common { insecure: true, ..with_tls };
        let accepted = Accepted::new(&insecure).unwrap();
        assert_eq!(accepted.caller(&HeaderMap::new(), role(None)), Ok(Caller::Trusted));
    }
}
