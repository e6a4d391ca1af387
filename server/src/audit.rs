//! The audit log: one line with the target `audit` for each request that changes the cluster, even
//! if the request was refused. The line contains the caller and the outcome.
//!
//! The handler of such a request names it ([`Audited::is`]), and the layer around all handlers
//! ([`record`](crate::layers::audit::record)) logs it with its outcome. The line identifies
//! the caller's token by its role and the first eight digits of its hash in the file of tokens. It
//! never contains the token.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use tonic::{Request, Status};
use zeroshard_model::Error;
use zeroshard_net::transport::tls::Security;
use zeroshard_proto::status::from_status;

use crate::{access::Caller, connection::Peer};

/// The target of the lines, by which log filters select them.
const TARGET: &str = "audit";

/// The name of a request in the audit log. The handler of the request sets it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Audited(Arc<Mutex<Option<(&'static str, String)>>>);

impl Audited {
    /// The audit name of this request.
    pub(crate) fn of<T>(request: &Request<T>) -> Self {
        request.extensions().get::<Self>().cloned().unwrap_or_default()
    }

    /// Sets the name of the request: a verb such as `delete job`, and the name of the job or the
    /// address of the server. A later call replaces an earlier one.
    pub(crate) fn is(&self, verb: &'static str, subject: &str) {
        // Each change is a single assignment.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((verb, subject.to_owned()));
    }

    fn take(&self) -> Option<(&'static str, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The record of a request from its arrival to its answer. If it is dropped before the answer,
/// because the caller has disconnected, it logs the outcome `abandoned`.
#[derive(Debug)]
pub(crate) struct Record {
    audited: Audited,
    /// The role of the caller; `cluster` in a cluster with one token or without tokens.
    role: String,
    /// The first digits of the hash of the token, in a cluster with a file of tokens.
    token: Option<String>,
    peer: Option<SocketAddr>,
    began: Instant,
}

impl Record {
    /// Begins the record of a request whose caller has been identified.
    pub(crate) fn begin(headers: &HeaderMap, extensions: &mut Extensions) -> Self {
        let (audited, peer) = (Audited::default(), extensions.get::<Peer>());
        let is_certified = peer
            .is_some_and(|peer| matches!(peer.security(), Security::Encrypted { role: Some(_) }));
        let peer = peer.and_then(Peer::address);
        let (role, token) = match Caller::of(extensions) {
            Ok(Caller::Holder(role)) => {
                // The token of a caller with a certificate has not been checked.
                let token = headers.get(AUTHORIZATION).filter(|_| !is_certified);
                let token = token.and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
                (role.to_string(), token.map(|token| blake3::hash(token).to_hex()[..8].to_owned()))
            }
            _ => ("cluster".to_owned(), None),
        };
        extensions.insert(audited.clone());
        Self { audited, role, token, peer, began: Instant::now() }
    }

    /// Logs the outcome if the handler has named the request. `error` is the error of the answer.
    pub(crate) fn end(self, error: Option<&Status>) {
        let Some(status) = error else { return self.log("ok", None) };
        let refused = matches!(from_status(status, "caller"), Error::Forbidden { .. });
        self.log(if refused { "refused" } else { "failed" }, Some(status.message()));
    }

    fn log(&self, outcome: &str, error: Option<&str>) {
        let Some((verb, subject)) = self.audited.take() else { return };
        let Self { role, token, peer, began, .. } = self;
        let (token, peer) = (token.as_deref(), peer.map(tracing::field::display));
        let seconds = began.elapsed().as_secs_f64();
        // The Debug format escapes line breaks, so that a name or an error from a caller cannot
        // forge a line.
        let (role, error) = (tracing::field::debug(role), error.map(tracing::field::debug));
        tracing::info!(target: TARGET, verb, ?subject, outcome, role, token, peer, seconds, error);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.log("abandoned", Some("the caller disconnected before the answer"));
    }
}

/// Records the loss of a shard server, which no caller has requested.
pub(crate) fn lost(address: &str, cause: &str) {
    tracing::info!(target: TARGET, verb = "lose server", subject = ?address, outcome = "ok", ?cause);
}
