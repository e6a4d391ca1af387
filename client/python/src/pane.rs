//! Memory of tensors in which a server's values appear without a copy.

use std::sync::{Arc, Mutex, Weak};

use pyo3::prelude::*;
use zeroshard_client as client;
use zeroshard_model::Error;

use crate::error::raise;

/// All panes of this process, also some that do not exist any more.
static ALL: Mutex<Vec<Weak<client::Pane>>> = Mutex::new(Vec::new());

/// A pane: see [`client::Pane`].
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Pane(pub(crate) Arc<client::Pane>);

#[pymethods]
impl Pane {
    #[staticmethod]
    fn reserve(nbytes: usize) -> Option<Self> {
        if nbytes < client::SHARED_FROM {
            return None;
        }
        let pane = client::Pane::new(nbytes).ok()?;
        let mut all = all();
        if all.len() == all.capacity() {
            all.retain(|pane| pane.strong_count() > 0);
        }
        all.push(Arc::downgrade(&pane));
        Some(Self(pane))
    }

    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    #[getter]
    fn shown(&self) -> bool {
        self.0.is_shown()
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| self.0.release());
    }
}

/// Makes the values of all panes memory of this process.
#[pyfunction]
pub(crate) fn own_panes(py: Python<'_>) -> PyResult<()> {
    let panes: Vec<_> = all().iter().filter_map(Weak::upgrade).collect();
    let own = |pane: &Arc<client::Pane>| {
        let hash = |bytes: &[u8]| client::hashes(&[bytes])[0];
        pane.own_all(hash).map_err(|cause| {
            let what = format!("a copy of parameters that a server shows: {cause}");
            raise(Error::OutOfMemory { what, bytes: pane.len() as u64 })
        })
    };
    py.detach(|| panes.iter().try_for_each(own))
}

fn all() -> std::sync::MutexGuard<'static, Vec<Weak<client::Pane>>> {
    ALL.lock().expect("no holder of the lock panics")
}
