//! The shutdown of servers that share a process after a task of one of them has panicked.
//!
//! A lock that the task held is then poisoned, and the data behind it may be incomplete, so no
//! server of the process can be trusted any more. The binary ends its process ([`abort_on_panic`]).
//! Servers inside another program stop together, and every later call receives an error
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
use zeroshard_model::{Error, Result};

/// Whether a task of the servers that share this value has panicked. Clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Failure(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// INVARIANT: set before `failed` is cancelled.
    cause: OnceLock<String>,
    failed: CancellationToken,
    /// `true` if long work is done in place.
    is_inline: bool,
}

impl Failure {
    /// Long work is done in place, and not on other threads: for simulations, whose clock does not
    /// wait for threads.
    pub fn inline() -> Self {
        Self(Arc::new(State { is_inline: true, ..State::default() }))
    }

    /// The first task that panicked, and its message; `None` if no task has panicked.
    pub fn cause(&self) -> Option<&str> {
        self.0.cause.get().map(String::as_str)
    }

    /// Completes when a task has panicked.
    pub fn failed(&self) -> WaitForCancellationFutureOwned {
        self.0.failed.clone().cancelled_owned()
    }

    /// The error for all later calls.
    pub fn error(&self) -> Error {
        let cause = self.cause().unwrap_or("nothing has panicked");
        Error::Unavailable {
            peer: "this server".to_owned(),
            cause: format!("it has failed: {cause}"),
        }
    }

    /// Stops the servers, because `task` has panicked with this payload.
    pub fn report(&self, task: &str, panic: &(dyn Any + Send)) {
        let texts = (panic.downcast_ref::<&str>().copied(), panic.downcast_ref::<String>());
        let message = match texts {
            (Some(text), _) => text,
            (_, Some(text)) => text.as_str(),
            _ => "no message",
        };
        // Only the first panic is kept: others may follow from it.
        if self.0.cause.set(format!("{task} panicked: {message}")).is_ok() {
            tracing::error!(task, message, "a task panicked; stopping the servers of this process");
        }
        self.0.failed.cancel();
    }

    /// Runs `work`. If it panics, stops the servers and returns `None`.
    pub async fn guard<T>(&self, task: &str, work: impl Future<Output = T>) -> Option<T> {
        // No state of `work` is used after a panic.
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
    /// Those of `work` and of [`Self::joined`].
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        task: &str,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.0.is_inline {
            return work();
        }
        self.joined(task, tokio::task::spawn_blocking(work).await)?
    }

    /// Converts the result of a spawned task. The servers stop if the task has panicked.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a task that has panicked, or was aborted because the runtime is
    /// shutting down.
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

/// Makes any panic of this process end the process at once, with a message and an exit code other
/// than 0.
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

    // promise: no-silent-hang
    #[tokio::test]
    async fn all_callers_are_told_of_the_first_panic() {
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

    /// Run by the test below, in a separate process.
    #[test]
    #[ignore = "it ends its process"]
    fn a_thread_panics_while_another_waits() {
        abort_on_panic();
        let waits = std::thread::spawn(std::thread::park);
        std::thread::spawn(|| panic!("a lock is poisoned"));
        waits.join().unwrap();
    }

    #[test]
    fn a_panic_of_any_thread_ends_the_process_with_a_message() {
        let name = "failure::tests::a_thread_panics_while_another_waits";
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
