//! Who may see the pages: callers with the token of the cluster, or with a token or certificate of
//! the role `admin` or `server`.

use http::HeaderMap;
use zeroshard_model::Error;
use zeroshard_net::transport::tls::Security;

use crate::access::Accepted;

impl zeroshard_admin::Access for Accepted {
    async fn check(&self, headers: &HeaderMap, security: Security) -> Result<(), Error> {
        may_see(self, headers, security)
    }
}

fn may_see(accepted: &Accepted, headers: &HeaderMap, security: Security) -> Result<(), Error> {
    accepted.caller(headers, security)?.check_observe()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use http::header;
    use zeroshard_net::{Token, Tokens};

    use super::*;
    use crate::config::Common;

    fn token(text: &str) -> Token {
        Token::from(text.to_owned())
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
