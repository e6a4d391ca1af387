//! Layouts and boxes of tensors in messages.

use zeroshard_model::{
    DimPlacement, Error, Reduction, Result, TensorBox, TensorLayout, limits::MAX_MESH_DIMS,
};

use crate::pb;

impl From<&TensorLayout> for pb::Layout {
    fn from(layout: &TensorLayout) -> Self {
        use pb::dim_placement::Kind;
        let placements = layout.placements.iter().map(|placement| {
            let (kind, dim) = match *placement {
                DimPlacement::Replicate => (Kind::Replicate, 0),
                DimPlacement::Shard(dim) => (Kind::Shard, dim as u32),
                DimPlacement::Partial(Reduction::Avg) => (Kind::PartialAvg, 0),
                // A job with Max has already been refused.
                DimPlacement::Partial(_) => (Kind::PartialSum, 0),
            };
            pb::DimPlacement { kind: kind.into(), dim }
        });
        Self { mesh: layout.mesh, placements: placements.collect() }
    }
}

impl TryFrom<pb::Layout> for TensorLayout {
    type Error = Error;

    fn try_from(message: pb::Layout) -> Result<Self> {
        use pb::dim_placement::Kind;
        if message.placements.len() > MAX_MESH_DIMS {
            let expected = format!("at most {MAX_MESH_DIMS}");
            return Err(Error::invalid("number of placements", message.placements.len(), expected));
        }
        let placements =
            message.placements.into_iter().map(|placement| match Kind::try_from(placement.kind) {
                Ok(Kind::Replicate) => Ok(DimPlacement::Replicate),
                Ok(Kind::Shard) => Ok(DimPlacement::Shard(placement.dim as usize)),
                Ok(Kind::PartialSum) => Ok(DimPlacement::Partial(Reduction::Sum)),
                Ok(Kind::PartialAvg) => Ok(DimPlacement::Partial(Reduction::Avg)),
                Ok(Kind::Unspecified) | Err(_) => Err(Error::invalid(
                    "kind of a placement",
                    placement.kind,
                    "REPLICATE, SHARD, PARTIAL_SUM or PARTIAL_AVG",
                )),
            });
        Ok(Self { mesh: message.mesh, placements: placements.collect::<Result<_>>()? })
    }
}

/// Converts a box of tensor number `tensor` to a message.
pub fn box_message(of: &TensorBox, tensor: usize) -> pb::Box {
    let dim = |(&offset, &size): (&u64, &u64)| pb::BoxDim { offset, size };
    let dims = of.offset.iter().zip(&of.size).map(dim);
    pb::Box { tensor: tensor as u32, dims: dims.collect() }
}

impl From<&pb::Box> for TensorBox {
    fn from(message: &pb::Box) -> Self {
        let (offset, size) = message.dims.iter().map(|dim| (dim.offset, dim.size)).unzip();
        Self { offset, size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_placements_than_a_mesh_can_have_dimensions_are_refused() {
        let placements = vec![pb::DimPlacement::default(); 100_000];
        let refused = TensorLayout::try_from(pb::Layout { mesh: 0, placements });
        assert!(
            matches!(refused, Err(Error::Invalid { what, .. }) if what == "number of placements")
        );
    }
}
