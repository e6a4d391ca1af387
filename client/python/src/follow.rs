//! Followers: give readers the versions of a job as they appear.

use std::{collections::BTreeMap, sync::Arc};

use pyo3::{prelude::*, types::PyBytes};
use tokio::sync::Mutex;
use zeroshard_client::{self as client, Error};

use crate::{
    array::{Arrays, Lent, Targets},
    runtime::wait,
};

type Shared = Arc<Mutex<client::Follower>>;

/// Follows a job.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Follower {
    follower: Shared,
    /// For each followed tensor its name, its shape or that of its box, the dtype of the reader's
    /// values, and the index of the tensor that owns the storage.
    tensors: Vec<(String, Vec<u64>, String, usize)>,
}

impl Follower {
    pub(crate) fn new(follower: client::Follower) -> PyResult<Self> {
        let owners = follower.tensors();
        let manifest = &follower.spec().manifest;
        let all = manifest.tensors().iter().enumerate();
        let followed = all.filter(|(tensor, _)| owners.contains(&manifest.owner(*tensor)));
        let tensors = followed.map(|(tensor, of)| {
            let (dtype, owner) = (follower.dtype_of(tensor).to_string(), manifest.owner(tensor));
            let shape = follower.bounds(owner).map_or(&of.shape, |bounds| &bounds.size);
            (of.name.clone(), shape.clone(), dtype, owner)
        });
        let tensors = tensors.collect();
        Ok(Self { follower: Arc::new(Mutex::new(follower)), tensors })
    }
}

#[pymethods]
impl Follower {
    #[getter]
    fn tensors(&self) -> Vec<(String, Vec<u64>, String, usize)> {
        self.tensors.clone()
    }

    fn next(&self, py: Python<'_>) -> PyResult<FollowedVersion> {
        let follower = self.follower.clone();
        let version = wait(py, async move { follower.lock().await.next().await })?;
        let facts = Facts::of(&version);
        let version = Arc::new(Mutex::new(version));
        Ok(FollowedVersion { follower: self.follower.clone(), version, facts: facts.into() })
    }

    fn copies(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        let follower = self.follower.clone();
        wait(py, async move {
            let follower = follower.lock().await;
            Ok(follower.copies().iter().map(|(reason, count)| (reason.name(), *count)).collect())
        })
    }
}

/// The properties of a version.
#[derive(Clone)]
struct Facts {
    number: u64,
    line: u64,
    bytes: u64,
    changed_fraction: Option<f64>,
    copied: Option<&'static str>,
}

impl Facts {
    fn of(version: &client::FollowedVersion) -> Self {
        let of = version.version();
        Self {
            number: of.version,
            line: of.line,
            bytes: version.bytes(),
            changed_fraction: version.changed_fraction(),
            copied: version.copied().map(client::Copied::name),
        }
    }
}

/// A version that a follower has received.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct FollowedVersion {
    follower: Shared,
    version: Arc<Mutex<client::FollowedVersion>>,
    facts: std::sync::Mutex<Facts>,
}

impl FollowedVersion {
    fn facts(&self) -> Facts {
        self.facts.lock().expect("no holder of the lock panics").clone()
    }

    fn set(&self, facts: Facts) {
        *self.facts.lock().expect("no holder of the lock panics") = facts;
    }
}

#[pymethods]
impl FollowedVersion {
    #[getter]
    fn number(&self) -> u64 {
        self.facts().number
    }

    #[getter]
    fn line(&self) -> u64 {
        self.facts().line
    }

    #[getter]
    fn bytes(&self) -> u64 {
        self.facts().bytes
    }

    #[getter]
    fn changed_fraction(&self) -> Option<f64> {
        self.facts().changed_fraction
    }

    #[getter]
    fn copied(&self) -> Option<&'static str> {
        self.facts().copied
    }

    fn apply(&self, py: Python<'_>, arrays: Arrays<'_>) -> PyResult<()> {
        let mut targets = Targets::new(py, &arrays);
        let (follower, version) = (self.follower.clone(), self.version.clone());
        let facts = wait(py, async move {
            let (mut follower, mut version) = (follower.lock().await, version.lock().await);
            follower.apply(&mut version, targets.targets()?).await?;
            Ok(Facts::of(&version))
        })?;
        self.set(facts);
        Ok(())
    }

    fn positions<'py>(
        &self,
        py: Python<'py>,
        tensor: usize,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (follower, version) = (self.follower.clone(), self.version.clone());
        let positions = wait(py, async move {
            let (follower, version) = (follower.lock().await, version.lock().await);
            if tensor >= follower.spec().manifest.tensors().len() {
                return Err(Error::refused("the job has no tensor of this number"));
            }
            follower.positions(&version, tensor)
        })?;
        let bytes = |positions: Vec<u64>| -> Vec<u8> {
            positions.into_iter().flat_map(u64::to_le_bytes).collect()
        };
        Ok(positions.map(|positions| PyBytes::new(py, &bytes(positions))))
    }

    fn apply_gathered(&self, py: Python<'_>, arrays: Arrays<'_>) -> PyResult<bool> {
        let lent = |(tensor, array): &(usize, PyRef<'_, _>)| Ok((*tensor, Lent::new(py, array)?));
        let mut lent: Vec<_> = arrays.iter().map(lent).collect::<PyResult<_>>()?;
        let (follower, version) = (self.follower.clone(), self.version.clone());
        let facts = wait(py, async move {
            let (mut follower, mut version) = (follower.lock().await, version.lock().await);
            let values = lent.iter_mut().map(|(tensor, lent)| (*tensor, lent.bytes_mut()));
            let is_equal = follower.apply_gathered(&mut version, &mut values.collect())?;
            Ok(is_equal.then(|| Facts::of(&version)))
        })?;
        let is_equal = facts.is_some();
        facts.into_iter().for_each(|facts| self.set(facts));
        Ok(is_equal)
    }
}
