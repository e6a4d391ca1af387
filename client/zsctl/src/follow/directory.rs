//! The directory of `zsctl follow`: one directory for each version, and a link to the newest one.
//!
//! ```text
//! DIR/follow.json       the job, the dtype and the tensors of all versions
//!     120/              version 120 of this job
//!     118@1/            version 118 on line 1
//!     118-5f…/          version 118 of a later job with the same name, whose id is 5f…
//!     latest -> 118@1
//! ```
//!
//! A reader sees only complete files: everything gets its name by a rename, after it is on the
//! disk, and loses its name before it is removed.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use zeroshard_checkpoint::{cannot_write, is_leftover, remove_model};
use zeroshard_client::{Error, Result};
use zeroshard_model::{DType, LineVersion, line::parse_version};

/// The file that states what all versions of a directory have in common.
const CONTENTS: &str = "follow.json";
/// The link to the newest version.
const LATEST: &str = "latest";
/// The names of files that are not complete.
const PARTIAL_CONTENTS: &str = ".follow.json.partial";
const PARTIAL_LATEST: &str = ".latest.partial";

/// What all versions of a directory have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) job: String,
    pub(super) dtype: DType,
    /// The tensors, by name; `None`: all.
    pub(super) tensors: Option<Vec<String>>,
}

/// A version of a job. Jobs of the same name have different ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) job_id: u64,
    pub(super) version: LineVersion,
}

/// The directory. No other `zsctl follow` writes to it.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    /// The id of the first job whose versions were written here: their names have no id.
    first: u64,
    _lock: File,
}

impl Directory {
    /// Opens a directory for versions of the job with this id. Creates the directory if it is
    /// missing, and removes what an earlier process has not completed.
    ///
    /// # Errors
    /// [`Error::Refused`] if another process writes to the directory, or if it has other versions
    /// or files; [`Error::Storage`].
    pub(super) fn open(path: &Path, contents: &Contents, job_id: u64) -> Result<Self> {
        let failed = cannot_write(path);
        fs::create_dir_all(path).map_err(&failed)?;
        let lock = File::open(path).map_err(&failed)?;
        // Some network file systems have no locks.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::refused(format!(
                "another `zsctl follow` writes to {}; choose another directory, or end that process",
                path.display()
            )));
        }
        let mut directory = Self { path: path.to_owned(), first: job_id, _lock: lock };
        directory.remove_leftovers()?;
        match fs::read(path.join(CONTENTS)) {
            Ok(text) => directory.first = check(path, &text, contents)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                directory.begin(contents)?;
            }
            Err(error) => return Err(failed(error)),
        }
        if let Some(version) = directory.last(job_id)? {
            directory.point_to(Written { job_id, version })?;
        }
        Ok(directory)
    }

    /// States the contents of a new directory.
    fn begin(&self, contents: &Contents) -> Result<()> {
        if let Some(name) = self.names()?.into_iter().find(|name| self.parse(name).is_some()) {
            return Err(Error::refused(format!(
                "{} has {name:?}, which `zsctl follow` has not written; choose another directory",
                self.path.display()
            )));
        }
        let (partial, path) = (self.path.join(PARTIAL_CONTENTS), self.path.join(CONTENTS));
        let Contents { job, dtype, tensors } = contents;
        let contents = json!({
            "job": job, "job_id": format!("{:016x}", self.first), "dtype": dtype.name(),
            "tensors": tensors,
        });
        let write = || {
            fs::write(&partial, format!("{contents:#}\n"))?;
            File::open(&partial)?.sync_all()?;
            fs::rename(&partial, &path)
        };
        write().map_err(cannot_write(&path))
    }

    /// Returns the path of a version.
    pub(super) fn path_of(&self, of: Written) -> PathBuf {
        self.path.join(self.name(of))
    }

    fn name(&self, Written { job_id, version }: Written) -> String {
        match job_id == self.first {
            true => version.to_string(),
            false => format!("{version}-{job_id:016x}"),
        }
    }

    fn parse(&self, name: &str) -> Option<Written> {
        let (version, job_id) = match name.split_once('-') {
            Some((version, id)) => (version, u64::from_str_radix(id, 16).ok()?),
            None => (name, self.first),
        };
        let (version, line) = parse_version(version).ok()?;
        let version = LineVersion { version, line: line.unwrap_or_default() };
        Some(Written { job_id, version }).filter(|&of| self.name(of) == name)
    }

    fn names(&self) -> Result<Vec<String>> {
        let names = || {
            let entries = fs::read_dir(&self.path)?;
            let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
            names.filter_map(Result::transpose).collect::<io::Result<Vec<String>>>()
        };
        names().map_err(cannot_write(&self.path))
    }

    /// Returns the versions, the newest one first. Those of earlier jobs are last.
    fn all(&self, job_id: u64) -> Result<Vec<Written>> {
        let names = self.names()?;
        let mut all: Vec<Written> = names.iter().filter_map(|name| self.parse(name)).collect();
        all.sort_by_key(|of| (of.job_id == job_id, of.version.line, of.version.version));
        all.reverse();
        Ok(all)
    }

    /// Returns the newest version of a job.
    pub(super) fn last(&self, job_id: u64) -> Result<Option<LineVersion>> {
        let newest = self.all(job_id)?.into_iter().next();
        Ok(newest.filter(|newest| newest.job_id == job_id).map(|newest| newest.version))
    }

    /// Makes `latest` lead to a version.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(super) fn point_to(&self, of: Written) -> Result<()> {
        let (partial, latest) = (self.path.join(PARTIAL_LATEST), self.path.join(LATEST));
        let name = self.name(of);
        let replace = || {
            if fs::read_link(&latest).is_ok_and(|to| to == Path::new(&name)) {
                return Ok(());
            }
            symlink(&name, &partial)?;
            fs::rename(&partial, &latest)?;
            File::open(&self.path)?.sync_all()
        };
        replace().map_err(cannot_write(&latest))
    }

    /// Removes all but the newest `keep` versions; 0 keeps all.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(super) fn prune(&self, job_id: u64, keep: usize) -> Result<()> {
        if keep == 0 {
            return Ok(());
        }
        for of in self.all(job_id)?.into_iter().skip(keep) {
            remove_model(&self.path_of(of))?;
        }
        self.remove_leftovers()
    }

    /// Removes what has no final name. A network file system may keep files that a reader has open;
    /// they are removed later.
    fn remove_leftovers(&self) -> Result<()> {
        for name in self.names()?.into_iter().filter(|name| is_leftover(name)) {
            let leftover = self.path.join(name);
            let _ = fs::remove_dir_all(&leftover).or_else(|_| fs::remove_file(&leftover));
        }
        Ok(())
    }
}

/// Checks that a directory has versions of this job, and as these flags describe them. Returns the
/// id of the first job.
fn check(path: &Path, text: &[u8], contents: &Contents) -> Result<u64> {
    let file = path.join(CONTENTS);
    let found: Value = serde_json::from_slice(text).unwrap_or_default();
    let id = found["job_id"].as_str().and_then(|id| u64::from_str_radix(id, 16).ok());
    let Some(id) = id else {
        return Err(Error::refused(format!(
            "{} is not a file of `zsctl follow`; choose another directory",
            file.display()
        )));
    };
    let Contents { job, dtype, tensors } = contents;
    for (key, flag, expected) in [
        ("job", "job", json!(job)),
        ("dtype", "--dtype", json!(dtype.name())),
        ("tensors", "--tensors", json!(tensors)),
    ] {
        if found[key] != expected {
            return Err(Error::refused(format!(
                "{} has versions with another {flag} ({}); use the same, or choose another directory",
                path.display(),
                found[key]
            )));
        }
    }
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = 5;
    const LATER: u64 = 0xab;

    fn contents() -> Contents {
        Contents { job: "train".to_owned(), dtype: DType::Bf16, tensors: None }
    }

    fn of(job_id: u64, version: u64, line: u64) -> Written {
        Written { job_id, version: LineVersion { version, line } }
    }

    fn refused(path: &Path, contents: &Contents) -> String {
        match Directory::open(path, contents, FIRST) {
            Err(Error::Refused { sentence }) => sentence,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn names_are_unique_among_lines_and_jobs() {
        let root = tempfile::tempdir().unwrap();
        let directory = Directory::open(root.path(), &contents(), FIRST).unwrap();
        for (of, name) in [
            (of(FIRST, 120, 0), "120"),
            (of(FIRST, 120, 1), "120@1"),
            (of(LATER, 120, 0), "120-00000000000000ab"),
            (of(LATER, 120, 1), "120@1-00000000000000ab"),
        ] {
            assert_eq!(directory.name(of), name);
            assert_eq!(directory.parse(name), Some(of));
        }
        for other in ["120@0", "0120", "120-ab", "latest", "follow.json", ".120.7-0.partial"] {
            assert_eq!(directory.parse(other), None, "{other}");
        }
    }

    #[test]
    fn the_newest_versions_are_kept_and_earlier_jobs_are_pruned_first() {
        let root = tempfile::tempdir().unwrap();
        let directory = Directory::open(root.path(), &contents(), FIRST).unwrap();
        let all = [
            of(FIRST, 300, 2),
            of(LATER, 9, 0),
            of(LATER, 120, 0),
            of(LATER, 118, 1),
            of(LATER, 119, 1),
        ];
        all.iter().for_each(|&of| fs::create_dir(directory.path_of(of)).unwrap());
        fs::create_dir(root.path().join("mine")).unwrap();
        assert_eq!(directory.last(LATER).unwrap(), Some(all[4].version));
        for (keep, left) in [(0, &all[..]), (4, &all[1..]), (2, &all[3..]), (1, &all[4..])] {
            directory.prune(LATER, keep).unwrap();
            let mut found = directory.all(LATER).unwrap();
            found.reverse();
            assert_eq!(found, left, "{keep}");
        }
        assert!(root.path().join("mine").exists());
    }

    #[test]
    fn a_directory_is_repaired_when_it_is_opened_and_has_one_writer() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("deep/versions");
        let directory = Directory::open(&path, &contents(), FIRST).unwrap();
        assert!(refused(&path, &contents()).contains("another `zsctl follow`"));
        for version in [1, 2] {
            fs::create_dir(directory.path_of(of(FIRST, version, 0))).unwrap();
        }
        directory.point_to(of(FIRST, 1, 0)).unwrap();
        drop(directory);
        fs::create_dir(path.join(".3.77-0.partial")).unwrap();
        symlink("3", path.join(PARTIAL_LATEST)).unwrap();
        let directory = Directory::open(&path, &contents(), FIRST).unwrap();
        assert_eq!(fs::read_link(path.join(LATEST)).unwrap(), Path::new("2"));
        assert_eq!(directory.names().unwrap().len(), 4, "1, 2, latest and follow.json");
        drop(directory);
        let other = Contents { dtype: DType::F32, ..contents() };
        assert!(refused(&path, &other).contains("--dtype (\"bf16\")"));
        fs::write(path.join(CONTENTS), "[]").unwrap();
        assert!(refused(&path, &contents()).contains("is not a file of `zsctl follow`"));
    }
}
