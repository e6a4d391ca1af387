//! Pins: versions that the servers keep for a reader.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use zeroshard_client::{Error, Pinned as Held};
use zeroshard_model::optimizer::StateShape;

use crate::{
    array::{Arrays, Targets},
    error::raise,
    job::{Applied, by_tensor, state_selector},
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

    fn held(&self) -> PyResult<Arc<Held>> {
        let held = self.held.lock().expect("no holder of the lock panics").clone();
        held.ok_or_else(|| {
            raise(Error::refused("the pinned version is closed; read tensors before that"))
        })
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

    #[pyo3(signature = (arrays, *, part=None))]
    fn pull(&self, py: Python<'_>, arrays: Arrays<'_>, part: Option<String>) -> PyResult<()> {
        let held = self.held()?;
        let mut targets = Targets::new(py, &arrays);
        wait(py, async move {
            let targets = targets.targets()?;
            match part {
                None => held.pull(targets).await,
                Some(name) => held.pull_part(state_selector(&name), targets).await,
            }
        })
    }

    fn trains(&self, tensor: usize) -> PyResult<bool> {
        let held = self.held()?;
        let exists = tensor < held.spec().manifest.tensors().len();
        Ok(exists && held.spec().optimizer_of(tensor).is_some())
    }

    fn state_names(&self, tensor: usize) -> PyResult<Vec<&'static str>> {
        let held = self.held()?;
        let spec = held.spec();
        let Some(of) = spec.manifest.tensors().get(tensor) else { return Ok(Vec::new()) };
        let Some(optimizer) = spec.optimizer_of(tensor) else { return Ok(Vec::new()) };
        let state = optimizer.state().iter().zip(optimizer.state_shapes(&of.shape));
        Ok(state.filter(|(_, of)| *of != StateShape::Absent).map(|(name, _)| *name).collect())
    }

    fn applied_steps(&self) -> PyResult<Vec<Applied>> {
        let held = self.held()?;
        Ok(by_tensor(held.spec(), held.applied_steps().map_err(raise)?))
    }

    fn close(&self) {
        self.held.lock().expect("no holder of the lock panics").take();
    }
}
