//! Follows a job: a reader receives only what each step has changed.
//!
//! A follower pins one version and copies it in full. Afterwards it asks the servers of its slices
//! for the changes since its version. With replicas it asks the servers of a slice in turn, so
//! these share the traffic. Servers answer when they have a newer version. If some answer with an
//! older version than others, the follower asks them for the rest, so that all changes lead to the
//! same version. It keeps no copy of the values. It applies the changes to the caller's own arrays,
//! and takes them back if the hash of a slice is wrong.
//!
//! The follower makes another full copy if the job is on another line or is another job of the same
//! name, if a server does not know the changes, or if somebody else has written to the arrays.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use tokio::time::sleep;
use twox_hash::XxHash3_64;
pub use zeroshard_changes::Copied;
use zeroshard_changes::Reader;
use zeroshard_model::{DType, Error, JobSpec, Result, StridedBox, TensorBox};
use zeroshard_net::Deadline;

use crate::{
    Cluster, Description, Pin,
    retry::{Next, Tries, drops_job},
};
use changes::Since;
use mirror::Mirror;
pub use values::FollowedValues;
pub use version::FollowedVersion;
use views::{Views, dtype_of};

mod apply;
mod changes;
mod copies;
mod mirror;
mod values;
mod version;
mod views;

/// How long one call waits for the next version. The follower then asks the coordinator for the
/// servers of the job again.
const CALL: Duration = Duration::from_secs(10);

/// How long a full copy may take: the longest limit of a pin, which ends with the copy.
const COPY: Duration = Duration::from_secs(600);

/// The pause before a server is asked again for a pin for which it had no room.
const FULL: Duration = Duration::from_millis(100);

/// The pause before the job is described again, after its slices have moved or a copy has failed.
const REFRESH: Duration = Duration::from_millis(20);

/// The tensors that a reader follows, and their dtype.
#[derive(Debug, Clone)]
pub struct Follow {
    /// The dtype of the reader's parameters. Buffers are always f32.
    pub dtype: DType,
    /// The tensors, by name; `None`: all tensors of the job.
    pub tensors: Option<Vec<String>>,
    /// The boxes to follow of tensors of which the reader has only a part, by name. The array of
    /// such a tensor has the elements of its box, row-major.
    pub boxes: BTreeMap<String, TensorBox>,
    /// The longest wait for a version.
    pub wait: Duration,
    /// The address of a mirror (`host:port`) that sends the values and changes instead of the
    /// servers. Only hashes come from the servers.
    pub mirror: Option<String>,
}

impl Default for Follow {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            tensors: None,
            boxes: BTreeMap::new(),
            wait: Duration::from_secs(600),
            mirror: None,
        }
    }
}

/// Follows a job: see [`Cluster::follow`].
#[derive(Debug)]
pub struct Follower {
    cluster: Cluster,
    job: String,
    follow: Follow,
    mirror: Option<Mirror>,
    /// A random number by which servers recognize the reader.
    id: u64,
    /// Which server of each slice the next request goes to, if it has several.
    turn: usize,
    of: Description,
    /// What the reader has of each tensor of this job.
    views: Views,
    /// Which version the reader's arrays have, and which one [`Self::next`] has returned.
    reader: Reader,
}

impl Cluster {
    /// Follows a job. The reader need not be a member of it.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an unknown tensor, a box that does not fit its
    /// tensor, or an invalid address of a mirror; [`Error::Refused`] for boxes of tensors that are
    /// not followed, for boxes without elements, and for boxes of a mirror; [`Error::Timeout`].
    pub async fn follow(&self, job: &str, follow: Follow) -> Result<Follower> {
        let of = self.describe_job(job).await?;
        let views = Views::new(&of.spec.manifest, &follow)?;
        let mirror = follow.mirror.as_deref();
        let mirror = mirror.map(|address| Mirror::new(self, address)).transpose()?;
        let (cluster, job) = (self.clone(), job.to_owned());
        let reader = Reader::new((of.id, of.line));
        let id = RandomState::new().hash_one(of.id);
        let turn = id as usize;
        Ok(Follower { cluster, job, follow, mirror, id, turn, of, views, reader })
    }
}

impl Follower {
    /// The spec of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.of.spec
    }

    /// The description of the job. Its id and its spec change if somebody deletes the job and
    /// creates it again.
    pub fn description(&self) -> &Description {
        &self.of
    }

    /// The dtype of a tensor in the reader's arrays: [`Follow::dtype`], or f32 for a buffer.
    pub fn dtype_of(&self, tensor: usize) -> DType {
        dtype_of(&self.of.spec.manifest, self.follow.dtype, tensor)
    }

    /// The version in the reader's arrays; `None` if they need a full copy.
    pub fn version(&self) -> Option<u64> {
        self.reader.version()
    }

    /// Returns a hash of the values in the reader's arrays, or `None` if they need a full copy.
    /// Readers that follow the same tensors in the same dtype have equal hashes if their values are
    /// bitwise identical.
    pub fn hash(&self) -> Option<u64> {
        let hashes = self.reader.hashes()?;
        let words = hashes.iter().flat_map(|(&slice, &hash)| [u64::from(slice), hash]);
        Some(XxHash3_64::oneshot(&words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()))
    }

    /// The number of full copies for each reason.
    pub fn copies(&self) -> &BTreeMap<Copied, u64> {
        self.reader.copies()
    }

    /// Returns the followed tensors that own their storage.
    pub fn tensors(&self) -> BTreeSet<usize> {
        self.views.tensors().collect()
    }

    /// Returns the box that is followed of a tensor that owns its storage; `None`: the whole
    /// tensor.
    pub fn bounds(&self, tensor: usize) -> Option<&TensorBox> {
        self.views.bounds(tensor).map(StridedBox::bounds)
    }

    /// The number of elements in the reader's array of a tensor.
    pub fn numel_of(&self, tensor: usize) -> usize {
        let manifest = &self.of.spec.manifest;
        self.views.numel(manifest, manifest.owner(tensor))
    }

    /// Returns the slices of which the reader has elements.
    fn slices(&self) -> impl Iterator<Item = u32> {
        self.views.slices(&self.of.spec.manifest)
    }

    /// Waits for a version after the last one that this method returned. Returns the newest one,
    /// with the changes since the version in the reader's arrays. Only [`Self::apply`] writes to
    /// the arrays.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::JobFailed`]; [`Error::Invalid`] and [`Error::Refused`] if
    /// the job was created again without what the reader follows; [`Error::Timeout`] if there is no
    /// newer version within [`Follow::wait`]; [`Error::OutOfMemory`] if a server has no room for
    /// the pin of a full copy within [`crate::Options::timeout`].
    pub async fn next(&mut self) -> Result<FollowedVersion> {
        let deadline = Deadline::after(self.follow.wait);
        let mut tries = Tries::until(deadline);
        // How many servers of a slice, one after the other, do not know the changes.
        let mut unknown = 0;
        loop {
            let Some(version) = self.version() else {
                let full = self.newest(deadline).await?;
                self.reader.show(full.number);
                return Ok(full);
            };
            let wait = CALL.min(deadline.left());
            let waiting_for = || format!("a version of job {:?} after {version}", self.job);
            self.turn = self.turn.wrapping_add(1);
            let since = self.changes_since(version, wait);
            match tries.limit(waiting_for, since).await? {
                Ok(Since::Changed { version: newer, slices }) => {
                    let numel = self.numel();
                    self.reader.show(newer);
                    let versions = (version, newer);
                    return Ok(FollowedVersion::changed(self.of.line, versions, slices, numel));
                }
                Ok(Since::Unknown) => {
                    unknown += 1;
                    if unknown >= self.of.placement.replicas() || self.mirror.is_some() {
                        self.reader.lose(Copied::Behind);
                    }
                }
                Ok(Since::Same) if deadline.left().is_zero() => {
                    return Err(deadline.timeout(waiting_for()));
                }
                Ok(Since::Same) => self.describe().await?,
                Err(error) => self.after(error, &mut tries).await?,
            }
        }
    }

    /// Pauses after an error of a server, and asks the coordinator for the servers of the job.
    ///
    /// # Errors
    /// `error`, if it is final.
    async fn after(&mut self, error: Error, tries: &mut Tries) -> Result<()> {
        // The job may continue on other servers, may have returned to an earlier version, or may
        // have been created again. Only the coordinator knows.
        let is_elsewhere = drops_job(&error)
            || matches!(error, Error::VersionGone { .. } | Error::JobReplaced { .. });
        let next = match is_elsewhere {
            true => Next::Refresh(error),
            false => tries.next(error).await?,
        };
        if let Next::Refresh(error) = next {
            tries.change(error, REFRESH).await?;
        }
        self.describe().await
    }

    /// Asks the coordinator for the servers of the job. The reader needs a full copy if the job is
    /// on another line.
    async fn describe(&mut self) -> Result<()> {
        let of = self.cluster.describe_job(&self.job).await?;
        self.take(of)?;
        Ok(())
    }

    /// Takes a description of the job, unless it is of a line that the job has left. Returns
    /// whether it was taken.
    fn take(&mut self, of: Description) -> Result<bool> {
        if !self.reader.described((of.id, of.line)) {
            return Ok(false);
        }
        if of.id != self.of.id {
            self.views = Views::new(&of.spec.manifest, &self.follow)?;
        }
        self.of = of;
        Ok(true)
    }

    /// Waits for a version after the last one that [`Self::next`] returned. Pins the newest one,
    /// unless a mirror sends it. By then all servers record changes.
    async fn newest(&mut self, deadline: Deadline) -> Result<FollowedVersion> {
        let reason = self.reader.reason();
        let room = deadline.at_most(self.cluster.options.timeout);
        let mut tries = Tries::until(deadline);
        let newest = loop {
            let begun = self.begin(deadline.left().min(CALL));
            let waiting_for = || format!("the next version of job {:?}", self.job);
            match tries.limit(waiting_for, begun).await? {
                Ok(newest) if self.reader.is_newer(newest) => break newest,
                Ok(_) if deadline.left().is_zero() => {
                    return Err(deadline.timeout(waiting_for()));
                }
                Ok(_) => self.describe().await?,
                Err(error) => self.after(error, &mut tries).await?,
            }
        };
        if let (Some(newest), Some(_)) = (newest, &self.mirror) {
            return Ok(FollowedVersion::of_mirror(self.of.line, newest, reason));
        }
        let pin = Pin { tensors: self.follow.tensors.clone(), limit: COPY, ..Pin::default() };
        let pinned = loop {
            let waiting_for = || format!("a pin of job {:?}", self.job);
            let pinned = self.cluster.pin(&self.job, &pin);
            match tries.limit(waiting_for, pinned).await? {
                // The copies of other readers take the room, and end soon.
                Err(Error::OutOfMemory { .. }) if !room.left().is_zero() => sleep(FULL).await,
                pinned => {
                    let pinned = pinned?;
                    if self.take(pinned.description().clone())? {
                        break pinned;
                    }
                    sleep(REFRESH).await;
                }
            }
        };
        Ok(FollowedVersion::full(self.of.line, pinned, reason))
    }

    /// Returns the number of followed elements.
    fn numel(&self) -> u64 {
        self.views.tensors().map(|tensor| self.numel_of(tensor) as u64).sum()
    }
}
