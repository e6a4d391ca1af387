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
/// [`Error::Invalid`].
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
    let expected = match of.is_whole() {
        true => format!("{} elements, for the shape {:?}", spec.numel(), spec.shape),
        false => format!(
            "{} elements, for the box at offset {:?} with size {:?} of the shape {:?}",
            of.numel(),
            bounds.offset,
            bounds.size,
            spec.shape
        ),
    };
    let what = format!("{what} tensor {:?}", spec.name);
    Err(Error::invalid(what, format!("{numel} elements"), expected))
}

/// Checks that a tensor is not tied to another.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn check_owner(manifest: &Manifest, tensor: usize) -> Result<()> {
    if manifest.owner(tensor) == tensor {
        return Ok(());
    }
    let owner = &manifest.tensors()[manifest.owner(tensor)].name;
    let what = format!("data for tensor {:?}", manifest.tensors()[tensor].name);
    let expected = format!("added to the data for {owner:?}, to which the tensor is tied");
    Err(Error::invalid(what, "pushed separately", expected))
}
