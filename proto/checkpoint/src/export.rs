//! Exports the model of a checkpoint to files that Hugging Face tools read.

use std::path::Path;

use zeroshard_model::{JobSpec, Result, average};

use crate::{
    Manifest, Storage,
    model_files::{ModelLayout, NewModel},
};

/// The size of the tensors that [`Storage::export`] writes, in bytes.
pub fn exported_bytes(spec: &JobSpec) -> u64 {
    layout(spec, u64::MAX).bytes()
}

/// How a model is exported.
#[derive(Debug, Clone)]
pub struct Export<'a> {
    /// The directory, which must not exist.
    pub directory: &'a Path,
    /// The size at which a file ends, in bytes.
    pub file_bytes: u64,
    /// The running average that is written instead of the parameters that train, if any.
    pub average: Option<&'a str>,
}

impl Storage {
    /// Writes the model of a checkpoint to a directory: each tensor in its own dtype, as the
    /// servers publish it. Tied tensors are left out, as in the files of Hugging Face. Memory is
    /// bounded by the largest slice. `progress` receives the bytes that were written since its
    /// last call.
    ///
    /// # Errors
    /// [`Error::Storage`](zeroshard_model::Error::Storage) if the directory exists or cannot be
    /// written, and those of [`Storage::read_slice`];
    /// [`Error::Invalid`](zeroshard_model::Error::Invalid) for an average that the job does not
    /// have. Nothing is left at the place of the directory.
    pub async fn export(
        &self,
        manifest: &Manifest,
        export: &Export<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        let spec = manifest.spec();
        export.average.map_or(Ok(()), |name| spec.average(name).map(drop))?;
        let layout = layout(spec, export.file_bytes);
        let mut model = NewModel::create(export.directory, &layout, &[("format", "pt")])?;
        for (tensor, of) in spec.manifest.tensors().iter().enumerate() {
            if of.alias_of.is_some() {
                continue;
            }
            let state = export.average.map(average::values_of);
            let state = state.and_then(|name| spec.state_position(tensor, &name));
            for slice in spec.manifest.slices_of(tensor) {
                let saved = self.read_slice(manifest, slice as u32).await?;
                let values = state.map_or(&saved.values, |position| &saved.state[position]);
                let bytes = match spec.manifest.trains(slice) {
                    true => model.write_rounded(values, of.dtype)?,
                    false => model.write(values).map(|()| values.len())?,
                };
                progress(bytes as u64);
            }
        }
        model.finish()
    }
}

/// Returns the files of all tensors that own their storage.
fn layout(spec: &JobSpec, file_bytes: u64) -> ModelLayout {
    let own = spec.manifest.tensors().iter().filter(|tensor| tensor.alias_of.is_none());
    ModelLayout::new(own.map(|tensor| (tensor, tensor.dtype)), file_bytes)
}
