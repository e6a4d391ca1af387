//! Buckets of gradients, and prefetching of parameters.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use zeroshard_client as client;

use crate::{array::parse_dtype, error::raise};

/// Buckets of gradients, which are sent when all their gradients are ready.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Buckets(Mutex<client::Buckets>);

#[pymethods]
impl Buckets {
    #[new]
    fn new(
        tensors: Vec<(usize, String)>,
        limit_bytes: usize,
        first_limit_bytes: usize,
    ) -> PyResult<Self> {
        let parse =
            |(bytes, name): &(usize, String)| Ok((*bytes, parse_dtype("dtype of a bucket", name)?));
        let tensors = tensors.iter().map(parse).collect::<PyResult<Vec<_>>>()?;
        Ok(Self(Mutex::new(client::Buckets::new(&tensors, limit_bytes, first_limit_bytes))))
    }

    #[getter]
    fn buckets(&self) -> Vec<Vec<usize>> {
        lock(&self.0).buckets().to_vec()
    }

    fn ready(&self, tensor: usize) -> PyResult<Vec<usize>> {
        lock(&self.0).ready(tensor).map_err(raise)
    }

    fn rest(&self) -> Vec<usize> {
        lock(&self.0).rest()
    }

    fn reset(&self) {
        lock(&self.0).reset();
    }
}

/// Prefetching by the order in which units were used in the last pass.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Schedule(Mutex<client::Schedule>);

#[pymethods]
impl Schedule {
    #[new]
    fn new(sizes: Vec<usize>, window: usize) -> Self {
        Self(Mutex::new(client::Schedule::new(sizes, window)))
    }

    #[pyo3(name = "use")]
    fn enter(&self, unit: usize) -> Vec<usize> {
        lock(&self.0).enter(unit)
    }

    fn restart(&self) -> Vec<usize> {
        lock(&self.0).restart()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
