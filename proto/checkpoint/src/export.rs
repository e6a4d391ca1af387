//! Writes the model of a checkpoint as Hugging Face tools read it: `model.safetensors`, or several
//! files with `model.safetensors.index.json`.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    process,
};

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use zeroshard_model::{DType, Error, JobSpec, Result, average};

use crate::{
    Manifest, Storage,
    format::{self, Entry},
};

/// The size of the tensors that [`Storage::export`] writes, in bytes.
pub fn exported_bytes(spec: &JobSpec) -> u64 {
    let tensors = spec.manifest.tensors().iter().enumerate();
    let own = tensors.filter(|(_, tensor)| tensor.alias_of.is_none());
    own.map(|(index, _)| entry(spec, index).bytes as u64).sum()
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
    /// [`Error::Storage`] if the directory exists or cannot be written, and those of
    /// [`Storage::read_slice`]; [`Error::Invalid`] for an average that the job does not have.
    /// Nothing is left at the place of the directory.
    pub async fn export(
        &self,
        manifest: &Manifest,
        export: &Export<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        let failed = |error: io::Error| Error::Storage {
            action: "write".to_owned(),
            url: export.directory.display().to_string(),
            cause: error.to_string(),
        };
        let spec = manifest.spec();
        export.average.map_or(Ok(()), |name| spec.average(name).map(drop))?;
        if export.directory.exists() {
            return Err(failed(io::ErrorKind::AlreadyExists.into()));
        }
        let partial = Partial::create(export.directory).map_err(failed)?;
        let files = split(spec, export.file_bytes);
        for (number, tensors) in files.iter().enumerate() {
            let path = partial.0.join(name(number, files.len()));
            let written = self.write_file(manifest, tensors, &path, export.average, &mut progress);
            written.await?;
        }
        write_index(spec, &files, &partial.0)?;
        fs::rename(&partial.0, export.directory).map_err(failed)
    }

    async fn write_file(
        &self,
        manifest: &Manifest,
        tensors: &[usize],
        path: &Path,
        average: Option<&str>,
        progress: &mut impl FnMut(u64),
    ) -> Result<()> {
        let failed = |error: io::Error| Error::Storage {
            action: "write".to_owned(),
            url: path.display().to_string(),
            cause: error.to_string(),
        };
        let spec = manifest.spec();
        let mut file = BufWriter::new(File::create(path).map_err(failed)?);
        let entries: Vec<Entry> = tensors.iter().map(|&tensor| entry(spec, tensor)).collect();
        let header = format::header_with(&[("format", "pt")], &entries);
        file.write_all(&header).map_err(failed)?;
        for &tensor in tensors {
            let state = average.map(average::values_of);
            let state = state.and_then(|name| spec.state_position(tensor, &name));
            for slice in spec.manifest.slices_of(tensor) {
                let saved = self.read_slice(manifest, slice as u32).await?;
                let dtype = spec.manifest.tensors()[tensor].dtype;
                let trains = spec.manifest.trains(slice);
                let values = state.map_or(&saved.values, |position| &saved.state[position]);
                let bytes = if trains { cast(values, dtype) } else { values.to_vec() };
                file.write_all(&bytes).map_err(failed)?;
                progress(bytes.len() as u64);
            }
        }
        file.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)
    }
}

/// A directory beside the final one, which is removed unless it is renamed.
struct Partial(PathBuf);

impl Partial {
    /// Creates the directory, with a name that no other process uses: files of an earlier export
    /// that was killed must not become a part of this one.
    fn create(directory: &Path) -> io::Result<Self> {
        let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
        parent.map_or(Ok(()), fs::create_dir_all)?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let partial = |number| format!(".{name}.{}-{number}.partial", process::id());
        let mut paths = (0..u32::MAX).map(|number| directory.with_file_name(partial(number)));
        paths
            .find_map(|path| match fs::create_dir(&path) {
                Ok(()) => Some(Ok(Self(path))),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                Err(error) => Some(Err(error)),
            })
            .unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After the export the directory has another name.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The tensors of each file.
fn split(spec: &JobSpec, file_bytes: u64) -> Vec<Vec<usize>> {
    let (mut files, mut bytes, mut header) = (vec![Vec::new()], 0u64, 0);
    let tensors = spec.manifest.tensors().iter().enumerate();
    for (index, _) in tensors.filter(|(_, tensor)| tensor.alias_of.is_none()) {
        let entry = entry(spec, index);
        let size = entry.bytes as u64;
        let is_full = bytes > 0 && bytes.saturating_add(size) > file_bytes;
        if is_full || header >= format::HEADER_BYTES {
            files.push(Vec::new());
            (bytes, header) = (0, 0);
        }
        bytes += size;
        header += format::header_bytes(&entry);
        if let Some(file) = files.last_mut() {
            file.push(index);
        }
    }
    files
}

fn entry(spec: &JobSpec, tensor: usize) -> Entry {
    let tensor = &spec.manifest.tensors()[tensor];
    Entry {
        key: tensor.name.clone(),
        dtype: format::name(tensor.dtype),
        shape: tensor.shape.clone(),
        bytes: tensor.numel() as usize * tensor.dtype.size(),
    }
}

fn name(number: usize, files: usize) -> String {
    match files {
        1 => "model.safetensors".to_owned(),
        files => format!("model-{:05}-of-{files:05}.safetensors", number + 1),
    }
}

/// Writes the index of several files.
fn write_index(spec: &JobSpec, files: &[Vec<usize>], directory: &Path) -> Result<()> {
    if files.len() == 1 {
        return Ok(());
    }
    let mut places = Map::new();
    let mut total = 0;
    for (number, tensors) in files.iter().enumerate() {
        for &tensor in tensors {
            let Entry { key, bytes, .. } = entry(spec, tensor);
            places.insert(key, Value::from(name(number, files.len())));
            total += bytes;
        }
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": places});
    let path = directory.join("model.safetensors.index.json");
    fs::write(&path, format!("{index:#}\n")).map_err(|error| Error::Storage {
        action: "write".to_owned(),
        url: path.display().to_string(),
        cause: error.to_string(),
    })
}

/// Rounds f32 values to a dtype, to nearest even.
fn cast(values: &[u8], dtype: DType) -> Vec<u8> {
    let (values, _) = values.as_chunks::<4>();
    match dtype {
        DType::F32 => values.as_flattened().to_vec(),
        DType::Bf16 => round(values, |value| bf16::from_f32(value).to_le_bytes()),
        DType::F16 => round(values, |value| f16::from_f32(value).to_le_bytes()),
    }
}

fn round(values: &[[u8; 4]], round: impl Fn(f32) -> [u8; 2]) -> Vec<u8> {
    let rounded: Vec<[u8; 2]> =
        values.iter().map(|&value| round(f32::from_le_bytes(value))).collect();
    rounded.into_flattened()
}
