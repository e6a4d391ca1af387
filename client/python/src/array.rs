//! Tensors as Python describes them, and the hand-over of their memory: the only `unsafe` of this
//! crate.
#![allow(unsafe_code)]

use bytes::Bytes;
use pyo3::prelude::*;
use zeroshard_client::{Slots, Target, TensorData, Values};
use zeroshard_proto::{DType, Error, Policy, TensorBox, TensorLayout, TensorSpec as Spec};

use crate::{
    error::raise,
    mesh::{self, Area},
};

/// Memory of a tensor, lent by Python.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Array {
    address: usize,
    /// Of elements.
    numel: usize,
    dtype: DType,
    /// What of its tensor it is; `None`: what the rank has.
    area: Option<TensorBox>,
    /// Keeps the memory where it is.
    owner: Py<PyAny>,
}

#[pymethods]
impl Array {
    #[new]
    #[pyo3(signature = (address, numel, dtype, owner, area=None))]
    fn new(
        address: usize,
        numel: usize,
        dtype: &str,
        owner: Py<PyAny>,
        area: Option<Area>,
    ) -> PyResult<Self> {
        let dtype = parse_dtype("dtype of an array", dtype)?;
        if address == 0 && numel > 0 {
            let expected = "that of the tensor's memory (an empty storage has none)";
            return Err(raise(Error::invalid("address of an array", 0, expected)));
        }
        Ok(Self { address, numel, dtype, area: area.map(mesh::area), owner })
    }

    #[getter]
    fn numel(&self) -> usize {
        self.numel
    }

    #[getter]
    pub(crate) fn nbytes(&self) -> usize {
        self.numel * self.dtype.size()
    }
}

pub(crate) fn parse_dtype(what: &str, name: &str) -> PyResult<DType> {
    let found = DType::ALL.into_iter().find(|dtype| dtype.to_string() == name);
    found.ok_or_else(|| raise(Error::invalid(what, format!("{name:?}"), "f32, bf16 or f16")))
}

/// The memory of an [`Array`], and its owner, on their way through a transfer.
pub(crate) struct Lent {
    address: usize,
    bytes: usize,
    dtype: DType,
    _owner: Py<PyAny>,
}

impl Lent {
    pub(crate) fn new(py: Python<'_>, array: &Array) -> Self {
        let Array { address, dtype, owner, .. } = array;
        Self {
            address: *address,
            bytes: array.nbytes(),
            dtype: *dtype,
            _owner: owner.clone_ref(py),
        }
    }

    /// What to write to.
    fn slots(&mut self) -> Result<Slots<'_>, Error> {
        let bytes = match self.bytes {
            0 => &mut [],
            // SAFETY: whoever makes an `Array` promises that `address` is that of `bytes` bytes
            // which `owner` keeps alive, and that nobody else touches them until the transfer is
            // over. Python code reads a tensor that is being filled at worst as it was or half
            // filled: numbers, whatever they are.
            bytes => unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, bytes) },
        };
        Slots::new(bytes, self.dtype)
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

/// A tensor of the manifest, by position, and its memory.
pub(crate) type Arrays<'py> = Vec<(usize, PyRef<'py, Array>)>;

/// What is to be sent, without a copy.
pub(crate) fn tensor_data(py: Python<'_>, arrays: &Arrays<'_>) -> PyResult<Vec<TensorData>> {
    let data = |(tensor, array): &(usize, PyRef<'_, Array>)| {
        let dtype = array.dtype;
        let data = Values::new(Bytes::from_owner(Lent::new(py, array)), dtype).map_err(raise)?;
        Ok(TensorData { tensor: *tensor, data })
    };
    arrays.iter().map(data).collect()
}

/// What is to be filled.
pub(crate) struct Targets(Vec<(usize, Option<TensorBox>, Lent)>);

impl Targets {
    pub(crate) fn new(py: Python<'_>, arrays: &Arrays<'_>) -> Self {
        let target = |(tensor, array): &(usize, PyRef<'_, Array>)| {
            (*tensor, array.area.clone(), Lent::new(py, array))
        };
        Self(arrays.iter().map(target).collect())
    }

    pub(crate) fn targets(&mut self) -> Result<Vec<Target<'_>>, Error> {
        self.0
            .iter_mut()
            .map(|(tensor, area, lent)| {
                Ok(Target { tensor: *tensor, bounds: area.clone(), data: lent.slots()? })
            })
            .collect()
    }
}

/// One tensor of a job's manifest.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct TensorSpec(pub(crate) Spec);

#[pymethods]
impl TensorSpec {
    #[new]
    #[pyo3(signature = (name, shape, dtype="f32", *, frozen=false, buffer=false, group=0, whole=false, no_clip=false, layout=None))]
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
            ..Spec::new(name, shape)
        }))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }
}
