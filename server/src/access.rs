//! The credentials that a server accepts, and what their holders may do.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use zeroshard_proto::{Error, Result, Role, Token, Tokens, token::Bearer};

use crate::quota::{Holder, Rate};

/// The time after which a change of the file of tokens is noticed.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum size of the file of tokens.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The caller of a request, which [`TokenLayer`](crate::layers::token::TokenLayer) adds to it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Caller {
    /// May do everything: the cluster has one token, or none.
    Trusted,
    /// Has a token with this role.
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

    /// Whether the caller may read a job.
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
pub(crate) enum Accepted {
    /// All calls, also those without a token.
    Everyone,
    /// Calls with the token of the cluster.
    Shared(Bearer),
    /// Calls with one of the tokens in a file.
    Listed(Arc<TokenFile>),
}

impl Accepted {
    /// The tokens in `file`, or else `token`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a token that no header can carry, or an invalid file.
    pub(crate) fn new(token: &Token, file: Option<&Path>) -> Result<Self> {
        let bearer = Bearer::new(token)?;
        Ok(match (file, bearer) {
            (Some(file), _) => Self::Listed(Arc::new(TokenFile::open(file)?)),
            (None, Some(bearer)) => Self::Shared(bearer),
            (None, None) => Self::Everyone,
        })
    }

    /// The caller that sends these headers.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`].
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller> {
        match self {
            Self::Everyone => Ok(Caller::Trusted),
            Self::Shared(bearer) => bearer.check(headers).map(|()| Caller::Trusted),
            Self::Listed(file) => {
                let refuse = |found: &str| Error::Unauthenticated { found: found.to_owned() };
                let value = headers.get(AUTHORIZATION).ok_or_else(|| refuse("no token"))?;
                let token = value.as_bytes().strip_prefix(b"Bearer ").unwrap_or_default();
                let role = file.role(token).ok_or_else(|| refuse("an unknown token"))?;
                Ok(Caller::Holder(role))
            }
        }
    }
}

impl Accepted {
    /// Counts a call whose caller was accepted. Returns the limits of its token, if it has some,
    /// and how long the call must wait.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`].
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<Option<(Holder, Duration)>> {
        let Self::Listed(file) = self else { return Ok(None) };
        headers.get(AUTHORIZATION).map_or(Ok(None), |value| {
            file.admit(value.as_bytes().strip_prefix(b"Bearer ").unwrap_or_default())
        })
    }
}

/// The file of tokens, which is read again when it has changed.
#[derive(Debug)]
pub(crate) struct TokenFile {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tokens: Tokens,
    version: Version,
    checked: Instant,
    /// The calls with the tokens that have a limit of them.
    rates: HashMap<[u8; 32], Rate>,
}

/// Differs when the file has changed.
type Version = (Option<SystemTime>, u64);

impl TokenFile {
    fn open(path: &Path) -> Result<Self> {
        let (tokens, version) = read(path)?;
        let state = State { tokens, version, checked: Instant::now(), rates: HashMap::new() };
        Ok(Self { path: path.to_owned(), state: Mutex::new(state) })
    }

    fn role(&self, token: &[u8]) -> Option<Role> {
        // The state is consistent after a panic, because each change is a single assignment.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.checked.elapsed() >= RELOAD_INTERVAL {
            state.checked = Instant::now();
            state.reload(&self.path);
        }
        state.tokens.role(token).cloned()
    }

    fn admit(&self, token: &[u8]) -> Result<Option<(Holder, Duration)>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { tokens, rates, .. } = &mut *state;
        let Some((hash, (role, quota))) = tokens.holder(token) else { return Ok(None) };
        let holder = Holder { role: role.clone(), quota: *quota };
        let wait = match quota.requests {
            None => Duration::ZERO,
            Some(requests) => {
                let rate = rates.entry(*hash).or_default();
                rate.admit(requests, role, Instant::now())?
            }
        };
        Ok(Some((holder, wait)))
    }
}

impl State {
    /// Reads a file that has changed. If it is invalid, the tokens before remain.
    fn reload(&mut self, path: &Path) {
        if fs::metadata(path).is_ok_and(|found| version(&found) == self.version) {
            return;
        }
        match read(path) {
            Ok((tokens, version)) => {
                tracing::info!(file = %path.display(), "the file of tokens has changed");
                (self.tokens, self.version) = (tokens, version);
                self.rates.clear();
            }
            Err(error) => {
                tracing::warn!(%error, "the tokens before remain valid");
                // Until the file changes once more.
                self.version = fs::metadata(path).map_or((None, 0), |found| version(&found));
            }
        }
    }
}

fn version(found: &fs::Metadata) -> Version {
    (found.modified().ok(), found.len())
}

fn read(path: &Path) -> Result<(Tokens, Version)> {
    let invalid = |found: String| {
        let what = format!("file of tokens {}", path.display());
        Error::invalid(what, found, "a readable file with lines of `zsctl token new`")
    };
    let found = fs::metadata(path).map_err(|cause| invalid(cause.to_string()))?;
    if found.len() > MAX_FILE_BYTES {
        return Err(invalid(format!("{} bytes large", found.len())));
    }
    let text = fs::read_to_string(path).map_err(|cause| invalid(cause.to_string()))?;
    Ok((Tokens::parse(&text)?, version(&found)))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let accepted = Accepted::new(&Token::default(), Some(&path)).unwrap();
        let server = accepted.caller(&headers("one")).unwrap();
        assert_eq!(server, Caller::Holder(Role::Server));
        assert_eq!(server.check_serve(), Ok(()));
        let job = accepted.caller(&headers("two")).unwrap();
        assert_eq!((job.check_train("a"), job.check_read("a/b")), (Ok(()), Ok(())));
        for refused in [job.check_train("b"), job.check_read("b"), job.check_serve()] {
            assert!(matches!(refused, Err(Error::Forbidden { .. })), "{refused:?}");
        }
        for wrong in [&headers("three"), &headers(""), &HeaderMap::new()] {
            let refused = accepted.caller(wrong);
            assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{refused:?}");
        }
    }

    #[test]
    fn a_changed_file_is_read_again_and_an_invalid_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, line("admin", "one")).unwrap();
        let file = TokenFile::open(&path).unwrap();
        let reload = || file.state.lock().unwrap().reload(&path);
        fs::write(&path, format!("{}\n{}", line("admin", "two"), line("server", "three"))).unwrap();
        reload();
        assert_eq!((file.role(b"one"), file.role(b"two")), (None, Some(Role::Admin)));
        for wrong in [Some("nonsense"), None] {
            match wrong {
                Some(text) => fs::write(&path, text).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            reload();
            assert_eq!(file.role(b"two"), Some(Role::Admin));
        }
    }
}
