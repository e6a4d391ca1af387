//! Meshes and layouts: how tensors are distributed over the ranks of a job.

use std::{fmt, sync::Arc};

use pyo3::{prelude::*, types::PyTuple};
use zeroshard_client::Result;
use zeroshard_model::{
    self as model, DimPlacement, Error, ProcessMesh, Reduction, geometry::redistribute,
};

use crate::error::raise;

/// Ranks in an n-dimensional array with named dimensions.
#[pyclass(frozen, eq, hash, str, module = "zeroshard._native")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Mesh(pub(crate) Arc<ProcessMesh>);

#[pymethods]
impl Mesh {
    #[new]
    fn new(shape: Vec<usize>, ranks: Vec<u32>, names: Vec<String>) -> PyResult<Self> {
        Ok(Self(Arc::new(ProcessMesh::new(shape, ranks, names).map_err(raise)?)))
    }

    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.0.shape().to_vec()
    }

    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.0.ranks().to_vec()
    }

    #[getter]
    fn names(&self) -> Vec<String> {
        self.0.names().to_vec()
    }

    fn coordinate(&self, rank: u32) -> Option<Vec<usize>> {
        self.0.coordinate(rank)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.0.names().iter().zip(self.0.shape());
        let sizes: Vec<_> = sizes.map(|(name, size)| format!("{name} {size}")).collect();
        write!(f, "({}) of ranks {:?}", sizes.join(", "), self.0.ranks())
    }
}

/// A rectangular part of a tensor.
#[pyclass(frozen, eq, hash, str, name = "Box", module = "zeroshard._native")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct TensorBox(pub(crate) model::TensorBox);

#[pymethods]
impl TensorBox {
    #[new]
    fn new(offset: Vec<u64>, size: Vec<u64>) -> Self {
        Self(model::TensorBox { offset, size })
    }

    #[staticmethod]
    fn whole(shape: Vec<u64>) -> Self {
        Self(model::TensorBox::whole(&shape))
    }

    #[getter]
    fn offset<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.offset)
    }

    #[getter]
    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.size)
    }

    #[getter]
    fn numel(&self) -> u64 {
        self.0.numel()
    }

    /// Programs, which contain boxes, can be pickled.
    fn __getnewargs__(&self) -> (Vec<u64>, Vec<u64>) {
        (self.0.offset.clone(), self.0.size.clone())
    }

    fn __repr__(&self) -> String {
        format!("Box({:?}, {:?})", self.0.offset, self.0.size)
    }
}

impl fmt::Display for TensorBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.0.offset.iter().zip(&self.0.size);
        let ranges: Vec<_> =
            ranges.map(|(first, size)| format!("{first}:{}", first + size)).collect();
        write!(f, "[{}]", ranges.join(", "))
    }
}

/// The distribution of a tensor over a mesh.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Layout(model::Layout);

#[pymethods]
impl Layout {
    #[new]
    fn new(mesh: PyRef<'_, Mesh>, placements: Vec<String>) -> PyResult<Self> {
        let layout = self::placements(&placements)
            .and_then(|placements| model::Layout::new(Arc::clone(&mesh.0), placements));
        layout.map(Self).map_err(raise)
    }

    #[getter]
    fn mesh(&self) -> Mesh {
        Mesh(Arc::clone(self.0.mesh()))
    }

    #[getter]
    fn placements(&self) -> Vec<String> {
        self.0.placements().iter().map(placement_name).collect()
    }

    fn local_box(&self, shape: Vec<u64>, rank: u32) -> PyResult<Option<TensorBox>> {
        self.0.check(&shape, "").map_err(raise)?;
        Ok(self.0.local_box(&shape, rank).map(TensorBox))
    }
}

/// The transfers that redistribute a tensor from one layout to another: sender, receiver and box of
/// each.
#[pyfunction]
pub(crate) fn redistribution(
    shape: Vec<u64>,
    source: PyRef<'_, Layout>,
    target: PyRef<'_, Layout>,
) -> PyResult<Vec<(u32, u32, TensorBox)>> {
    let plan = redistribute::plan(&shape, &source.0, &target.0).map_err(raise)?;
    if !plan.reductions.is_empty() || !plan.zeros.is_empty() {
        let sentence = "a partial tensor cannot move between meshes; reduce it first";
        return Err(raise(Error::refused(sentence)));
    }
    Ok(plan.moves.into_iter().map(|step| (step.from, step.to, TensorBox(step.bounds))).collect())
}

/// Parses placements in the notation of the Python package: `shard:0`, `replicate`, `sum`, `avg`,
/// `max`.
pub(crate) fn placements(names: &[String]) -> Result<Vec<DimPlacement>> {
    let placement = |name: &String| match name.as_str() {
        "replicate" => Ok(DimPlacement::Replicate),
        "sum" => Ok(DimPlacement::Partial(Reduction::Sum)),
        "avg" => Ok(DimPlacement::Partial(Reduction::Avg)),
        "max" => Ok(DimPlacement::Partial(Reduction::Max)),
        other => {
            let dim = other.strip_prefix("shard:").and_then(|dim| dim.parse().ok());
            dim.map(DimPlacement::Shard).ok_or_else(|| {
                let expected = "shard: followed by a dimension, replicate, sum, avg or max";
                Error::invalid("placement", format!("{other:?}"), expected)
            })
        }
    };
    names.iter().map(placement).collect()
}

/// The notation of one placement, which [`placements`] parses.
fn placement_name(placement: &DimPlacement) -> String {
    match placement {
        DimPlacement::Replicate => "replicate".to_owned(),
        DimPlacement::Partial(Reduction::Sum) => "sum".to_owned(),
        DimPlacement::Partial(Reduction::Avg) => "avg".to_owned(),
        DimPlacement::Partial(Reduction::Max) => "max".to_owned(),
        DimPlacement::Shard(dim) => format!("shard:{dim}"),
    }
}
