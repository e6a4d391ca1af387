//! Layouts and boxes of tensors in messages.

use std::{collections::HashMap, sync::Arc};

use zeroshard_model::{
    DimPlacement, Error, Manifest, Reduction, Result, StridedBox, TensorBox, TensorLayout,
    limits::MAX_MESH_DIMS,
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

/// The boxes of a request, by the tensor that owns the storage.
pub type Boxes = HashMap<usize, Arc<StridedBox>>;

/// Converts the boxes of a request, at most one for each tensor.
///
/// # Errors
/// [`Error::Invalid`] for an unknown tensor, and for a box outside of its tensor;
/// [`Error::Refused`] for several boxes of one tensor.
pub fn boxes(manifest: &Manifest, messages: &[pb::Box]) -> Result<Boxes> {
    let tensors = manifest.tensors();
    let mut boxes = Boxes::with_capacity(messages.len());
    for message in messages {
        let index = message.tensor as usize;
        let Some(tensor) = tensors.get(index) else {
            let expected = format!("less than the job's number of tensors, {}", tensors.len());
            return Err(Error::invalid("tensor of a box", index, expected));
        };
        let bounds = TensorBox::from(message);
        bounds.check(&tensor.shape, &tensor.name)?;
        // Tied tensors have one storage, and the same shape.
        let owner = manifest.owner(index);
        if boxes.insert(owner, Arc::new(StridedBox::new(&tensor.shape, bounds))).is_some() {
            return Err(Error::refused(format!(
                "the request has more than one box of tensor {:?} and the tensors tied to it",
                tensors[owner].name
            )));
        }
    }
    Ok(boxes)
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
