//! Transfers on the runtime's threads, while the caller's thread computes.

use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;
use zeroshard_proto::{Error, Result};

use super::remote::{Gradient, ParameterServer};

/// A transfer that is under way. Dropping it cancels it.
pub type Task<T> = AbortOnDropHandle<Result<T>>;

/// Starts a transfer.
pub fn start<T: Send + 'static>(
    runtime: &Handle,
    transfer: impl Future<Output = Result<T>> + Send + 'static,
) -> Task<T> {
    AbortOnDropHandle::new(runtime.spawn(transfer))
}

/// Waits for a transfer. Must not be called on a thread of the runtime.
///
/// # Errors
/// Those of the transfer; [`Error::Internal`] if it panicked.
pub fn wait<T>(runtime: &Handle, task: Task<T>) -> Result<T> {
    runtime
        .block_on(task)
        .unwrap_or_else(|e| Err(Error::Internal { cause: format!("a transfer ended early: {e}") }))
}

/// Pushes the gradients of one step in the background, one push at a time: enough to keep the
/// connection busy, and a bound on the memory of gradients that wait.
#[derive(Debug)]
pub struct Pushes<S> {
    server: Arc<S>,
    runtime: Handle,
    step: u64,
    under_way: Option<Task<()>>,
}

impl<S: ParameterServer> Pushes<S> {
    /// Nothing pushed of `step` yet.
    pub fn new(server: Arc<S>, runtime: &Handle, step: u64) -> Self {
        Self { server, runtime: runtime.clone(), step, under_way: None }
    }

    /// Starts to push gradients, after the push before has ended. `held` is dropped when they have
    /// arrived.
    ///
    /// # Errors
    /// Those of the push before.
    pub fn push(&mut self, gradients: Vec<Gradient>, held: impl Send + 'static) -> Result<()> {
        if gradients.is_empty() {
            return Ok(());
        }
        self.finish()?;
        let (server, step) = (self.server.clone(), self.step);
        self.under_way = Some(start(&self.runtime, async move {
            let pushed = server.push(step, gradients).await;
            drop(held);
            pushed
        }));
        Ok(())
    }

    /// Waits until all gradients have arrived.
    ///
    /// # Errors
    /// Those of the last push.
    pub fn finish(&mut self) -> Result<()> {
        self.under_way.take().map_or(Ok(()), |task| wait(&self.runtime, task))
    }
}
