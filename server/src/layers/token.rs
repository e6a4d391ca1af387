//! Accepts only calls that carry a token of the cluster, within the rate limit of the token, or
//! that arrive on a connection with a certificate. Adds the caller to the extensions of each
//! accepted call.
//!
//! A call without a token is answered at once, and its body is not read. Probes are accepted:
//! they carry no secret, and the health service reveals none.

use axum::{
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use tonic::service::Routes;
use zeroshard_model::quota::Holder;
use zeroshard_net::transport::tls::Security;
use zeroshard_proto::status::to_status;

use super::is_probe;
use crate::{
    access::{Accepted, Caller},
    connection::Peer,
};

/// Answers a request if its credentials are accepted, after the time that the rate limit of its
/// token demands.
pub(crate) async fn check_token(
    State(accepted): State<Accepted>,
    mut request: Request,
    next: Next,
) -> Response {
    if !is_probe(request.uri().path()) {
        let security = request.extensions().get::<Peer>().map_or(Security::Plain, Peer::security);
        let (caller, admitted) = match accepted.admit(request.headers(), security) {
            Ok(admitted) => admitted,
            Err(error) => return to_status(error).into_http(),
        };
        request.extensions_mut().insert::<Caller>(caller);
        if let Some((holder, wait)) = admitted {
            request.extensions_mut().insert::<Holder>(holder);
            if !wait.is_zero() {
                tokio::time::sleep(wait).await;
            }
        }
    }
    next.run(request).await
}

/// Makes `routes` accept every call, without limits.
pub fn accept_everyone(routes: Routes) -> Routes {
    let layer = from_fn_with_state(Accepted::everyone(), check_token);
    Routes::from(routes.into_axum_router().layer(layer))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Router, body::Body};
    use tower::ServiceExt;
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
        let mut request = Request::builder().uri(path);
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let common = Common { token: Token::from(token.to_owned()), ..Common::default() };
        let answer = Router::new()
            .fallback(async move || *set.lock().unwrap() = true)
            .layer(from_fn_with_state(Accepted::new(&common)?, check_token))
            .oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap();
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
