//! A value that is read from files, and read again when the files change. Operators replace tokens
//! and certificates in this way while servers run.

use std::{
    fmt, fs,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use zeroshard_model::Result;

/// The interval at which the files are checked for changes.
const INTERVAL: Duration = Duration::from_secs(5);

/// A value that is read from files.
pub struct Reloaded<T> {
    /// The description of the files in the log.
    what: &'static str,
    files: Vec<PathBuf>,
    load: Box<dyn Fn() -> Result<T> + Send + Sync>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    version: Version,
    checked: Instant,
}

/// The modification time and the size of each file, by which changes are detected.
type Version = Vec<Option<(SystemTime, u64)>>;

impl<T> Reloaded<T> {
    /// Loads the value from files. `what` describes the files in the log.
    ///
    /// # Errors
    /// Those of `load`.
    pub fn open(
        what: &'static str,
        files: Vec<PathBuf>,
        load: impl Fn() -> Result<T> + Send + Sync + 'static,
    ) -> Result<Self> {
        // The version is read first, so that a file that changes during `load` is loaded once more.
        let version = version(&files);
        let state = State { value: Arc::new(load()?), version, checked: Instant::now() };
        Ok(Self { what, files, load: Box::new(load), state: Mutex::new(state) })
    }

    /// The current value. Once every five seconds, one caller checks the files and reloads them if
    /// they have changed; other callers receive the existing value without waiting. If the new
    /// files are invalid, the value does not change.
    pub fn get(&self) -> Arc<T> {
        let mut state = self.lock();
        if state.checked.elapsed() < INTERVAL {
            return state.value.clone();
        }
        state.checked = Instant::now();
        drop(state);
        self.reload();
        self.lock().value.clone()
    }

    /// Loads the value again if the files have changed.
    pub(crate) fn reload(&self) {
        let found = version(&self.files);
        if self.lock().version == found {
            return;
        }
        match (self.load)() {
            Ok(value) => {
                tracing::info!(target: "audit", verb = "reload", subject = self.what, outcome = "ok");
                let mut state = self.lock();
                (state.value, state.version) = (Arc::new(value), found);
            }
            // The load is retried after the interval, because so far only one of two files may have
            // been replaced.
            Err(error) => tracing::warn!(
                target: "audit",
                verb = "reload", subject = self.what, outcome = "failed", %error,
                "the previous content stays in use"
            ),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // The state is consistent after a panic, because each change is a single assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn version(files: &[PathBuf]) -> Version {
    let of = |file: &PathBuf| {
        let found = fs::metadata(file).ok()?;
        Some((found.modified().ok()?, found.len()))
    };
    files.iter().map(of).collect()
}

/// Shows only the names of the files, because the value may be secret.
impl<T> fmt::Debug for Reloaded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloaded").field("files", &self.files).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use zeroshard_model::Error;

    #[test]
    fn changed_files_are_read_again_and_invalid_ones_change_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("number");
        let load = {
            let file = file.clone();
            move || {
                let text = fs::read_to_string(&file).unwrap_or_default();
                text.parse::<u32>().map_err(|_| Error::invalid("number", text, "a number"))
            }
        };
        assert!(Reloaded::open("numbers", vec![file.clone()], load.clone()).is_err());
        fs::write(&file, "1").unwrap();
        let reloaded = Reloaded::open("numbers", vec![file.clone()], load).unwrap();
        let expect = |number| {
            reloaded.reload();
            assert_eq!(*reloaded.get(), number);
        };
        expect(1);
        fs::write(&file, "22").unwrap();
        expect(22);
        fs::write(&file, "none").unwrap();
        expect(22);
        fs::remove_file(&file).unwrap();
        expect(22);
        fs::write(&file, "333").unwrap();
        expect(333);
    }

    #[test]
    fn files_are_checked_again_after_the_interval() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("text");
        fs::write(&file, "a").unwrap();
        let load = {
            let file = file.clone();
            move || Ok(fs::read_to_string(&file).unwrap_or_default())
        };
        let reloaded = Reloaded::open("texts", vec![file.clone()], load).unwrap();
        fs::write(&file, "bb").unwrap();
        assert_eq!(*reloaded.get(), "a");
        reloaded.lock().checked -= INTERVAL;
        assert_eq!(*reloaded.get(), "bb");
    }

    #[test]
    fn other_callers_do_not_wait_while_files_are_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("text");
        fs::write(&file, "a").unwrap();
        let (begun, read) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let load = {
            let (file, begun, read) = (file.clone(), begun.clone(), read.clone());
            move || {
                let text = fs::read_to_string(&file).unwrap();
                if text != "a" {
                    begun.wait();
                    read.wait();
                }
                Ok(text)
            }
        };
        let reloaded = Reloaded::open("texts", vec![file.clone()], load).unwrap();
        fs::write(&file, "bb").unwrap();
        reloaded.lock().checked -= INTERVAL;
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| reloaded.get());
            begun.wait();
            assert_eq!(*reloaded.get(), "a");
            read.wait();
            assert_eq!(*reading.join().unwrap(), "bb");
        });
    }
}
