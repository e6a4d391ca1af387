//! When a job is saved, and the data of ranks in checkpoints.

use pyo3::{prelude::*, types::PyBytes};
use zeroshard_checkpoint::Storage;
use zeroshard_model::{self as model, Error, OnLoss, OnMemoryShortage, Restore, RestoreVersion};

use crate::{cluster::seconds, error::raise, runtime::wait};

/// When and where a job is saved, and what happens when a server is lost.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct CheckpointPolicy(pub(crate) model::CheckpointPolicy);

#[pymethods]
impl CheckpointPolicy {
    #[new]
    #[pyo3(signature = (
        url, *, every=None, every_seconds=None, keep=0, on_loss="restore",
        on_memory_shortage="wait"
    ))]
    fn new(
        url: String,
        every: Option<u64>,
        every_seconds: Option<f64>,
        keep: u32,
        on_loss: &str,
        on_memory_shortage: &str,
    ) -> PyResult<Self> {
        let on_loss = match on_loss {
            "restore" => OnLoss::Restore,
            "fail" => OnLoss::Fail,
            other => {
                let expected = "\"restore\" or \"fail\"";
                return Err(raise(Error::invalid("on_loss", format!("{other:?}"), expected)));
            }
        };
        let on_memory_shortage = match on_memory_shortage {
            "wait" => OnMemoryShortage::Wait,
            "give_up" => OnMemoryShortage::GiveUp,
            other => {
                let (what, expected) = ("on_memory_shortage", "\"wait\" or \"give_up\"");
                return Err(raise(Error::invalid(what, format!("{other:?}"), expected)));
            }
        };
        let interval = every_seconds.map(|number| seconds("every_seconds", number)).transpose()?;
        let policy = model::CheckpointPolicy {
            url,
            every_steps: every,
            every: interval,
            keep,
            on_loss,
            on_memory_shortage,
        };
        policy.validate().map_err(raise)?;
        Ok(Self(policy))
    }
}

impl CheckpointPolicy {
    /// The latest checkpoint of job `job`, if there is any.
    pub(crate) fn latest(&self, job: &str) -> Restore {
        let version = RestoreVersion::LatestIfAny;
        Restore { url: self.0.url.clone(), job: job.to_owned(), version, line: None }
    }
}

/// The data that a rank has stored in a checkpoint.
#[pyfunction]
pub(crate) fn user_data<'py>(
    py: Python<'py>,
    url: String,
    job: String,
    version: u64,
    rank: u32,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let data = wait(py, async move {
        let storage = Storage::open(&url)?;
        let owner = storage.owner(&job).await?;
        let manifest = storage.checkpoint(&job, (version, None), owner.as_ref()).await?;
        storage.user_data(&manifest, rank).await
    })?;
    Ok(data.map(|bytes| PyBytes::new(py, &bytes)))
}
