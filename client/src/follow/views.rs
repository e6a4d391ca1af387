//! What a follower has of each tensor.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use zeroshard_model::{DType, Error, Manifest, Result, SliceSpec, StridedBox, View};

use super::Follow;
use crate::pull;

/// The followed tensors that own their storage, by index.
#[derive(Debug)]
pub(super) struct Views(BTreeMap<usize, View>);

impl Views {
    /// # Errors
    /// [`Error::Invalid`] for an unknown tensor, and for a box that does not fit its tensor;
    /// [`Error::Refused`] for boxes of tensors that are not followed, for different boxes of tied
    /// tensors, for boxes without elements, and for boxes of a mirror.
    pub(super) fn new(manifest: &Manifest, follow: &Follow) -> Result<Self> {
        let owners = owners(manifest, follow)?;
        let mut boxes = boxes(manifest, follow, &owners)?;
        let view = |owner: usize| {
            let dtype = dtype_of(manifest, follow.dtype, owner);
            (owner, View::new(dtype, boxes.remove(&owner)))
        };
        let views = Self(owners.into_iter().map(view).collect());
        let is_boxed = views.0.values().any(|view| view.bounds().is_some());
        match &follow.mirror {
            Some(mirror) if is_boxed => Err(Error::refused(format!(
                "mirror {mirror} has whole tensors, and the follower has boxes; follow the boxes \
                 without a mirror"
            ))),
            _ if is_boxed && views.slices(manifest).next().is_none() => Err(Error::refused(
                "the boxes of the follower have no elements; follow at least one element",
            )),
            _ => Ok(views),
        }
    }

    /// The followed tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = usize> {
        self.0.keys().copied()
    }

    /// The box that is followed of a tensor; `None`: the whole tensor.
    pub(super) fn bounds(&self, tensor: usize) -> Option<&StridedBox> {
        self.0.get(&tensor)?.bounds()
    }

    /// The number of elements in the reader's array of a tensor.
    pub(super) fn numel(&self, manifest: &Manifest, tensor: usize) -> usize {
        let whole = || manifest.tensors()[tensor].numel() as usize;
        self.bounds(tensor).map_or_else(whole, StridedBox::numel)
    }

    /// The dtype and the positions of a slice's values in the reader's array of its tensor. `None`
    /// if the reader has none of them.
    pub(super) fn place(&self, slice: &SliceSpec) -> Option<(DType, Range<usize>)> {
        let view = self.0.get(&slice.tensor)?;
        let positions = view.positions(slice);
        (!positions.is_empty()).then_some((view.dtype(), positions))
    }

    /// The slices of which the reader has elements, ascending.
    pub(super) fn slices<'a>(&'a self, manifest: &'a Manifest) -> impl Iterator<Item = u32> + 'a {
        let of = self.tensors().flat_map(|tensor| manifest.slices_of(tensor));
        let is_held = |slice: &usize| self.place(&manifest.slices()[*slice]).is_some();
        of.filter(is_held).map(|slice| slice as u32)
    }
}

/// The dtype of a reader's values of a tensor.
pub(super) fn dtype_of(manifest: &Manifest, dtype: DType, tensor: usize) -> DType {
    pull::wire_of(manifest, dtype.into(), tensor).decoded()
}

/// Returns the followed tensors that own their storage.
fn owners(manifest: &Manifest, follow: &Follow) -> Result<BTreeSet<usize>> {
    match &follow.tensors {
        None => Ok((0..manifest.tensors().len()).map(|tensor| manifest.owner(tensor)).collect()),
        Some(names) => {
            let owner = |name: &String| Ok(manifest.owner(manifest.find(name)?.index()));
            names.iter().map(owner).collect()
        }
    }
}

/// Returns the boxes by the tensor that owns the storage.
fn boxes(
    manifest: &Manifest,
    follow: &Follow,
    owners: &BTreeSet<usize>,
) -> Result<BTreeMap<usize, Arc<StridedBox>>> {
    let mut boxes = BTreeMap::new();
    for (name, bounds) in &follow.boxes {
        let tensor = manifest.find(name)?.index();
        let spec = &manifest.tensors()[tensor];
        bounds.check(&spec.shape, name)?;
        let owner = manifest.owner(tensor);
        if !owners.contains(&owner) {
            return Err(Error::refused(format!(
                "the follower has a box of tensor {name:?}, which it does not follow; add the \
                 tensor to `tensors`"
            )));
        }
        let of = Arc::new(StridedBox::new(&spec.shape, bounds.clone()));
        if boxes.insert(owner, of.clone()).is_some_and(|other| other != of) {
            return Err(Error::refused(format!(
                "tensor {name:?} and a tensor that is tied to it have different boxes; they have \
                 one storage, so give them the same box"
            )));
        }
    }
    Ok(boxes)
}
