//! Who may read from the mirror: those who may read the job from the servers.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use http::header::AUTHORIZATION;
use tokio::sync::Semaphore;
use tonic::Request;
use zeroshard_client::{Cluster, Options};
use zeroshard_model::{Error, Result};
use zeroshard_net::{
    Token,
    transport::tls::{PeerSecurity, Security},
};

/// How long a token is accepted without asking the coordinator again. A revoked token is refused
/// after this time.
const TRUSTED: Duration = Duration::from_secs(30);

/// The maximum number of tokens that are remembered.
const MAX_TOKENS: usize = 1024;

/// The maximum number of questions to the coordinator at a time.
const QUESTIONS: usize = 4;

/// Checks readers.
pub(crate) struct Access {
    address: String,
    job: String,
    options: Options,
    /// The tokens that the coordinator has accepted, and when.
    accepted: Mutex<Vec<(Token, Instant)>>,
    questions: Semaphore,
}

impl Access {
    pub(crate) fn new(address: &str, job: &str, options: Options) -> Self {
        Self {
            address: address.to_owned(),
            job: job.to_owned(),
            options,
            accepted: Mutex::default(),
            questions: Semaphore::new(QUESTIONS),
        }
    }

    /// Returns whether the caller of a request may read the job.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`], [`Error::Forbidden`]; [`Error::Tls`] for a connection that must
    /// be encrypted but is not; the error of the call if the coordinator cannot be asked.
    pub(crate) async fn check<T>(&self, request: &Request<T>) -> Result<()> {
        let security = request.extensions().get::<PeerSecurity>().map(PeerSecurity::get);
        match security.unwrap_or(Security::Plain) {
            Security::Encrypted { role: Some(role) } if role.may_read(&self.job) => return Ok(()),
            Security::Encrypted { role: Some(role) } => {
                let action = format!("read job {:?}", self.job);
                return Err(Error::Forbidden { role: role.to_string(), action });
            }
            Security::Plain if self.options.tls.is_some() => {
                let cause = "it accepts only encrypted connections; set ZEROSHARD_TLS_CA to the \
                             authority of the cluster";
                return Err(Error::Tls { peer: "this mirror".to_owned(), cause: cause.to_owned() });
            }
            Security::Plain | Security::Encrypted { role: None } => {}
        }
        let header = request.metadata().as_ref().get(AUTHORIZATION);
        let header = header.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let token = Token::from(header.strip_prefix("Bearer ").unwrap_or_default().to_owned());
        self.check_token(token).await
    }

    async fn check_token(&self, token: Token) -> Result<()> {
        let known = self.accepted_at(&token);
        if known.is_some_and(|at| at.elapsed() < TRUSTED) {
            return Ok(());
        }
        let _turn = self.questions.acquire().await;
        match self.ask(&token).await {
            Ok(()) => {
                self.remember(token);
                Ok(())
            }
            Err(error @ (Error::Unauthenticated { .. } | Error::Forbidden { .. })) => {
                self.forget(&token);
                Err(error)
            }
            // A reader is not lost because the coordinator is away.
            Err(_) if known.is_some() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks the coordinator with the reader's token.
    async fn ask(&self, token: &Token) -> Result<()> {
        let options = self.options.clone().token(token.clone());
        let cluster = Cluster::connect(&self.address, options).await?;
        match cluster.describe_job(&self.job).await {
            // The job may be created again.
            Ok(_) | Err(Error::UnknownJob { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn accepted_at(&self, token: &Token) -> Option<Instant> {
        let accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.iter().find(|(of, _)| of == token).map(|(_, at)| *at)
    }

    fn remember(&self, token: Token) {
        self.forget(&token);
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        if accepted.len() == MAX_TOKENS {
            accepted.remove(0);
        }
        accepted.push((token, Instant::now()));
    }

    fn forget(&self, token: &Token) {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.retain(|(of, _)| of != token);
    }
}
