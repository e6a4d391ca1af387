//! Transfers on the runtime's threads, while the caller's thread computes.

use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;
use zeroshard_model::Error as ClusterError;

use super::error::{Error, Result};
use super::remote::{Gradient, ParameterServer};

/// A running transfer. Dropping it cancels it.
pub type Task<T, E = Error> = AbortOnDropHandle<Result<T, E>>;

/// Starts a transfer. It is a task, which can share a thread with its connection.
pub fn start<T: Send + 'static, E: Send + 'static>(
    runtime: &Handle,
    transfer: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Task<T, E> {
    AbortOnDropHandle::new(runtime.spawn(transfer))
}

/// Waits for a transfer. Must not be called on a thread of the runtime.
///
/// # Errors
/// Those of the transfer; an internal error if it panicked.
pub fn wait<T, E: From<ClusterError>>(runtime: &Handle, task: Task<T, E>) -> Result<T, E> {
    runtime.block_on(task).unwrap_or_else(|e| {
        let cause = format!("a transfer ended early: {e}");
        Err(ClusterError::Internal { cause }.into())
    })
}

/// Pushes the gradients of one step in the background, one push at a time. One push keeps the
/// connection busy, and the limit bounds the memory of gradients that wait to be sent.
#[derive(Debug)]
pub struct Pushes<S> {
    server: Arc<S>,
    runtime: Handle,
    step: u64,
    running: Option<Task<()>>,
}

impl<S: ParameterServer> Pushes<S> {
    /// Creates a queue for the gradients of `step`.
    pub fn new(server: Arc<S>, runtime: &Handle, step: u64) -> Self {
        Self { server, runtime: runtime.clone(), step, running: None }
    }

    /// Waits for the previous push, then starts to push `gradients`. `held` is dropped when they
    /// have been sent.
    ///
    /// # Errors
    /// Those of the previous push.
    pub fn push(&mut self, gradients: Vec<Gradient>, held: impl Send + 'static) -> Result<()> {
        if gradients.is_empty() {
            return Ok(());
        }
        self.finish()?;
        let pushed = self.server.clone().push(self.step, gradients);
        self.running = Some(start(&self.runtime, async move {
            let pushed = pushed.await;
            drop(held);
            pushed
        }));
        Ok(())
    }

    /// Waits until all gradients have been sent.
    ///
    /// # Errors
    /// Those of the last push.
    pub fn finish(&mut self) -> Result<()> {
        self.running.take().map_or(Ok(()), |task| wait(&self.runtime, task))
    }
}
