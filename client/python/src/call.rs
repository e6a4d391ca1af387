//! Calls from tasks to Python.

use pyo3::prelude::*;
use zeroshard_proto::Error;

/// A function of Python that a task calls.
pub(crate) struct Call(Py<PyAny>);

impl Call {
    pub(crate) fn new(function: Py<PyAny>) -> Self {
        Self(function)
    }

    /// Calls functions, in a thread that may wait.
    ///
    /// # Errors
    /// [`Error::Internal`] if one of them raises an exception, or Python ends.
    pub(crate) async fn all(calls: Vec<Self>) -> Result<(), Error> {
        if calls.is_empty() {
            return Ok(());
        }
        let call = move || {
            Python::try_attach(|py| calls.iter().try_for_each(|call| call.0.call0(py).map(drop)))
                .ok_or_else(|| "the interpreter has ended".to_owned())?
                .map_err(|error| error.to_string())
        };
        let called = tokio::task::spawn_blocking(call).await;
        called.map_err(|ended| ended.to_string()).flatten().map_err(|cause| Error::Internal {
            cause: format!("values could not be copied from or to the device: {cause}"),
        })
    }
}
