//! Writes a model as Hugging Face tools read it: a directory with `model.safetensors`, or with
//! several files and `model.safetensors.index.json`.
//!
//! The directory gets its name when all of its files are complete and on the disk. Before, and
//! while it is removed, it has a hidden name that ends with `.partial`.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    mem,
    path::{Path, PathBuf},
    process,
};

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use zeroshard_model::{DType, Error, Result, TensorSpec};

use crate::format::{self, Entry};

/// The tensors of each file of a model.
#[derive(Debug, Clone)]
pub struct ModelLayout {
    /// INVARIANT: there is at least one file.
    files: Vec<Vec<Entry>>,
}

impl ModelLayout {
    /// Distributes tensors over files, in order. A file ends before it exceeds `file_bytes`, unless
    /// it has a single tensor.
    pub fn new<'a>(
        tensors: impl IntoIterator<Item = (&'a TensorSpec, DType)>,
        file_bytes: u64,
    ) -> Self {
        let (mut files, mut bytes, mut header) = (vec![Vec::new()], 0u64, 0);
        for (tensor, dtype) in tensors {
            let entry = Entry {
                key: tensor.name.clone(),
                dtype: format::name(dtype),
                shape: tensor.shape.clone(),
                bytes: tensor.numel() as usize * dtype.size(),
            };
            let size = entry.bytes as u64;
            let is_full = bytes > 0 && bytes.saturating_add(size) > file_bytes;
            if is_full || header >= format::HEADER_BYTES {
                files.push(Vec::new());
                (bytes, header) = (0, 0);
            }
            bytes += size;
            header += format::header_bytes(&entry);
            if let Some(file) = files.last_mut() {
                file.push(entry);
            }
        }
        Self { files }
    }

    /// Returns the size of all tensors in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| size(file)).sum()
    }

    fn name(&self, number: usize) -> String {
        match self.files.len() {
            1 => "model.safetensors".to_owned(),
            files => format!("model-{:05}-of-{files:05}.safetensors", number + 1),
        }
    }

    /// Returns the index of several files.
    fn index(&self) -> Option<Value> {
        let mut places = Map::new();
        for (number, file) in self.files.iter().enumerate() {
            let name = Value::from(self.name(number));
            places.extend(file.iter().map(|entry| (entry.key.clone(), name.clone())));
        }
        let index = json!({"metadata": {"total_size": self.bytes()}, "weight_map": places});
        (self.files.len() > 1).then_some(index)
    }
}

fn size(file: &[Entry]) -> u64 {
    file.iter().map(|entry| entry.bytes as u64).sum()
}

/// A model that is being written. If it is dropped before [`Self::finish`], nothing of it is left.
#[derive(Debug)]
pub struct NewModel<'a> {
    directory: &'a Path,
    layout: &'a ModelLayout,
    metadata: &'a [(&'a str, &'a str)],
    partial: Partial,
    /// The number of files that are begun.
    begun: usize,
    open: NewFile,
}

/// The file that is being written.
#[derive(Debug)]
struct NewFile {
    path: PathBuf,
    file: BufWriter<File>,
    /// The number of bytes that the file still lacks.
    lacks: u64,
}

impl<'a> NewModel<'a> {
    /// Begins a model that gets the name `directory`, which must not exist. Each file has the
    /// metadata in its header.
    ///
    /// # Errors
    /// [`Error::Storage`] if the directory exists, or its parent cannot be written.
    pub fn create(
        directory: &'a Path,
        layout: &'a ModelLayout,
        metadata: &'a [(&'a str, &'a str)],
    ) -> Result<Self> {
        if fs::symlink_metadata(directory).is_ok() {
            return Err(cannot_write(directory)(io::ErrorKind::AlreadyExists.into()));
        }
        let partial = Partial::create(directory).map_err(cannot_write(directory))?;
        let open = NewFile::create(layout, 0, &partial, metadata)?;
        Ok(Self { directory, layout, metadata, partial, begun: 1, open })
    }

    /// Appends values to the tensors of the layout, in their order: little-endian bytes of their
    /// dtypes.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Internal`] for more bytes than the layout has.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.open.lacks == 0 && !self.begin_next()? {
                return Err(internal("a tensor has more values than the layout of its model"));
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.open.lacks as usize));
            self.open.file.write_all(now).map_err(cannot_write(&self.open.path))?;
            self.open.lacks -= now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// Appends f32 values like [`Self::write`], after it has rounded them to a dtype, to nearest
    /// even. Returns how many bytes they take.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn write_rounded(&mut self, values: &[u8], dtype: DType) -> Result<usize> {
        let (floats, _) = values.as_chunks::<4>();
        let rounded = match dtype {
            DType::F32 => return self.write(values).map(|()| values.len()),
            DType::Bf16 => round(floats, |value| bf16::from_f32(value).to_le_bytes()),
            DType::F16 => round(floats, |value| f16::from_f32(value).to_le_bytes()),
        };
        self.write(&rounded).map(|()| rounded.len())
    }

    /// Gives the directory its name, after all files are on the disk.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Internal`] if values are missing.
    pub fn finish(mut self) -> Result<()> {
        while self.open.lacks == 0 && self.begin_next()? {}
        if self.open.lacks > 0 {
            return Err(internal("a tensor has fewer values than the layout of its model"));
        }
        self.open.finish()?;
        if let Some(index) = self.layout.index() {
            let path = self.partial.0.join("model.safetensors.index.json");
            let mut file = File::create(&path).map_err(cannot_write(&path))?;
            writeln!(file, "{index:#}").map_err(cannot_write(&path))?;
            file.sync_all().map_err(cannot_write(&path))?;
        }
        let rename = || {
            File::open(&self.partial.0)?.sync_all()?;
            fs::rename(&self.partial.0, self.directory)?;
            File::open(parent(self.directory))?.sync_all()
        };
        rename().map_err(cannot_write(self.directory))
    }

    /// Ends the open file and begins the next one; `false` if there is none.
    fn begin_next(&mut self) -> Result<bool> {
        if self.begun == self.layout.files.len() {
            return Ok(false);
        }
        let next = NewFile::create(self.layout, self.begun, &self.partial, self.metadata)?;
        mem::replace(&mut self.open, next).finish()?;
        self.begun += 1;
        Ok(true)
    }
}

impl NewFile {
    fn create(
        layout: &ModelLayout,
        number: usize,
        partial: &Partial,
        metadata: &[(&str, &str)],
    ) -> Result<Self> {
        let (path, entries) = (partial.0.join(layout.name(number)), &layout.files[number]);
        let mut file = BufWriter::new(File::create(&path).map_err(cannot_write(&path))?);
        file.write_all(&format::header_with(metadata, entries)).map_err(cannot_write(&path))?;
        Ok(Self { path, file, lacks: size(entries) })
    }

    fn finish(self) -> Result<()> {
        let file =
            self.file.into_inner().map_err(|error| cannot_write(&self.path)(error.into_error()));
        file?.sync_all().map_err(cannot_write(&self.path))
    }
}

/// Removes a directory. It loses its name before its files are removed. If a file cannot be removed
/// now, a [leftover](is_leftover) remains.
///
/// # Errors
/// [`Error::Storage`] if the directory still has its name.
pub fn remove_model(directory: &Path) -> Result<()> {
    let partial = Partial::create(directory).map_err(cannot_write(directory))?;
    fs::rename(directory, &partial.0).map_err(cannot_write(directory))
}

/// Returns whether a file of this name is the leftover of a process that was killed while it wrote
/// or removed a model.
pub fn is_leftover(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".partial")
}

/// A directory beside the final one, which is removed unless it is renamed.
#[derive(Debug)]
struct Partial(PathBuf);

impl Partial {
    /// Creates the directory, with a name that no other process uses: files of an earlier export
    /// that was killed must not become a part of this one.
    fn create(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(parent(directory))?;
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
        // After the end the directory has another name.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn parent(directory: &Path) -> &Path {
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

fn internal(cause: &str) -> Error {
    Error::Internal { cause: cause.to_owned() }
}

/// Returns a function that converts an error of the system, and says what to do.
pub fn cannot_write(path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| {
        let advice = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "; free space there, or choose another directory"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "; choose a directory to which you may write"
            }
            _ => "",
        };
        Error::Storage {
            action: "write".to_owned(),
            url: path.display().to_string(),
            cause: format!("{error}{advice}"),
        }
    }
}

fn round(values: &[[u8; 4]], round: impl Fn(f32) -> [u8; 2]) -> Vec<u8> {
    let rounded: Vec<[u8; 2]> =
        values.iter().map(|&value| round(f32::from_le_bytes(value))).collect();
    rounded.into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn values_are_distributed_over_files_whatever_the_pieces_in_which_they_come() {
        let tensors = [("a", 5), ("none", 0), ("b", 7), ("c", 1), ("end", 0)];
        let tensors = tensors.map(|(name, numel)| TensorSpec::new(name, [numel]));
        let values: Vec<u8> = (0..13 * 4).collect();
        for (file_bytes, files) in [(1 << 20, 1), (40, 2), (30, 3), (1, 4)] {
            let dtypes = tensors.iter().map(|tensor| (tensor, DType::F32));
            let layout = ModelLayout::new(dtypes, file_bytes);
            assert_eq!((layout.bytes(), layout.files.len()), (values.len() as u64, files));
            for pieces in [1, 7, 100] {
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path().join("model");
                let mut new = NewModel::create(&path, &layout, &[("job", "a \"b\"")]).unwrap();
                values.chunks(pieces).for_each(|piece| new.write(piece).unwrap());
                assert!(is_leftover(&names(directory.path())[0]));
                new.finish().unwrap();
                assert_eq!(names(directory.path()), ["model"]);
                let mut found = Vec::new();
                for number in 0..files {
                    let contents = fs::read(path.join(layout.name(number))).unwrap();
                    let (length, rest) = contents.split_at(8);
                    let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
                    let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
                    assert_eq!(header["__metadata__"]["job"], "a \"b\"");
                    found.extend_from_slice(&rest[length..]);
                }
                assert_eq!(found, values);
                assert_eq!(names(&path).len(), files + usize::from(files > 1));
                assert!(NewModel::create(&path, &layout, &[]).is_err(), "it exists");
                remove_model(&path).unwrap();
                assert!(names(directory.path()).is_empty());
            }
        }
    }

    #[test]
    fn a_model_with_too_many_or_too_few_values_gets_no_name() {
        let tensors = [TensorSpec::new("a", [2])];
        let layout = ModelLayout::new(tensors.iter().map(|tensor| (tensor, DType::Bf16)), 100);
        for bytes in [0, 3, 5] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("model");
            let mut new = NewModel::create(&path, &layout, &[]).unwrap();
            let written = new.write(&vec![0; bytes]).and_then(|()| new.finish());
            assert!(matches!(written, Err(Error::Internal { .. })), "{written:?}");
            assert!(names(directory.path()).is_empty());
        }
    }

    #[test]
    fn errors_of_the_system_say_what_to_do() {
        for (kind, advice) in [
            (io::ErrorKind::StorageFull, "free space"),
            (io::ErrorKind::PermissionDenied, "you may write"),
        ] {
            let said = cannot_write(Path::new("model"))(kind.into()).to_string();
            assert!(said.contains("cannot write model") && said.contains(advice), "{said}");
        }
    }
}
