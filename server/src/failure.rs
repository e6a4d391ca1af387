//! The end of servers that share a process, when a task of one of them has panicked.
//!
//! A lock that the task held is poisoned then, and what the lock guards may be half done: no server
//! of the process can be trusted any more. The binary ends its process ([`abort_on_panic`]).
//! Servers inside another program end together, with an error that every later call gets
//! ([`Failure`]).

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    process,
    sync::{Arc, OnceLock},
};

use futures_util::FutureExt;
use tokio::task::JoinError;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use zeroshard_proto::{Error, Result};

/// Whether a task of the servers that share it has panicked. Clones share.
#[derive(Debug, Clone, Default)]
pub struct Failure(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// INVARIANT: set before `failed` is cancelled.
    cause: OnceLock<String>,
    failed: CancellationToken,
}

impl Failure {
    /// What panicked first, and its message; `None` as long as nothing has.
    pub fn cause(&self) -> Option<&str> {
        self.0.cause.get().map(String::as_str)
    }

    /// Completes when a task has panicked.
    pub fn failed(&self) -> WaitForCancellationFutureOwned {
        self.0.failed.clone().cancelled_owned()
    }

    /// What callers are told from then on.
    pub fn error(&self) -> Error {
        let cause = self.cause().unwrap_or("nothing has panicked");
        Error::Unavailable {
            peer: "this server".to_owned(),
            cause: format!("it has failed: {cause}"),
        }
    }

    /// Ends the servers: `task` has panicked with this payload.
    pub fn report(&self, task: &str, panic: &(dyn Any + Send)) {
        let texts = (panic.downcast_ref::<&str>().copied(), panic.downcast_ref::<String>());
        let message = match texts {
            (Some(text), _) => text,
            (_, Some(text)) => text.as_str(),
            _ => "no message",
        };
        // The first one counts: others may follow from it.
        if self.0.cause.set(format!("{task} panicked: {message}")).is_ok() {
            tracing::error!(task, message, "a task panicked; stopping the servers of this process");
        }
        self.0.failed.cancel();
    }

    /// Runs `work`; `None`, and the servers end, if it panics.
    pub async fn guard<T>(&self, task: &str, work: impl Future<Output = T>) -> Option<T> {
        // Nothing of `work` is used after a panic.
        match AssertUnwindSafe(work).catch_unwind().await {
            Ok(done) => Some(done),
            Err(panic) => {
                self.report(task, &*panic);
                None
            }
        }
    }

    /// Runs long work on a thread that may block.
    ///
    /// # Errors
    /// Those of `work`, and of [`Self::joined`].
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        task: &str,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.joined(task, tokio::task::spawn_blocking(work).await)?
    }

    /// What a task that was spawned has come to. The servers end if it has panicked.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a task that has panicked, or was aborted because the runtime
    /// ends.
    pub(crate) fn joined<T>(
        &self,
        task: &str,
        ended: std::result::Result<T, JoinError>,
    ) -> Result<T> {
        ended.map_err(|error| match error.try_into_panic() {
            Ok(panic) => {
                self.report(task, &*panic);
                self.error()
            }
            Err(aborted) => Error::Unavailable {
                peer: "this server".to_owned(),
                cause: format!("{task} ended: {aborted}"),
            },
        })
    }
}

/// Makes any panic of this process end it at once, with a message and an exit code other than 0.
pub fn abort_on_panic() {
    let show = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        show(panic);
        tracing::error!("{panic}; this is a bug; the server exits now");
        process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[tokio::test]
    async fn the_first_panic_is_what_everybody_is_told() {
        let failure = Failure::default();
        assert_eq!(failure.guard("one", async { 1 }).await, Some(1));
        assert_eq!(failure.joined("two", tokio::spawn(async { 2 }).await), Ok(2));
        assert_eq!(failure.cause(), None);
        let number = 3;
        assert_eq!(failure.guard("three", async { assert_eq!(number, 4, "odd") }).await, None);
        let later =
            failure.joined::<()>("four", tokio::task::spawn_blocking(|| panic!("later")).await);
        failure.failed().await;
        let cause = failure.cause().unwrap();
        assert!(cause.starts_with("three panicked: ") && cause.contains("odd"), "{cause}");
        assert_eq!(later, Err(failure.error()));
        assert!(matches!(later, Err(Error::Unavailable { .. })));
    }

    /// Run by the test below, in a process of its own.
    #[test]
    #[ignore = "it ends its process"]
    fn a_thread_panics_beside_one_that_waits() {
        abort_on_panic();
        let waits = std::thread::spawn(std::thread::park);
        std::thread::spawn(|| panic!("a lock is poisoned"));
        waits.join().unwrap();
    }

    #[test]
    fn a_panic_of_any_thread_ends_the_process_with_a_message() {
        let name = "failure::tests::a_thread_panics_beside_one_that_waits";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let ended = child.args(["--exact", name, "--ignored", "--nocapture"]).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(
            !ended.status.success() && said.contains("a lock is poisoned"),
            "{:?}: {said}",
            ended.status
        );
    }
}
