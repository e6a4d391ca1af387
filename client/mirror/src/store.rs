//! The values and the changes of the mirrored job, and the task that receives them.

use std::sync::{PoisonError, RwLock as Lock};

use tokio::sync::{RwLock, watch};
use zeroshard_changes::{Mirror, SliceChange};
use zeroshard_client::{Copied, Description, FollowedValues, FollowedVersion, Follower};
use zeroshard_model::{DType, Error, LineVersion, Result, SliceSpec};

/// A version that the mirror has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mirrored {
    /// The version.
    pub version: LineVersion,
    /// The number of bytes received for it.
    pub bytes: u64,
    /// The reason for a full copy.
    pub copied: Option<Copied>,
}

/// What the mirror has.
pub(crate) struct Store {
    known: Lock<Known>,
    /// The arrays. A step writes them at once, so that each slice has one version.
    values: RwLock<Values>,
    /// Changes whenever `known` does.
    changed: watch::Sender<()>,
}

/// The job, and the versions that readers get.
pub(crate) struct Known {
    /// `None` before the first version.
    pub(crate) job: Option<Description>,
    pub(crate) state: Mirror,
}

/// The values of all followed tensors.
#[derive(Default)]
pub(crate) struct Values {
    pub(crate) version: u64,
    values: FollowedValues,
}

impl Values {
    /// The dtype of a tensor's values.
    ///
    /// # Errors
    /// [`Error::Refused`] if the mirror does not follow the tensor.
    pub(crate) fn dtype(&self, tensor: usize) -> Result<DType> {
        Ok(self.tensor(tensor)?.0)
    }

    /// The values of a slice.
    ///
    /// # Errors
    /// Those of [`Self::dtype`]; [`Error::Unavailable`] if the job was created again with other
    /// tensors.
    pub(crate) fn slice(&self, spec: &SliceSpec) -> Result<&[u8]> {
        let (dtype, values) = self.tensor(spec.tensor)?;
        let range = spec.offset * dtype.size()..(spec.offset + spec.numel) * dtype.size();
        let replaced = || Error::Unavailable {
            peer: "the mirror".to_owned(),
            cause: "the job was created again with other tensors".to_owned(),
        };
        values.get(range).ok_or_else(replaced)
    }

    fn tensor(&self, tensor: usize) -> Result<(DType, &[u8])> {
        self.values.get(tensor).ok_or_else(|| {
            Error::refused(format!(
                "the mirror does not follow tensor {tensor} of the job; start it with this tensor"
            ))
        })
    }
}

impl Store {
    pub(crate) fn new(history_bytes: u64) -> Self {
        Self {
            known: Lock::new(Known { job: None, state: Mirror::new(history_bytes) }),
            values: RwLock::default(),
            changed: watch::Sender::default(),
        }
    }

    /// Reads what is known.
    pub(crate) fn known<T>(&self, read: impl FnOnce(&Known) -> T) -> T {
        read(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Becomes ready whenever a version arrives.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Locks the values for reading.
    pub(crate) async fn values(&self) -> tokio::sync::RwLockReadGuard<'_, Values> {
        self.values.read().await
    }

    /// Receives versions until an error.
    pub(crate) async fn follow(
        &self,
        mut follower: Follower,
        mut received: impl FnMut(Mirrored),
    ) -> Result<()> {
        loop {
            let mut version = match follower.next().await {
                // Nobody trains at the moment.
                Err(Error::Timeout { .. }) => continue,
                version => version?,
            };
            // Readers get the changes before the mirror has applied them to its own values.
            self.publish(&follower, &version);
            self.apply(&mut follower, &mut version).await?;
            received(Mirrored {
                version: version.version(),
                bytes: version.bytes(),
                copied: version.copied(),
            });
        }
    }

    /// Shows the changes of a version to readers.
    fn publish(&self, follower: &Follower, version: &FollowedVersion) {
        let (Some(changes), Some(from)) = (version.changes(), follower.version()) else { return };
        let slices = changes.map(|(slice, change, hash)| (slice, SliceChange { change, hash }));
        let (slices, to) = (slices.collect(), version.version().version);
        self.update(|known| known.state.publish([from, to], slices));
    }

    async fn apply(&self, follower: &mut Follower, version: &mut FollowedVersion) -> Result<()> {
        let mut values = self.values.write().await;
        let is_known = |known: &Known| {
            let job = known.job.as_ref();
            job.is_some_and(|job| job.id == follower.description().id)
        };
        if !self.known(is_known) {
            values.values = FollowedValues::new(follower);
        }
        let was_copied = version.copied().is_some();
        match follower.apply(version, values.values.targets()?).await {
            Ok(()) => {}
            // The job was created again meanwhile: its tensors may be others.
            Err(Error::Refused { .. } | Error::Invalid { .. }) if was_copied => {
                self.update(|known| {
                    known.job = None;
                    known.state.lose();
                });
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        values.version = version.version().version;
        if version.copied().is_some() {
            self.update(|known| {
                let job = follower.description().clone();
                known.state.copied((job.id, job.line), values.version);
                known.job = Some(job);
            });
        }
        Ok(())
    }

    fn update(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.known.write().unwrap_or_else(PoisonError::into_inner));
        self.changed.send_replace(());
    }
}
