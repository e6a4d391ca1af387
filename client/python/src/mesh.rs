//! Meshes, and what a rank of one has of a tensor.

use std::sync::Arc;

use pyo3::prelude::*;
use zeroshard_client::Result;
use zeroshard_proto::{DimPlacement, Error, Layout, ProcessMesh, Reduction, TensorBox};

use crate::error::raise;

/// Ranks in an array with named dimensions.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Mesh(pub(crate) Arc<ProcessMesh>);

/// First index and number of indices along each dimension.
pub(crate) type Area = (Vec<u64>, Vec<u64>);

pub(crate) fn area((offset, size): Area) -> TensorBox {
    TensorBox { offset, size }
}

/// Placements as Python writes them: `shard:0`, `replicate`, `sum`, `avg`, `max`.
pub(crate) fn placements(names: &[String]) -> Result<Vec<DimPlacement>> {
    let placement = |name: &String| match name.as_str() {
        "replicate" => Ok(DimPlacement::Replicate),
        "sum" => Ok(DimPlacement::Partial(Reduction::Sum)),
        "avg" => Ok(DimPlacement::Partial(Reduction::Avg)),
        "max" => Ok(DimPlacement::Partial(Reduction::Max)),
        other => {
            let dim = other.strip_prefix("shard:").and_then(|dim| dim.parse().ok());
            dim.map(DimPlacement::Shard).ok_or_else(|| {
                let expected = "shard: and a dimension, replicate, sum, avg or max";
                Error::invalid("placement", format!("{other:?}"), expected)
            })
        }
    };
    names.iter().map(placement).collect()
}

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

    fn group(&self, rank: u32, dim: usize) -> Option<Vec<u32>> {
        self.0.group(rank, dim)
    }

    fn describe(&self, rank: u32) -> String {
        self.0.describe(rank)
    }

    fn local_box(
        &self,
        shape: Vec<u64>,
        placements: Vec<String>,
        rank: u32,
    ) -> PyResult<Option<Area>> {
        let layout =
            self::placements(&placements).and_then(|p| Layout::new(Arc::clone(&self.0), p));
        let layout = layout.map_err(raise)?;
        layout.check(&shape, "").map_err(raise)?;
        Ok(layout.local_box(&shape, rank).map(|area| (area.offset, area.size)))
    }
}
