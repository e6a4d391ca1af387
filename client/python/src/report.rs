//! The report of a step.

use pyo3::prelude::*;
use zeroshard_client::{Absent, StepReport};

/// The result of a step.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Report(pub(crate) StepReport);

#[pymethods]
impl Report {
    #[getter]
    fn version(&self) -> u64 {
        self.0.version
    }

    #[getter]
    fn applied(&self) -> bool {
        self.0.applied
    }

    #[getter]
    fn gradient_norm(&self) -> f64 {
        self.0.gradient_norm
    }

    #[getter]
    fn clip_coefficient(&self) -> f64 {
        self.0.clip_coefficient
    }

    #[getter]
    fn overflow(&self) -> Option<(usize, Option<u32>)> {
        self.0.overflow.map(|overflow| (overflow.tensor.index(), overflow.rank))
    }

    #[getter]
    fn resting(&self) -> Vec<u32> {
        self.0.resting.clone()
    }

    #[getter]
    fn spike(&self) -> Option<&str> {
        self.0.spike.as_deref()
    }

    #[getter]
    fn absent(&self) -> Vec<(usize, u32, bool)> {
        let absent = |absent: &Absent| (absent.tensor.index(), absent.rank, absent.everywhere);
        self.0.absent.iter().map(absent).collect()
    }
}
