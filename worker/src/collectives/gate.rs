//! Access control for calls from peers to a worker.

use tonic::Request;
use zeroshard_model::Role;
use zeroshard_model::{Error, Result};
use zeroshard_net::{
    token::Bearer,
    transport::tls::{PeerSecurity, Security},
};

use super::options::Options;

/// Accepts calls from peers that have the token of this worker, or a certificate with the same
/// role.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    bearer: Option<Bearer>,
    is_encrypted: bool,
    /// The role in the certificate of this worker.
    role: Option<Role>,
}

impl Gate {
    /// # Errors
    /// [`Error::Invalid`] for a token that is not valid in an HTTP header.
    pub(super) fn new(options: &Options) -> Result<Self> {
        let tls = options.tls.as_ref();
        let role = tls.and_then(|tls| tls.role());
        Ok(Self { bearer: Bearer::new(&options.token)?, is_encrypted: tls.is_some(), role })
    }

    /// # Errors
    /// [`Error::Unauthenticated`], or [`Error::Tls`] for a connection that is not encrypted.
    pub(super) fn check(&self, call: &Request<()>) -> Result<()> {
        let security = call.extensions().get().map_or(Security::Plain, PeerSecurity::get);
        match (security, &self.bearer) {
            (Security::Plain, _) if self.is_encrypted => {
                let cause = "it accepts only encrypted connections; set --tls-ca".to_owned();
                Err(Error::Tls { peer: "this worker".to_owned(), cause })
            }
            (Security::Encrypted { role: Some(role) }, _) if Some(&role) == self.role.as_ref() => {
                Ok(())
            }
            (_, Some(bearer)) => bearer.check(call.metadata().as_ref()),
            (Security::Encrypted { .. }, None) => {
                let found = "no certificate with the role of this worker".to_owned();
                Err(Error::Unauthenticated { found })
            }
            (Security::Plain, None) => Ok(()),
        }
    }
}
