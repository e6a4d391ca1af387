//! Transfers and waits that run in the background.

use pyo3::prelude::*;
use tokio::task::JoinHandle;
use zeroshard_client::{Rested, Result};
use zeroshard_model::Error;

use crate::{
    error::raise,
    runtime::{join, runtime},
};

/// A running transfer. It is cancelled when it is dropped.
#[pyclass(module = "zeroshard._native")]
pub(crate) struct Transfer {
    task: Option<JoinHandle<Result<()>>>,
}

impl Transfer {
    pub(crate) fn new(task: JoinHandle<Result<()>>) -> Self {
        Self { task: Some(task) }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.task.iter().for_each(JoinHandle::abort);
    }
}

#[pymethods]
impl Transfer {
    fn done(&self) -> bool {
        self.task.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub(crate) fn wait(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(task) = &mut self.task else { return Ok(()) };
        let ended = join(py, task)?;
        self.task = None;
        ended.map_err(raise)
    }

    /// Returns when the memory is no longer written to, whether or not the transfer was complete.
    fn cancel(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(task) = self.task.take() else { return Ok(()) };
        task.abort();
        let runtime = runtime().map_err(raise)?;
        let _ = py.detach(|| runtime.block_on(task));
        Ok(())
    }
}

/// A rest that is waited for. It is given up when this object is dropped.
#[pyclass(module = "zeroshard._native")]
pub(crate) struct Rest {
    /// `None` after its end.
    task: Option<JoinHandle<Result<Rested>>>,
}

impl Rest {
    pub(crate) fn new(task: JoinHandle<Result<Rested>>) -> Self {
        Self { task: Some(task) }
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        self.task.iter().for_each(JoinHandle::abort);
    }
}

#[pymethods]
impl Rest {
    fn wait(&mut self, py: Python<'_>) -> PyResult<(u64, u32)> {
        let Some(task) = &mut self.task else {
            return Err(raise(Error::refused("the rest has already been waited for")));
        };
        let ended = join(py, task)?;
        self.task = None;
        let Rested { step, last } = ended.map_err(raise)?;
        Ok((step, last))
    }
}
