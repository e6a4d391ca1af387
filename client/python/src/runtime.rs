//! The tokio runtime of this process, and waiting for its tasks without the GIL.

use std::{sync::OnceLock, time::Duration};

use pyo3::prelude::*;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};
use zeroshard_client::{Error, Result};
use zeroshard_server::{config::Common, logging};

use crate::error::raise;

/// Maximum delay until Ctrl-C is noticed.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// The process that started the runtime, and the runtime. Threads do not survive a fork, so a child
/// process cannot use it.
static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// # Errors
/// [`Error::Internal`] if threads cannot be started, or in a process that was forked afterwards.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    if RUNTIME.get().is_none() {
        if let Ok(filter) = std::env::var("ZEROSHARD_LOG") {
            logging::start(&Common { log: filter, ..Common::default() });
        }
        let built = Builder::new_multi_thread().enable_all().thread_name("zeroshard").build();
        let built =
            built.map_err(|e| Error::Internal { cause: format!("cannot start threads: {e}") })?;
        let _ = RUNTIME.set((std::process::id(), built));
    }
    match RUNTIME.get() {
        Some((process, runtime)) if *process == std::process::id() => Ok(runtime),
        _ => {
            let cause =
                "this process was forked from one that uses ZeroShard; start it with spawn instead";
            Err(Error::Internal { cause: cause.to_owned() })
        }
    }
}

/// Starts `work` in the background.
pub(crate) fn spawn<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> PyResult<JoinHandle<Result<T>>> {
    Ok(runtime().map_err(raise)?.spawn(work))
}

/// Waits for `work` without the GIL. Ctrl-C ends the wait and cancels the work.
pub(crate) fn wait<T: Send + 'static>(
    py: Python<'_>,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> PyResult<T> {
    let mut task = spawn(work)?;
    let interrupted = |task: &mut JoinHandle<_>, error| {
        task.abort();
        Err(error)
    };
    match join(py, &mut task) {
        Ok(result) => result.map_err(raise),
        Err(error) => interrupted(&mut task, error),
    }
}

/// Waits for a task without the GIL.
///
/// # Errors
/// The exception of a signal handler, such as KeyboardInterrupt. The task continues.
pub(crate) fn join<T: Send>(
    py: Python<'_>,
    task: &mut JoinHandle<Result<T>>,
) -> PyResult<Result<T>> {
    let runtime = runtime().map_err(raise)?;
    loop {
        let ended = py.detach(|| {
            runtime.block_on(async { tokio::time::timeout(SIGNAL_INTERVAL, &mut *task).await })
        });
        match ended {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(ended)) => {
                return Ok(Err(Error::Internal {
                    cause: format!("a background task ended: {ended}"),
                }));
            }
            Err(_) => py.check_signals()?,
        }
    }
}
