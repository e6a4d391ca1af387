//! Checks of the tensors in a call.

use zeroshard_model::{Error, Manifest, Result, StridedBox, TensorId, local::LocalTensor};

/// The part of a tensor that the rank holds.
///
/// # Errors
/// [`Error::Invalid`] for an unknown tensor.
pub(crate) fn local<'a>(
    what: &str,
    manifest: &Manifest,
    locals: &'a [LocalTensor],
    tensor: TensorId,
) -> Result<&'a LocalTensor> {
    locals.get(tensor.index()).ok_or_else(|| {
        let expected = format!("less than the number of tensors, {}", manifest.tensors().len());
        Error::invalid(format!("index of the {what} tensor"), tensor.index(), expected)
    })
}

/// Checks that `of`, a box of the tensor, has `numel` elements.
///
/// # Errors
/// [`Error::Refused`].
pub(crate) fn check_size(
    what: &str,
    manifest: &Manifest,
    tensor: usize,
    of: &StridedBox,
    numel: usize,
) -> Result<()> {
    if of.numel() == numel {
        return Ok(());
    }
    let (spec, bounds) = (&manifest.tensors()[tensor], of.bounds());
    let part = match of.is_whole() {
        true => String::new(),
        false => format!("the box at offset {:?} with size {:?} of ", bounds.offset, bounds.size),
    };
    Err(Error::refused(format!(
        "the {what} tensor {:?} has {numel} elements instead of {}, for {part}the shape {:?}",
        spec.name,
        of.numel(),
        spec.shape
    )))
}

/// Checks that a tensor is not tied to another.
///
/// # Errors
/// [`Error::Refused`].
pub(crate) fn check_owner(manifest: &Manifest, tensor: usize) -> Result<()> {
    if manifest.owner(tensor) == tensor {
        return Ok(());
    }
    let owner = &manifest.tensors()[manifest.owner(tensor)].name;
    let name = &manifest.tensors()[tensor].name;
    let sentence = format!("tensor {name:?} is tied to {owner:?}; add its data to the other's");
    Err(Error::refused(sentence))
}
