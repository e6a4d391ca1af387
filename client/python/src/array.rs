//! Tensor specifications, and access to the memory of Python's tensors: the only `unsafe` code of
//! this crate.
#![allow(unsafe_code)]

use std::sync::Arc;

use bytes::Bytes;
use pyo3::prelude::*;
use zeroshard_client::{Pane, Slots, Target, TensorData, TensorId, Values};
use zeroshard_model::{self as model, DType, Error, Policy, TensorLayout, TensorSpec as Spec};

use crate::{
    call::Call,
    error::raise,
    mesh::{self, TensorBox},
};

/// Memory of a tensor that belongs to Python.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Array {
    address: usize,
    /// Number of elements.
    numel: usize,
    dtype: DType,
    /// The box of the tensor that the memory holds; `None` for the rank's box according to the
    /// tensor's layout.
    bounds: Option<model::TensorBox>,
    /// Keeps the memory alive.
    owner: Py<PyAny>,
    /// The pane of which it is the memory.
    pane: Option<Arc<Pane>>,
    /// Called before the memory is read: returns when a device has copied the values to it.
    wait: Option<Py<PyAny>>,
    /// Called when a pull has written the values: a device begins to copy them.
    pulled: Option<Py<PyAny>>,
}

#[pymethods]
impl Array {
    #[new]
    #[pyo3(signature = (
        address, numel, dtype, owner, r#box=None, *, pane=None, wait=None, pulled=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        address: usize,
        numel: usize,
        dtype: &str,
        owner: Py<PyAny>,
        r#box: Option<PyRef<'_, TensorBox>>,
        pane: Option<PyRef<'_, crate::pane::Pane>>,
        wait: Option<Py<PyAny>>,
        pulled: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let dtype = parse_dtype("dtype of an array", dtype)?;
        if address == 0 && numel > 0 {
            return Err(raise(Error::refused("a tensor without storage cannot be transferred")));
        }
        let bounds = r#box.map(|bounds| bounds.0.clone());
        let pane = pane.map(|pane| pane.0.clone());
        Ok(Self { address, numel, dtype, bounds, owner, pane, wait, pulled })
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.wait.iter().try_for_each(|wait| wait.call0(py).map(drop))
    }
}

impl Array {
    pub(crate) fn nbytes(&self) -> usize {
        self.numel * self.dtype.size()
    }
}

pub(crate) fn parse_dtype(what: &str, name: &str) -> PyResult<DType> {
    let found = DType::ALL.into_iter().find(|dtype| dtype.to_string() == name);
    found.ok_or_else(|| raise(Error::invalid(what, format!("{name:?}"), "f32, bf16 or f16")))
}

/// The memory of an [`Array`] during a transfer, with a reference to its owner.
pub(crate) struct Lent {
    address: usize,
    bytes: usize,
    dtype: DType,
    pane: Option<Arc<Pane>>,
    _owner: Py<PyAny>,
}

impl Lent {
    /// Waits for a copy to the memory.
    pub(crate) fn new(py: Python<'_>, array: &Array) -> PyResult<Self> {
        array.wait(py)?;
        Ok(Self::before_copy(py, array))
    }

    /// The memory, which has its values when the copy to it is complete.
    fn before_copy(py: Python<'_>, array: &Array) -> Self {
        let Array { address, dtype, owner, pane, .. } = array;
        Self {
            address: *address,
            bytes: array.nbytes(),
            dtype: *dtype,
            pane: pane.clone(),
            _owner: owner.clone_ref(py),
        }
    }

    /// The memory, for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self.bytes {
            0 => &mut [],
            // SAFETY: the creator of an `Array` guarantees that `address` points to `bytes` bytes
            // which `owner` keeps alive, and that nothing else accesses them until the transfer
            // ends. Python code that reads the tensor meanwhile sees old or partially written
            // numbers, and every bit pattern is a valid number.
            bytes => unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, bytes) },
        }
    }

    /// The number of the last change, if the memory has exactly what a server shows in it.
    pub(crate) fn unchanged_since(&self) -> Option<u64> {
        self.pane.as_ref()?.unchanged_since().ok()?
    }

    /// The number of the last change, if the memory has exactly what a server has shown in it,
    /// which has this hash.
    pub(crate) fn unchanged_with(&self, hash: u64) -> Option<u64> {
        let (number, before) = self.pane.as_ref()?.remembered()?;
        (hash == before).then_some(number)
    }

    /// The memory as slots for values.
    pub(crate) fn slots(&mut self) -> Result<Slots<'_>, Error> {
        let (dtype, pane) = (self.dtype, self.pane.clone());
        let slots = Slots::new(self.bytes_mut(), dtype)?;
        match pane {
            Some(pane) => slots.in_pane(pane),
            None => Ok(slots),
        }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        match self.bytes {
            0 => &[],
            // SAFETY: as above.
            bytes => unsafe { std::slice::from_raw_parts(self.address as *const u8, bytes) },
        }
    }
}

/// Tensors, as indices in the manifest, and their memory.
pub(crate) type Arrays<'py> = Vec<(usize, PyRef<'py, Array>)>;

/// The values of the arrays for a push, without a copy. Waits for copies to their memory.
pub(crate) fn tensor_data(py: Python<'_>, arrays: &Arrays<'_>) -> PyResult<Vec<TensorData>> {
    arrays.iter().map(|(tensor, array)| data_of(*tensor, array, Lent::new(py, array)?)).collect()
}

/// The values of an array for a push, and the copy that must be complete before they are read.
pub(crate) fn pending_data(
    py: Python<'_>,
    tensor: usize,
    array: &Array,
) -> PyResult<(TensorData, Option<Call>)> {
    let copy = array.wait.as_ref().map(|wait| Call::new(wait.clone_ref(py)));
    Ok((data_of(tensor, array, Lent::before_copy(py, array))?, copy))
}

fn data_of(tensor: usize, array: &Array, lent: Lent) -> PyResult<TensorData> {
    let values = Values::new(Bytes::from_owner(lent), array.dtype).map_err(raise)?;
    Ok(TensorData::new(TensorId::new(tensor), values))
}

/// The memory that a pull writes to.
pub(crate) struct Targets(Vec<(usize, Option<model::TensorBox>, Lent)>);

impl Targets {
    pub(crate) fn new(py: Python<'_>, arrays: &Arrays<'_>) -> Self {
        let target = |(tensor, array): &(usize, PyRef<'_, Array>)| {
            (*tensor, array.bounds.clone(), Lent::before_copy(py, array))
        };
        Self(arrays.iter().map(target).collect())
    }

    pub(crate) fn targets(&mut self) -> Result<Vec<Target<'_>>, Error> {
        self.0
            .iter_mut()
            .map(|(tensor, bounds, lent)| {
                Ok(Target {
                    tensor: TensorId::new(*tensor),
                    bounds: bounds.clone(),
                    data: lent.slots()?,
                })
            })
            .collect()
    }
}

/// The calls that follow a pull into these arrays.
pub(crate) fn calls_after_pull(py: Python<'_>, arrays: &Arrays<'_>) -> Vec<Call> {
    let calls = arrays.iter().filter_map(|(_, array)| array.pulled.as_ref());
    calls.map(|call| Call::new(call.clone_ref(py))).collect()
}

/// One tensor of a job's manifest.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct TensorSpec(pub(crate) Spec);

#[pymethods]
impl TensorSpec {
    #[new]
    #[pyo3(signature = (
        name, shape, dtype="f32", *, frozen=false, buffer=false, group=0, whole=false,
        no_clip=false, layout=None, replaced_by=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        name: String,
        shape: Vec<u64>,
        dtype: &str,
        frozen: bool,
        buffer: bool,
        group: u32,
        whole: bool,
        no_clip: bool,
        layout: Option<(u32, Vec<String>)>,
        replaced_by: Option<u32>,
    ) -> PyResult<Self> {
        let dtype = parse_dtype(&format!("dtype of tensor {name:?}"), dtype)?;
        let policy = if whole { Policy::Whole } else { Policy::Elementwise };
        let layout = layout.map(|(mesh, placements)| {
            Ok(TensorLayout { mesh, placements: mesh::placements(&placements)? })
        });
        let layout = layout.transpose().map_err(raise)?;
        Ok(Self(Spec {
            dtype,
            frozen,
            buffer,
            group,
            policy,
            no_clip,
            layout,
            replaced_by,
            ..Spec::new(name, shape)
        }))
    }
}
