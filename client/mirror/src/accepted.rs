//! The tokens that the coordinator has accepted, and for how long they need no other question.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::Semaphore, time::Instant};
use zeroshard_model::{Error, Result};
use zeroshard_net::Token;

/// How long a token is accepted without asking the coordinator again. A revoked token is refused
/// after this time.
const TRUSTED: Duration = Duration::from_secs(30);

/// The maximum number of tokens that are remembered.
const MAX_TOKENS: usize = 1024;

/// The maximum number of questions to the coordinator at a time.
const QUESTIONS: usize = 4;

/// The accepted tokens, and when the coordinator has accepted them.
pub(crate) struct Accepted {
    tokens: Mutex<Vec<(Token, Instant)>>,
    questions: Semaphore,
}

impl Accepted {
    pub(crate) fn new() -> Self {
        Self { tokens: Mutex::default(), questions: Semaphore::new(QUESTIONS) }
    }

    /// Checks a token. Calls `ask` unless the coordinator has accepted it in the last 30 s.
    ///
    /// # Errors
    /// Those of `ask`. If the coordinator cannot be asked, a token that it has accepted before is
    /// accepted.
    pub(crate) async fn check(
        &self,
        token: Token,
        ask: impl AsyncFnOnce(&Token) -> Result<()>,
    ) -> Result<()> {
        let known = self.accepted_at(&token);
        if known.is_some_and(|at| at.elapsed() < TRUSTED) {
            return Ok(());
        }
        let _turn = self.questions.acquire().await;
        match ask(&token).await {
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

    fn accepted_at(&self, token: &Token) -> Option<Instant> {
        let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.iter().find(|(of, _)| of == token).map(|(_, at)| *at)
    }

    fn remember(&self, token: Token) {
        self.forget(&token);
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() == MAX_TOKENS {
            tokens.remove(0);
        }
        tokens.push((token, Instant::now()));
    }

    fn forget(&self, token: &Token) {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|(of, _)| of != token);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn token(text: &str) -> Token {
        Token::from(text.to_owned())
    }

    fn unknown() -> Error {
        Error::Unauthenticated { found: "an unknown token".to_owned() }
    }

    fn away() -> Error {
        let peer = "the coordinator".to_owned();
        Error::Unavailable { peer, cause: "connection refused".to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_revoked_token_is_refused_after_30_seconds() {
        let accepted = Accepted::new();
        accepted.check(token("a"), async |_| Ok(())).await.unwrap();
        advance(TRUSTED - Duration::from_millis(1)).await;
        accepted.check(token("a"), async |_| Err(unknown())).await.unwrap();
        advance(Duration::from_millis(1)).await;
        for _ in 0..2 {
            let refused = accepted.check(token("a"), async |_| Err(unknown())).await;
            assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{refused:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_counts_for_30_seconds_and_for_one_token() {
        let accepted = Accepted::new();
        let mut asked = 0;
        for wait in [0, 29, 1, 29, 29] {
            advance(Duration::from_secs(wait)).await;
            let ask = async |_: &Token| {
                asked += 1;
                Ok(())
            };
            accepted.check(token("a"), ask).await.unwrap();
        }
        assert_eq!(asked, 3);
        let other = accepted.check(token("b"), async |_| Err(unknown())).await;
        assert!(matches!(other, Err(Error::Unauthenticated { .. })), "{other:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn while_the_coordinator_is_away_only_accepted_tokens_are_accepted() {
        let accepted = Accepted::new();
        accepted.check(token("a"), async |_| Ok(())).await.unwrap();
        advance(TRUSTED * 10).await;
        accepted.check(token("a"), async |_| Err(away())).await.unwrap();
        let other = accepted.check(token("b"), async |_| Err(away())).await;
        assert!(matches!(other, Err(Error::Unavailable { .. })), "{other:?}");
    }

    #[tokio::test]
    async fn only_the_latest_tokens_are_remembered() {
        let accepted = Accepted::new();
        for number in 0..=MAX_TOKENS {
            accepted.check(token(&number.to_string()), async |_| Ok(())).await.unwrap();
        }
        let first = accepted.check(token("0"), async |_| Err(unknown())).await;
        assert!(matches!(first, Err(Error::Unauthenticated { .. })), "{first:?}");
        accepted.check(token("1"), async |_| Err(unknown())).await.unwrap();
    }
}
