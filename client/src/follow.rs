//! Followers: readers that receive only what each step of a job has changed.
//!
//! A follower joins with a full copy of one version, which it pins. Afterwards it asks all servers
//! of its slices for the changes since its version. They answer when there is a newer one: the
//! follower lets those that have answered an older version than others complete theirs, and has
//! then one change for each slice, all to the same version. It keeps no copy of the values: changes
//! are applied to the caller's own arrays, after the hashes of all slices have been compared.
//!
//! Whatever does not fit ends with another full copy: another line or another job of the name, a
//! server that does not know the changes, and arrays that somebody else has written to.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::sleep;
use zeroshard_model::{DType, Error, JobSpec, Manifest, Result};
use zeroshard_net::Deadline;

use crate::{
    Cluster, Description, Pin, Pinned, pull,
    retry::{Next, Tries, drops_job},
};
use changes::Since;
pub use version::{Copied, FollowedVersion};

mod apply;
mod changes;
mod version;

/// The longest wait of one call for the next version. The coordinator is then asked again for the
/// servers of the job.
const CALL: Duration = Duration::from_secs(10);

/// The pause before a job is described again whose slices have moved.
const REFRESH: Duration = Duration::from_millis(20);

/// The number of versions after which a follower reads its arrays in full and compares their hash,
/// which finds what somebody else has written to elements that no step has changed since.
const READ_EVERY: u64 = 64;

/// What a reader wants to follow.
#[derive(Debug, Clone)]
pub struct Follow {
    /// The dtype of the reader's parameters. Its buffers are f32.
    pub dtype: DType,
    /// The tensors, by name; `None`: all tensors of the job.
    pub tensors: Option<Vec<String>>,
    /// The longest wait for a version.
    pub wait: Duration,
}

impl Default for Follow {
    fn default() -> Self {
        Self { dtype: DType::F32, tensors: None, wait: Duration::from_secs(600) }
    }
}

/// Follows a job: see [`Cluster::follow`].
#[derive(Debug)]
pub struct Follower {
    cluster: Cluster,
    job: String,
    follow: Follow,
    of: Description,
    /// What the reader's arrays have; `None`: they need a full copy.
    held: Option<Held>,
    /// The last version that [`Self::next`] has returned.
    shown: Option<u64>,
    /// The full copies, by reason.
    copies: BTreeMap<Copied, u64>,
    /// The reason for the next full copy.
    reason: Copied,
}

/// The version that a reader's arrays have.
#[derive(Debug, Clone)]
struct Held {
    version: u64,
    /// The hashes of all slices that are followed.
    hashes: BTreeMap<u32, u64>,
    /// The number of versions since the arrays were read in full.
    unread: u64,
}

impl Cluster {
    /// Follows a job. The reader need not be a member of it.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an unknown tensor; [`Error::Timeout`].
    pub async fn follow(&self, job: &str, follow: Follow) -> Result<Follower> {
        let of = self.describe_job(job).await?;
        owners(&of.spec.manifest, &follow)?;
        let (cluster, job) = (self.clone(), job.to_owned());
        let (copies, reason) = (BTreeMap::new(), Copied::Joined);
        Ok(Follower { cluster, job, follow, of, held: None, shown: None, copies, reason })
    }
}

/// The tensors that are followed: those that own their storage.
fn owners(manifest: &Manifest, follow: &Follow) -> Result<BTreeSet<usize>> {
    match &follow.tensors {
        None => Ok((0..manifest.tensors().len()).map(|tensor| manifest.owner(tensor)).collect()),
        Some(names) => {
            let owner = |name: &String| Ok(manifest.owner(manifest.find(name)?.index()));
            names.iter().map(owner).collect()
        }
    }
}

impl Follower {
    /// The spec of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.of.spec
    }

    /// The dtype of the reader's values of a tensor: [`Follow::dtype`], or f32 for a buffer.
    pub fn dtype_of(&self, tensor: usize) -> DType {
        pull::wire_of(&self.of.spec.manifest, self.follow.dtype.into(), tensor).decoded()
    }

    /// The version that the reader's arrays have; `None` if they need a full copy.
    pub fn version(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.version)
    }

    /// The number of full copies for each reason.
    pub fn copies(&self) -> &BTreeMap<Copied, u64> {
        &self.copies
    }

    /// The tensors that are followed: those that own their storage.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the job, which was created again, does not have one of the names.
    pub fn tensors(&self) -> Result<BTreeSet<usize>> {
        owners(&self.of.spec.manifest, &self.follow)
    }

    /// The slices that are followed.
    fn slices(&self) -> Result<impl Iterator<Item = u32> + use<'_>> {
        let manifest = &self.of.spec.manifest;
        let owners = owners(manifest, &self.follow)?.into_iter();
        Ok(owners.flat_map(|owner| manifest.slices_of(owner)).map(|slice| slice as u32))
    }

    /// Waits for a version after the last one that was returned, and returns the newest one: what
    /// it has changed since the version that the reader's arrays have. Nothing is written to the
    /// arrays before [`Self::apply`].
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::JobFailed`]; [`Error::Timeout`] if there is no newer version
    /// within [`Follow::wait`]; [`Error::OutOfMemory`] if a server has no room for the pin of a
    /// full copy.
    pub async fn next(&mut self) -> Result<FollowedVersion> {
        let deadline = Deadline::after(self.follow.wait);
        let mut tries = Tries::until(deadline);
        loop {
            let Some(Held { version, .. }) = self.held else {
                let reason = self.reason;
                let pinned = self.pinned(deadline).await?;
                self.shown = Some(pinned.version());
                return Ok(FollowedVersion::full(self.of.line, pinned, reason));
            };
            let wait = CALL.min(deadline.left());
            let waiting_for = || format!("a version of job {:?} after {version}", self.job);
            let since = self.changes_since(version, wait);
            let since = tries.limit(waiting_for, since).await?;
            match since {
                Ok(Since::Changed { version: newer, slices }) => {
                    let numel = self.numel()?;
                    self.shown = Some(newer);
                    return Ok(FollowedVersion::changed(
                        self.of.line,
                        (version, newer),
                        slices,
                        numel,
                    ));
                }
                Ok(Since::Unknown) => self.lose(Copied::Behind),
                Ok(Since::Same) if deadline.left().is_zero() => {
                    let waiting_for = format!("a version of job {:?} after {version}", self.job);
                    return Err(deadline.timeout(waiting_for));
                }
                Ok(Since::Same) => self.describe().await?,
                Err(error) => self.after(error, &mut tries).await?,
            }
        }
    }

    /// Waits after an error of a server, and asks the coordinator for the servers of the job.
    ///
    /// # Errors
    /// `error`, if it is final.
    async fn after(&mut self, error: Error, tries: &mut Tries) -> Result<()> {
        let pause = match drops_job(&error) {
            // The coordinator knows whether the job goes on, on other servers.
            true => Some(error),
            false => match error {
                // The job has returned to an earlier version, or was created again.
                error @ (Error::VersionGone { .. } | Error::JobReplaced { .. }) => Some(error),
                error => match tries.next(error).await? {
                    Next::Again(_) => None,
                    Next::Refresh(error) => Some(error),
                },
            },
        };
        if let Some(error) = pause {
            tries.change(error, REFRESH).await?;
        }
        self.describe().await
    }

    /// Asks for the servers of the job, and whether its versions are still those of the line that
    /// the reader has.
    async fn describe(&mut self) -> Result<()> {
        let of = self.cluster.describe_job(&self.job).await?;
        let is_same = (of.id, of.line) == (self.of.id, self.of.line);
        self.of = of;
        if !is_same {
            self.shown = None;
            self.lose(Copied::Rewound);
        }
        Ok(())
    }

    /// The reader needs a full copy.
    fn lose(&mut self, reason: Copied) {
        if self.held.take().is_some() {
            self.reason = reason;
        }
    }

    /// Pins the newest version, after all servers have begun to record changes. Waits for one after
    /// the last one that was returned.
    async fn pinned(&mut self, deadline: Deadline) -> Result<Pinned> {
        let mut tries = Tries::until(deadline);
        loop {
            let begun = self.begin(deadline.left().min(CALL));
            let waiting_for = || format!("the next version of job {:?}", self.job);
            match tries.limit(waiting_for, begun).await? {
                Ok(newest) if newest > self.shown => break,
                Ok(_) if deadline.left().is_zero() => {
                    return Err(deadline.timeout(format!("the next version of job {:?}", self.job)));
                }
                Ok(_) => self.describe().await?,
                Err(error) => self.after(error, &mut tries).await?,
            }
        }
        let pin = Pin { tensors: self.follow.tensors.clone(), ..Pin::default() };
        let pinned = self.cluster.pin(&self.job, &pin);
        let waiting_for = || format!("a pin of job {:?}", self.job);
        let pinned = tries.limit(waiting_for, pinned).await??;
        self.of = pinned.description().clone();
        Ok(pinned)
    }

    /// The number of elements that are followed.
    fn numel(&self) -> Result<u64> {
        let slices = self.of.spec.manifest.slices();
        Ok(self.slices()?.map(|slice| slices[slice as usize].numel as u64).sum())
    }

    /// Gives servers time to end a pin that has failed.
    async fn pause() {
        sleep(REFRESH).await;
    }
}
