//! Pins: versions that the servers keep for a reader.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use zeroshard_client::{Error, Pinned as Held};

use crate::{
    array::{Arrays, Targets},
    error::raise,
    runtime::wait,
};

/// A version of a job's parameters, which the servers keep until it is released.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Pinned {
    /// `None` after the release.
    held: Mutex<Option<Arc<Held>>>,
    version: u64,
    /// Name, shape, dtype, and whether it is a buffer, of all tensors of the job.
    tensors: Vec<(String, Vec<u64>, String, bool)>,
}

impl Pinned {
    pub(crate) fn new(held: Held) -> Self {
        let tensors = held.spec().manifest.tensors().iter().map(|tensor| {
            let dtype = tensor.dtype.to_string();
            (tensor.name.clone(), tensor.shape.clone(), dtype, tensor.buffer)
        });
        let (version, tensors) = (held.version(), tensors.collect());
        Self { held: Mutex::new(Some(Arc::new(held))), version, tensors }
    }
}

#[pymethods]
impl Pinned {
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    #[getter]
    fn tensors(&self) -> Vec<(String, Vec<u64>, String, bool)> {
        self.tensors.clone()
    }

    fn pull(&self, py: Python<'_>, arrays: Arrays<'_>) -> PyResult<()> {
        let held = self.held.lock().expect("no holder of the lock panics").clone();
        let held = held.ok_or_else(|| {
            let expected = "one that is open; read the tensors before it is closed";
            raise(Error::invalid("pinned version", "closed", expected))
        })?;
        let mut targets = Targets::new(py, &arrays);
        wait(py, async move { held.pull(targets.targets()?).await })
    }

    fn close(&self) {
        self.held.lock().expect("no holder of the lock panics").take();
    }
}
