//! Calls from tasks to Python.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pyo3::prelude::*;
use zeroshard_model::Error;

/// A function of Python that a task calls.
pub(crate) struct Call(Py<PyAny>);

/// Sets its flag when it is dropped, also with a task that is aborted.
struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Call {
    pub(crate) fn new(function: Py<PyAny>) -> Self {
        Self(function)
    }

    /// Calls functions that wait for copies of a device or start them, in a thread that may wait.
    /// If the task is aborted, functions that were not called yet are not called any more.
    ///
    /// # Errors
    /// [`Error::Internal`] if one of them raises an exception, or Python ends; [`Error::Timeout`].
    pub(crate) async fn all(calls: Vec<Self>, timeout: Duration) -> Result<(), Error> {
        if calls.is_empty() {
            return Ok(());
        }
        let is_given_up = Arc::new(AtomicBool::new(false));
        let _guard = OnDrop(is_given_up.clone());
        let call = move || {
            let each = |py: Python<'_>| {
                let mut wanted = calls.iter().take_while(|_| !is_given_up.load(Ordering::Relaxed));
                wanted.try_for_each(|call| call.0.call0(py).map(drop))
            };
            Python::try_attach(each)
                .ok_or_else(|| "the interpreter has ended".to_owned())?
                .map_err(|error| error.to_string())
        };
        let called = tokio::time::timeout(timeout, tokio::task::spawn_blocking(call)).await;
        let called = called.map_err(|_| Error::Timeout {
            waiting_for: "the device to copy gradients or parameters".to_owned(),
            waited_ms: timeout.as_millis() as u64,
        })?;
        called.map_err(|ended| ended.to_string()).flatten().map_err(|cause| Error::Internal {
            cause: format!("values could not be copied from or to the device: {cause}"),
        })
    }
}
