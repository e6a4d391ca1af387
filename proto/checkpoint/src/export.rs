//! Writes the model of a checkpoint as Hugging Face tools read it: `model.safetensors`, or several
//! files with `model.safetensors.index.json`.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use zeroshard_proto::{DType, Error, JobSpec, Result};

use crate::{
    Manifest, Storage,
    format::{self, Entry},
};

/// How a model is exported.
#[derive(Debug, Clone)]
pub struct Export<'a> {
    /// The directory, which must not exist.
    pub directory: &'a Path,
    /// The size at which a file ends, in bytes.
    pub file_bytes: u64,
}

impl Storage {
    /// Writes the model of a checkpoint to a directory: each tensor in its own dtype, as the servers
    /// publish it. Tied tensors are left out, as in the files of Hugging Face. Memory is bounded by
    /// the largest slice. `progress` receives the bytes that were written since its last call.
    ///
    /// # Errors
    /// [`Error::Storage`] if the directory exists or cannot be written, and those of
    /// [`Storage::read_slice`]. Nothing is left at the place of the directory.
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
        if export.directory.exists() {
            return Err(failed(io::ErrorKind::AlreadyExists.into()));
        }
        let partial = partial(export.directory);
        fs::create_dir_all(&partial).map_err(failed)?;
        let written = async {
            let files = split(manifest.spec(), export.file_bytes);
            for (number, tensors) in files.iter().enumerate() {
                let path = partial.join(name(number, files.len()));
                self.write_file(manifest, tensors, &path, &mut progress).await?;
            }
            write_index(manifest.spec(), &files, &partial)?;
            fs::rename(&partial, export.directory).map_err(failed)
        };
        let written = written.await;
        if written.is_err() {
            // The error that matters is the first one.
            let _ = fs::remove_dir_all(&partial);
        }
        written
    }

    async fn write_file(
        &self,
        manifest: &Manifest,
        tensors: &[usize],
        path: &Path,
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
        let metadata = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
        file.write_all(&format::header_with(metadata, &entries)).map_err(failed)?;
        for &tensor in tensors {
            for slice in spec.manifest.slices_of(tensor) {
                let saved = self.read_slice(manifest, slice as u32).await?;
                let dtype = spec.manifest.tensors()[tensor].dtype;
                let trains = spec.manifest.trains(slice);
                let bytes = if trains { cast(&saved.values, dtype) } else { saved.values.to_vec() };
                file.write_all(&bytes).map_err(failed)?;
                progress(bytes.len() as u64);
            }
        }
        file.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)
    }
}

/// A directory beside the final one.
fn partial(directory: &Path) -> PathBuf {
    let mut name = directory.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    directory.with_file_name(name)
}

/// The tensors of each file.
fn split(spec: &JobSpec, file_bytes: u64) -> Vec<Vec<usize>> {
    let (mut files, mut bytes) = (vec![Vec::new()], 0);
    let tensors = spec.manifest.tensors().iter().enumerate();
    for (index, _) in tensors.filter(|(_, tensor)| tensor.alias_of.is_none()) {
        let size = entry(spec, index).bytes as u64;
        if bytes > 0 && bytes + size > file_bytes {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
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
    let values = values.chunks_exact(4).map(|bytes| {
        let mut value = [0; 4];
        value.copy_from_slice(bytes);
        f32::from_le_bytes(value)
    });
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::Bf16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
    }
}
