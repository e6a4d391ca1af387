//! The place of checkpoints: a directory or an object store.

use std::{
    collections::BTreeSet,
    fmt,
    path::{self, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt, ObjectStoreScheme, PutMode, aws::AmazonS3Builder,
    azure::MicrosoftAzureBuilder, gcp::GoogleCloudStorageBuilder, local::LocalFileSystem,
    path::Path,
};
use percent_encoding::percent_decode_str;
use url::Url;
use zeroshard_model::{Error, JobLine, LineVersion, Result, checkpoint::check_url};

use crate::Manifest;

/// The name of the manifest.
const MANIFEST: &str = "manifest.json";

/// A directory or prefix with checkpoints. Cheap to clone.
#[derive(Clone)]
pub struct Storage {
    store: Arc<dyn ObjectStore>,
    /// The same store, if it is a directory.
    local: Option<Arc<LocalFileSystem>>,
    /// The path of the prefix in the store.
    prefix: Path,
    url: Arc<str>,
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Storage {
    /// Opens the storage at a URL with the scheme `file`, `s3`, `gs` or `az`. Credentials,
    /// endpoints and regions come from the usual environment variables (`AWS_ACCESS_KEY_ID`,
    /// `AWS_ENDPOINT_URL`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, ...).
    ///
    /// Creates a directory that does not exist.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid URL; [`Error::Storage`] for an invalid configuration.
    pub fn open(url: &str) -> Result<Self> {
        check_url(url)?;
        if let Some(directory) = directory_of(url)? {
            std::fs::create_dir_all(directory).map_err(|error| invalid(url, error))?;
        }
        Self::opened(url)
    }

    /// Opens a storage like [`Self::open`]. Returns `None` for a directory that does not exist.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_existing(url: &str) -> Result<Option<Self>> {
        check_url(url)?;
        match directory_of(url)? {
            Some(directory) if !directory.is_dir() => Ok(None),
            _ => Self::opened(url).map(Some),
        }
    }

    fn opened(url: &str) -> Result<Self> {
        let shown = url.trim_end_matches('/').into();
        if let Some(directory) = directory_of(url)? {
            let store = Arc::new(local(url, &directory)?);
            let local = Some(store.clone());
            return Ok(Self { store, local, prefix: Path::default(), url: shown });
        }
        let (store, prefix) = remote(url)?;
        Ok(Self { store, local: None, prefix, url: shown })
    }

    /// The URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The jobs with checkpoints, complete or not, in alphabetical order.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn jobs(&self) -> Result<Vec<String>> {
        let names = self.children(&self.prefix).await?;
        let decode = |name: String| percent_decode_str(&name).decode_utf8_lossy().into_owned();
        Ok(names.into_iter().map(decode).collect())
    }

    /// Lists the versions of a job's complete checkpoints, ascending by number and then by line.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn versions(&self, job: &str) -> Result<Vec<LineVersion>> {
        let mut complete = Vec::new();
        for version in self.all_versions(job).await? {
            let manifest = self.path(job, version, MANIFEST);
            match self.store.head(&manifest).await {
                Ok(_) => complete.push(version),
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("read", &manifest, &error)),
            }
        }
        Ok(complete)
    }

    /// The versions of all saves, complete or not, ascending.
    async fn all_versions(&self, job: &str) -> Result<BTreeSet<LineVersion>> {
        let names = self.children(&self.job_directory(job)).await?;
        Ok(names.iter().filter_map(|name| version_of(name)).collect())
    }

    /// The names of the directories in a directory.
    async fn children(&self, directory: &Path) -> Result<Vec<String>> {
        let listed = self.store.list_with_delimiter(Some(directory)).await;
        let listed = listed.map_err(|error| self.failed("list", directory, &error))?;
        let name = |path: &Path| path.filename().map(str::to_owned);
        Ok(listed.common_prefixes.iter().filter_map(name).collect())
    }

    /// The manifest of a checkpoint.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if the version has no complete checkpoint,
    /// [`Error::CheckpointDamaged`], [`Error::Storage`].
    pub async fn manifest(&self, job: &str, version: LineVersion) -> Result<Manifest> {
        let path = self.path(job, version, MANIFEST);
        let text = match self.store.get(&path).await {
            Ok(found) => found.bytes().await,
            Err(error) => Err(error),
        };
        let text = text.map_err(|error| match error {
            object_store::Error::NotFound { .. } => Error::NoCheckpoint {
                url: self.url.to_string(),
                job: job.to_owned(),
                version: format!("version {version}"),
            },
            error => self.failed("read", &path, &error),
        })?;
        let damaged = |cause| Error::CheckpointDamaged { file: self.name(&path), cause };
        let manifest = Manifest::parse(&text).map_err(damaged)?;
        if (manifest.job(), manifest.version()) != (job, version) {
            let (job, version) = (manifest.job(), manifest.version());
            return Err(damaged(format!("it is that of version {version} of job {job:?}")));
        }
        Ok(manifest)
    }

    /// Completes a checkpoint by creating its manifest. Returns `false` if the version has one
    /// already.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn commit(&self, manifest: &Manifest) -> Result<bool> {
        let path = self.path(manifest.job(), manifest.version(), MANIFEST);
        let text = manifest.text()?;
        match self.store.put_opts(&path, text.into(), PutMode::Create.into()).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    /// Removes the files of a save that was given up. A save whose manifest exists is kept.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn discard(&self, job: &str, version: LineVersion, save: u64) -> Result<()> {
        match self.manifest(job, version).await {
            Ok(manifest) if manifest.save() == save => return Ok(()),
            Err(error @ Error::Storage { .. }) => return Err(error),
            _ => {}
        }
        let of_save = prefix_of(save);
        self.remove_files(job, version, |name| name.starts_with(&of_save)).await
    }

    /// Removes a checkpoint: the manifest first, so that an incomplete one is never left.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if nothing of the version exists; [`Error::Storage`].
    pub async fn remove(&self, job: &str, version: LineVersion) -> Result<()> {
        if !self.all_versions(job).await?.contains(&version) {
            return Err(Error::NoCheckpoint {
                url: self.url.to_string(),
                job: job.to_owned(),
                version: format!("version {version}"),
            });
        }
        self.remove_files(job, version, |name| name == MANIFEST).await?;
        self.remove_files(job, version, |_| true).await
    }

    /// Deletes old checkpoints, and keeps the newest `keep` complete ones of a line; 0 keeps all.
    /// Deletes those that the line's job and its ended ancestors have written, those that they have
    /// abandoned and the line has passed, and the leftovers of abandoned saves. Returns the deleted
    /// complete versions.
    ///
    /// # Errors
    /// [`Error::Storage`], also if another job owns the checkpoints; [`Error::CheckpointDamaged`].
    pub async fn prune(&self, job: &str, of: JobLine, keep: u32) -> Result<Vec<LineVersion>> {
        match self.owner(job).await? {
            Some(owner) if owner.of().job_id != of.job_id => {
                return Err(self.owned_by(job, &owner));
            }
            Some(owner) if owner.of() != of => return Ok(Vec::new()), // the job has left the line
            _ => {}
        }
        let complete = self.versions(job).await?;
        let Some(newest) = complete.iter().rev().find(|version| version.line == of.line) else {
            return Ok(Vec::new());
        };
        let removed = match keep {
            0 => Vec::new(),
            keep => self.removable(job, of, keep as usize).await?,
        };
        for version in self.all_versions(job).await? {
            let is_left = version.version < newest.version && !complete.contains(&version);
            if is_left || removed.contains(&version) {
                self.remove(job, version).await?;
            }
        }
        Ok(removed)
    }

    /// Removes the files of a version whose names pass the test.
    async fn remove_files(
        &self,
        job: &str,
        version: LineVersion,
        test: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let directory = self.directory(job, version);
        self.remove_unfinished(&directory, &test).await?;
        let listed: std::result::Result<Vec<ObjectMeta>, _> =
            self.store.list(Some(&directory)).try_collect().await;
        for file in listed.map_err(|error| self.failed("list", &directory, &error))? {
            if file.location.filename().is_some_and(&test) {
                match self.store.delete(&file.location).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(self.failed("remove", &file.location, &error)),
                }
            }
        }
        Ok(())
    }

    pub(crate) fn local(&self) -> Option<&LocalFileSystem> {
        self.local.as_deref()
    }

    pub(crate) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// A range of a file.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`] if the file does not exist or is shorter, [`Error::Storage`].
    pub(crate) async fn read(&self, path: &Path, range: std::ops::Range<u64>) -> Result<Bytes> {
        let length = range.end - range.start;
        let damaged = |cause| Error::CheckpointDamaged { file: self.name(path), cause };
        match self.store.get_range(path, range).await {
            Ok(bytes) if bytes.len() as u64 == length => Ok(bytes),
            Ok(bytes) => {
                Err(damaged(format!("it ends {} bytes early", length - bytes.len() as u64)))
            }
            Err(object_store::Error::NotFound { .. }) => Err(damaged("it is missing".to_owned())),
            Err(error) => match self.store.head(path).await {
                // The range may be outside of the file.
                Ok(found) if found.size < length => {
                    Err(damaged(format!("it has only {} bytes", found.size)))
                }
                _ => Err(self.failed("read", path, &error)),
            },
        }
    }

    pub(crate) fn job_directory(&self, job: &str) -> Path {
        self.prefix.clone().join(job)
    }

    fn directory(&self, job: &str, LineVersion { version, line }: LineVersion) -> Path {
        let line = if line == 0 { String::new() } else { format!("-{line}") };
        self.job_directory(job).join(format!("{version:020}{line}"))
    }

    pub(crate) fn path(&self, job: &str, version: LineVersion, file: &str) -> Path {
        self.directory(job, version).join(file)
    }

    /// The URL of a file, for messages.
    pub(crate) fn name(&self, path: &Path) -> String {
        let relative: Vec<_> = path.prefix_match(&self.prefix).into_iter().flatten().collect();
        let relative: Vec<&str> = relative.iter().map(AsRef::as_ref).collect();
        format!("{}/{}", self.url, relative.join("/"))
    }

    pub(crate) fn io_failed(&self, action: &str, path: &Path, error: &std::io::Error) -> Error {
        let (action, cause) = (action.to_owned(), error.to_string());
        Error::Storage { action, url: self.name(path), cause }
    }

    pub(crate) fn failed(&self, action: &str, path: &Path, error: &object_store::Error) -> Error {
        Error::Storage { action: action.to_owned(), url: self.name(path), cause: root_cause(error) }
    }
}

/// Parses the name of a directory of a version.
fn version_of(directory: &str) -> Option<LineVersion> {
    let (version, line) = match directory.split_once('-') {
        Some((version, line)) => (version, line.parse().ok().filter(|line| *line > 0)?),
        None => (directory, 0),
    };
    Some(LineVersion { version: version.parse().ok()?, line })
}

/// The message of the innermost error.
fn root_cause(error: &object_store::Error) -> String {
    let first: &dyn std::error::Error = error;
    let causes = std::iter::successors(Some(first), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}

/// How the names of the files of a save begin.
pub(crate) fn prefix_of(save: u64) -> String {
    format!("{save:016x}-")
}

fn invalid(url: &str, cause: impl fmt::Display) -> Error {
    Error::Storage { action: "open".to_owned(), url: url.to_owned(), cause: cause.to_string() }
}

/// The directory that a URL names; `None` for a bucket.
fn directory_of(url: &str) -> Result<Option<PathBuf>> {
    let Some(directory) = url.strip_prefix("file://") else { return Ok(None) };
    if !directory.starts_with('/') {
        let expected = "an absolute path after file://, for example file:///checkpoints";
        return Err(Error::invalid("url of the checkpoints", format!("{url:?}"), expected));
    }
    Ok(Some(percent_decode_str(directory).decode_utf8_lossy().into_owned().into()))
}

fn local(url: &str, directory: &path::Path) -> Result<LocalFileSystem> {
    let store = LocalFileSystem::new_with_prefix(directory);
    let store = store.map_err(|error| invalid(url, root_cause(&error)))?;
    Ok(store.with_fsync(true).with_automatic_cleanup(true))
}

fn remote(url: &str) -> Result<(Arc<dyn ObjectStore>, Path)> {
    // The provider of cryptography for TLS. An error means that the process has one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let parsed = Url::parse(url).map_err(|error| invalid(url, error))?;
    let (scheme, prefix) =
        ObjectStoreScheme::parse(&parsed).map_err(|error| invalid(url, error))?;
    let store: object_store::Result<Arc<dyn ObjectStore>> = match scheme {
        ObjectStoreScheme::AmazonS3 => {
            AmazonS3Builder::from_env().with_url(url).build().map(|store| Arc::new(store) as _)
        }
        ObjectStoreScheme::GoogleCloudStorage => GoogleCloudStorageBuilder::from_env()
            .with_url(url)
            .build()
            .map(|store| Arc::new(store) as _),
        ObjectStoreScheme::MicrosoftAzure => MicrosoftAzureBuilder::from_env()
            .with_url(url)
            .build()
            .map(|store| Arc::new(store) as _),
        _ => return Err(invalid(url, "the scheme is not supported")),
    };
    let store = store.map_err(|error| invalid(url, root_cause(&error)))?;
    Ok((store, prefix))
}
