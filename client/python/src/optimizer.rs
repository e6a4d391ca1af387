//! The optimizers that the servers implement, as the Python package describes them.

use std::collections::HashMap;

use pyo3::prelude::*;
use zeroshard_client::Result;
use zeroshard_model::{self as model, optimizer::StateShape};
use zeroshard_proto::pb;

use crate::error::raise;

/// A parameter group: the optimizer's name, and its hyperparameters.
pub(crate) type Group = (String, HashMap<String, f64>);

pub(crate) fn optimizer((name, hyperparameters): Group) -> Result<model::Optimizer> {
    model::Optimizer::try_from(pb::Optimizer { name, hyperparameters })
}

pub(crate) fn optimizers(groups: Vec<Group>) -> PyResult<Vec<model::Optimizer>> {
    groups.into_iter().map(optimizer).collect::<Result<_>>().map_err(raise)
}

/// An optimizer with its hyperparameters.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Optimizer(model::Optimizer);

#[pymethods]
impl Optimizer {
    #[new]
    #[pyo3(signature = (name, hyperparameters=None))]
    fn new(name: String, hyperparameters: Option<HashMap<String, f64>>) -> PyResult<Self> {
        optimizer((name, hyperparameters.unwrap_or_default())).map(Self).map_err(raise)
    }

    #[getter]
    fn hyperparameters(&self) -> HashMap<String, f64> {
        pb::Optimizer::from(&self.0).hyperparameters
    }

    #[getter]
    fn state(&self) -> &'static [&'static str] {
        self.0.state()
    }

    fn state_of(&self, shape: Vec<u64>) -> Vec<&'static str> {
        let shapes = self.0.state_shapes(&shape);
        let state = self.0.state().iter().zip(shapes);
        state.filter(|(_, of)| *of != StateShape::Absent).map(|(name, _)| *name).collect()
    }

    #[getter]
    fn scalar_state(&self) -> &'static [&'static str] {
        self.0.scalar_state()
    }

    #[getter]
    fn needs_whole_tensors(&self) -> bool {
        self.0.needs_whole_tensors()
    }
}
