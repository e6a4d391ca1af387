//! Tensor specifications, and access to the memory of Python's tensors: the only `unsafe` code of
//! this crate.
#![allow(unsafe_code)]

use bytes::Bytes;
use pyo3::prelude::*;
use zeroshard_client::{Slots, Target, TensorData, TensorId, Values};
use zeroshard_proto::{self as proto, DType, Error, Policy, TensorLayout, TensorSpec as Spec};

use crate::{
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
    bounds: Option<proto::TensorBox>,
    /// Keeps the memory alive.
    owner: Py<PyAny>,
}

#[pymethods]
impl Array {
    #[new]
    #[pyo3(signature = (address, numel, dtype, owner, r#box=None))]
    fn new(
        address: usize,
        numel: usize,
        dtype: &str,
        owner: Py<PyAny>,
        r#box: Option<PyRef<'_, TensorBox>>,
    ) -> PyResult<Self> {
        let dtype = parse_dtype("dtype of an array", dtype)?;
        if address == 0 && numel > 0 {
            let expected =
                "the address of the tensor's memory; tensors without storage cannot be transferred";
            return Err(raise(Error::invalid("address of an array", 0, expected)));
        }
        let bounds = r#box.map(|bounds| bounds.0.clone());
        Ok(Self { address, numel, dtype, bounds, owner })
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

    /// The memory as slots for values.
    pub(crate) fn slots(&mut self) -> Result<Slots<'_>, Error> {
        let dtype = self.dtype;
        Slots::new(self.bytes_mut(), dtype)
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

/// The values of the arrays for a push, without a copy.
pub(crate) fn tensor_data(py: Python<'_>, arrays: &Arrays<'_>) -> PyResult<Vec<TensorData>> {
    let data = |(tensor, array): &(usize, PyRef<'_, Array>)| {
        let dtype = array.dtype;
        let data = Values::new(Bytes::from_owner(Lent::new(py, array)), dtype).map_err(raise)?;
        Ok(TensorData::new(TensorId::new(*tensor), data))
    };
    arrays.iter().map(data).collect()
}

/// The memory that a pull writes to.
pub(crate) struct Targets(Vec<(usize, Option<proto::TensorBox>, Lent)>);

impl Targets {
    pub(crate) fn new(py: Python<'_>, arrays: &Arrays<'_>) -> Self {
        let target = |(tensor, array): &(usize, PyRef<'_, Array>)| {
            (*tensor, array.bounds.clone(), Lent::new(py, array))
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

/// One tensor of a job's manifest.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct TensorSpec(pub(crate) Spec);

#[pymethods]
impl TensorSpec {
    #[new]
    #[pyo3(signature = (
        name, shape, dtype="f32", *, frozen=false, buffer=false, group=0, whole=false,
        no_clip=false, layout=None
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
}
