//! Who may read from the mirror: those who may read the job from the servers.

use std::sync::Arc;

use http::{HeaderMap, header::AUTHORIZATION};
use tonic::Request;
use zeroshard_client::{Cluster, Options};
use zeroshard_model::{Error, Result};
use zeroshard_net::{
    Token,
    transport::tls::{PeerSecurity, Security, Tls},
};

use crate::accepted::Accepted;

/// Checks readers. Clones share what they remember.
#[derive(Clone)]
pub(crate) struct Access {
    address: String,
    job: String,
    options: Options,
    accepted: Arc<Accepted>,
}

impl Access {
    pub(crate) fn new(address: &str, job: &str, options: Options) -> Self {
        let accepted = Arc::new(Accepted::new());
        Self { address: address.to_owned(), job: job.to_owned(), options, accepted }
    }

    /// Checks whether the caller of a request may read the job.
    ///
    /// # Errors
    /// Those of [`Self::check_caller`].
    pub(crate) async fn check<T>(&self, request: &Request<T>) -> Result<()> {
        let security = request.extensions().get::<PeerSecurity>().map(PeerSecurity::get);
        let security = security.unwrap_or(Security::Plain);
        self.check_caller(request.metadata().as_ref(), security).await
    }

    /// Checks whether the caller with these headers may read the job. The role in a certificate
    /// takes precedence over a token.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`], [`Error::Forbidden`]; [`Error::Tls`] for a connection that must
    /// be encrypted but is not; the error of the call if the coordinator cannot be asked.
    pub(crate) async fn check_caller(&self, headers: &HeaderMap, security: Security) -> Result<()> {
        match security {
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
        let header = headers.get(AUTHORIZATION);
        let header = header.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let token = Token::from(header.strip_prefix("Bearer ").unwrap_or_default().to_owned());
        self.accepted.check(token, async |token| self.ask(token).await).await
    }

    /// Asks the coordinator with the reader's token. The certificate of the mirror would take
    /// precedence over it.
    async fn ask(&self, token: &Token) -> Result<()> {
        let tls = self.options.tls.clone().map(Tls::anonymous);
        let options = self.options.clone().tls(tls).token(token.clone());
        let cluster = Cluster::connect(&self.address, options).await?;
        match cluster.describe_job(&self.job).await {
            // The job may be created again.
            Ok(_) | Err(Error::UnknownJob { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
