//! Removes what a process that was killed has left of the file that it was writing.
//!
//! In a directory these are files with the name of the finished file, `#` and a number, which
//! [`object_store`] does not list. In an object store these are the parts of an upload, which a
//! rule of the bucket removes.

use std::{fs, io, path};

use object_store::path::Path;
use zeroshard_model::Result;

use crate::Storage;

impl Storage {
    /// Removes unfinished files in a directory if the names of the finished files pass the test.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) async fn remove_unfinished(
        &self,
        directory: &Path,
        test: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let Some(local) = self.local() else { return Ok(()) };
        let on_disk = local.path_to_filesystem(directory);
        let on_disk = on_disk.map_err(|error| self.failed("list", directory, &error))?;
        remove(&on_disk, test).map_err(|error| self.io_failed("remove", directory, &error))
    }
}

fn remove(directory: &path::Path, test: impl Fn(&str) -> bool) -> io::Result<()> {
    let found = match fs::read_dir(directory) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for file in found {
        let file = file?;
        let name = file.file_name();
        if finished_name(&name.to_string_lossy()).is_some_and(&test) {
            match fs::remove_file(file.path()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    // It is removed if nothing else is in it.
    let _ = fs::remove_dir(directory);
    Ok(())
}

/// The name that an unfinished file would have got; `None` for other files.
fn finished_name(name: &str) -> Option<&str> {
    let (finished, number) = name.split_once('#')?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(finished)
}
