//! Accepts only calls that carry a token of the cluster, within the rate limit of the token, or
//! that arrive on a connection with a certificate. Adds the caller to the extensions of each
//! accepted call.
//!
//! A call without a token is answered at once, and its body is not read. Probes are accepted:
//! they carry no secret, and the health service reveals none.

use std::{
    future::{Ready, ready},
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::{FutureExt, future::Either};
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt};
use zeroshard_net::transport::tls::Security;
use zeroshard_proto::status::to_status;

use super::is_probe;
use crate::{
    access::{Accepted, Caller},
    connection::Peer,
};
use zeroshard_model::quota::Holder;

/// Creates [`CheckToken`].
#[derive(Clone, Debug)]
pub struct TokenLayer(pub(crate) Accepted);

impl TokenLayer {
    /// A layer that accepts every call.
    pub fn everyone() -> Self {
        Self(Accepted::everyone())
    }
}

impl<S> Layer<S> for TokenLayer {
    type Service = CheckToken<S>;

    fn layer(&self, inner: S) -> CheckToken<S> {
        CheckToken { inner, accepted: self.0.clone() }
    }
}

/// A refusal, or a call that waits because of the rate limit of its token.
type Later<R, E> = Either<Ready<Result<R, E>>, Pin<Box<dyn Future<Output = Result<R, E>> + Send>>>;

/// The wrapped service.
#[derive(Clone, Debug)]
pub struct CheckToken<S> {
    inner: S,
    accepted: Accepted,
}

impl<S, In, Out> Service<Request<In>> for CheckToken<S>
where
    S: Service<Request<In>, Response = Response<Out>> + Clone + Send + 'static,
    S::Future: Send,
    In: Send + 'static,
    Out: Default,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Later<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<In>) -> Self::Future {
        if is_probe(request.uri().path()) {
            return Either::Left(self.inner.call(request));
        }
        let peer = request.extensions().get::<Peer>();
        let security = peer.map_or(Security::Plain, Peer::security);
        let (caller, admitted) = match self.accepted.admit(request.headers(), security) {
            Ok(admitted) => admitted,
            Err(error) => {
                let refusal: Ready<_> = ready(Ok(to_status(error).into_http()));
                return Either::Right(Either::Left(refusal));
            }
        };
        request.extensions_mut().insert::<Caller>(caller);
        let Some((holder, wait)) = admitted else { return Either::Left(self.inner.call(request)) };
        request.extensions_mut().insert::<Holder>(holder);
        if wait.is_zero() {
            return Either::Left(self.inner.call(request));
        }
        let inner = self.inner.clone();
        let later = async move {
            tokio::time::sleep(wait).await;
            inner.oneshot(request).await
        };
        Either::Right(Either::Right(later.boxed()))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use tower::{ServiceExt, service_fn};
    use zeroshard_model::{Error, Result};
    use zeroshard_net::Token;

    use tonic::Status;
    use zeroshard_proto::status::from_status;

    use super::*;
    use crate::config::Common;

    const PUSH: &str = "/zeroshard.v1.DataService/Push";

    /// Calls `path` with the header `authorization` in a cluster with `token`. Returns the
    /// response, and whether the call was accepted.
    async fn call(token: &str, path: &str, authorization: Option<&str>) -> Result<()> {
        let reached = Arc::new(Mutex::new(false));
        let set = reached.clone();
        let inner = service_fn(move |_: Request<()>| {
            *set.lock().unwrap() = true;
            ready(Ok::<_, Infallible>(Response::new(())))
        });
        let mut request = Request::builder().uri(path);
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let common = Common { token: Token::from(token.to_owned()), ..Common::default() };
        let layer = TokenLayer(Accepted::new(&common)?);
        let answer = layer.layer(inner).oneshot(request.body(()).unwrap()).await.unwrap();
        match Status::from_header_map(answer.headers()) {
            None => {
                assert!(*reached.lock().unwrap());
                Ok(())
            }
            Some(status) => {
                assert!(!*reached.lock().unwrap(), "what is refused goes no further");
                assert_eq!(status.code(), tonic::Code::Unauthenticated);
                Err(from_status(&status, "server"))
            }
        }
    }

    #[tokio::test]
    async fn a_call_with_the_token_is_accepted() {
        assert_eq!(call("s3cret", PUSH, Some("Bearer s3cret")).await, Ok(()));
    }

    #[tokio::test]
    async fn a_call_without_the_token_is_refused_for_every_service() {
        for path in [
            PUSH,
            "/zeroshard.v1.CoordinatorService/Status",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            "/grpc.health.v1.HealthX/Check",
            "/grpc.health.v1.Health",
            "/grpc.health.v1.Health/Watch",
            "/x/grpc.health.v1.Health/Check",
            "/",
        ] {
            for wrong in [None, Some(""), Some("Bearer "), Some("Bearer s3cre"), Some("s3cret")] {
                let refused = call("s3cret", path, wrong).await;
                assert!(
                    matches!(refused, Err(Error::Unauthenticated { .. })),
                    "{path} {wrong:?}: {refused:?}"
                );
            }
        }
    }

    #[tokio::test]
    async fn a_probe_is_accepted_without_the_token() {
        assert_eq!(call("s3cret", "/grpc.health.v1.Health/Check", None).await, Ok(()));
        assert_eq!(call("s3cret", "/grpc.health.v1.Health/Check", Some("Bearer x")).await, Ok(()));
    }

    #[tokio::test]
    async fn without_a_token_every_call_is_accepted() {
        assert_eq!(call("", PUSH, None).await, Ok(()));
        assert_eq!(call("", PUSH, Some("Bearer s3cret")).await, Ok(()));
    }
}
