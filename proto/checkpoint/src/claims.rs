//! Claims: which job may write to the checkpoints of a name, and which ones a job may read.
//!
//! ```text
//! <url>/<job>/claims/<number, 20 digits>.json
//!                    <id of a job, hexadecimal>.alive, .ended, .released
//! ```
//!
//! A name can be used again: by a job that continues from a checkpoint, or by a job of another
//! cluster. Each job that writes creates the next claim, which no two jobs can do at once, and the
//! job of the last claim is the owner. A claim lists the ancestors of its job, each with the
//! version up to which its checkpoints are those of the new job as well.
//!
//! The coordinator of a job writes another number to `.alive` every [`BEAT`], and `.ended` when the
//! job is over. Another job may become the owner if the owner is over, if an operator has released
//! its claim (`.released`), or if `.alive` does not change while the other job watches it for
//! [`PATIENCE`].
//!
//! A job removes its ancestors' old checkpoints with its own. If an ancestor has not said that it
//! is over, its coordinator may still come back. Then the job keeps them for [`GRACE`], and for
//! ever if the ancestor shows a sign of life. Only file times of the same storage are compared.

use std::time::Duration;

use object_store::{ObjectMeta, ObjectStoreExt, PutMode, path::Path};
use serde::{Deserialize, Serialize};
use zeroshard_model::{Error, Result, checkpoint::Start};
use zeroshard_net::Deadline;

use crate::{Manifest, Storage};

/// The directory of the claims.
const CLAIMS: &str = "claims";
/// The end of the name of the file in which the coordinator of a job states that the job is over.
const ENDED: &str = ".ended";
/// The end of the name of the file in which an operator allows other jobs to follow a job.
const RELEASED: &str = ".released";
/// The end of the name of the file that changes while a job lives.
const ALIVE: &str = ".alive";
/// How often that file changes.
pub const BEAT: Duration = Duration::from_secs(3);
/// How long the owner has not changed it before another job becomes the owner.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long after its claim a job keeps the checkpoints of ancestors that may not be over.
const GRACE: Duration = Duration::from_secs(600);
/// The pause between two looks at it.
const LOOK: Duration = Duration::from_secs(1);

/// A job that writes checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimant<'a> {
    /// The name of the job.
    pub job: &'a str,
    /// Its id.
    pub job_id: u64,
    /// The coordinator that runs it, for messages: its host and port.
    pub by: &'a str,
    /// The job's use of checkpoints of the name that exist already.
    pub start: Start,
}

/// A claim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Claim {
    /// The id of the job.
    job_id: u64,
    /// The jobs from whose checkpoints it has started, the nearest first.
    ancestors: Vec<Ancestor>,
    /// The coordinator that runs the job, for messages: its host and port.
    by: String,
}

/// A job from whose checkpoint another job has started.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Ancestor {
    /// The id of the ancestor.
    job_id: u64,
    /// The last version that the new job shares.
    until: u64,
    /// Its last sign of life before the new job started; empty: none.
    alive: String,
    /// The number of the claim of the job that started from it.
    successor: u64,
}

/// All claims of a name.
#[derive(Debug, Default)]
struct Claims {
    /// The numbers, ascending.
    numbers: Vec<u64>,
    /// The jobs that are over or released.
    free: Vec<u64>,
}

impl Claim {
    /// The id of the job.
    pub fn job_id(&self) -> u64 {
        self.job_id
    }

    /// Returns whether a checkpoint is one of the job, or of an ancestor before the job started
    /// from it.
    pub fn admits(&self, checkpoint: &Manifest) -> bool {
        let (id, version) = (checkpoint.job_id(), checkpoint.version());
        id == self.job_id || self.ancestors.iter().any(|of| of.job_id == id && version <= of.until)
    }

    /// A claim that only admits the checkpoints of the job itself.
    fn without_ancestors(job_id: u64) -> Self {
        Self { job_id, ancestors: Vec::new(), by: String::new() }
    }
}

impl Storage {
    /// Makes the job the owner of the checkpoints of its name.
    ///
    /// # Errors
    /// [`Error::Storage`] that names the owner, if that is another job that is not over, or if
    /// another job becomes the owner at the same time.
    pub async fn claim(&self, claimant: &Claimant<'_>) -> Result<()> {
        let &Claimant { job, job_id, by, start } = claimant;
        let claims = self.claims(job).await?;
        let owner = match claims.numbers.last() {
            Some(&number) => Some(self.read_claim(job, number).await?),
            None => None,
        };
        if let Some(owner) = &owner {
            if owner.job_id == job_id {
                return Ok(());
            }
            let is_free = claims.free.contains(&owner.job_id);
            if !is_free && self.is_alive(job, owner.job_id).await? {
                return Err(self.owned_by(job, owner));
            }
        }
        let number = claims.numbers.last().map_or(1, |last| last.saturating_add(1));
        let ancestors = match start {
            Start::From(id, version) => self.ancestry(job, id, version, number).await?,
            Start::Anew => Vec::new(),
        };
        let claim = Claim { job_id, ancestors, by: by.to_owned() };
        let text = serde_json::to_string(&claim)
            .map_err(|error| Error::Internal { cause: error.to_string() })?;
        let path = self.claim_path(job, number);
        match self.store().put_opts(&path, text.into(), PutMode::Create.into()).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::AlreadyExists { .. }) => {
                let owner = self.read_claim(job, number).await?;
                if owner.job_id == job_id { Ok(()) } else { Err(self.owned_by(job, &owner)) }
            }
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    /// Checks that no other job owns the checkpoints of this name.
    ///
    /// # Errors
    /// [`Error::Storage`] that names the owner.
    pub async fn check_owner(&self, job: &str, job_id: u64) -> Result<()> {
        match self.owner(job).await? {
            Some(owner) if owner.job_id != job_id => Err(self.owned_by(job, &owner)),
            _ => Ok(()),
        }
    }

    /// The claim of the job that owns the checkpoints of this name; `None` if no job does.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn owner(&self, job: &str) -> Result<Option<Claim>> {
        match self.claims(job).await?.numbers.last() {
            Some(&number) => self.read_claim(job, number).await.map(Some),
            None => Ok(None),
        }
    }

    /// The claim of a job that may have been followed by others. A job without a claim has none of
    /// its ancestors' checkpoints.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn claim_of(&self, job: &str, job_id: u64) -> Result<Claim> {
        for number in self.claims(job).await?.numbers.into_iter().rev() {
            let claim = self.read_claim(job, number).await?;
            if claim.job_id == job_id {
                return Ok(claim);
            }
        }
        Ok(Claim::without_ancestors(job_id))
    }

    /// The latest complete checkpoint that `claim` admits.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn latest(&self, job: &str, claim: &Claim) -> Result<Option<Manifest>> {
        for version in self.versions(job).await?.into_iter().rev() {
            let manifest = self.manifest(job, version).await?;
            if claim.admits(&manifest) {
                return Ok(Some(manifest));
            }
        }
        Ok(None)
    }

    /// States that a job is over, for its coordinator: other jobs may claim the checkpoints of its
    /// name, and its successors may remove them.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn end_claim(&self, job: &str, job_id: u64) -> Result<()> {
        self.free_claim(job, job_id, ENDED).await
    }

    /// Allows other jobs to claim the checkpoints of a name from its owner, which may still live.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn release_claim(&self, job: &str, job_id: u64) -> Result<()> {
        self.free_claim(job, job_id, RELEASED).await
    }

    /// Writes a file about a job, if the job has a claim and the file does not exist.
    async fn free_claim(&self, job: &str, job_id: u64, suffix: &str) -> Result<()> {
        let path = self.path_of(job, job_id, suffix);
        let is_claimed = !self.claim_of(job, job_id).await?.by.is_empty();
        if !is_claimed || self.described(&path).await?.is_some() {
            return Ok(());
        }
        match self.store().put(&path, Vec::new().into()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    /// The complete checkpoints that the job may remove if it keeps the latest `keep` of those
    /// that it can return to: its own, and those of ancestors that are over.
    pub(crate) async fn removable(&self, job: &str, job_id: u64, keep: usize) -> Result<Vec<u64>> {
        let claim = self.claim_of(job, job_id).await?;
        let mut own = Vec::new();
        for version in self.versions(job).await?.into_iter().rev() {
            match self.manifest(job, version).await {
                Ok(manifest) if claim.admits(&manifest) => own.push(manifest),
                // A damaged manifest does not name its job; `zsctl checkpoint verify` finds it.
                Ok(_) | Err(Error::CheckpointDamaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let mut removable = own.split_off(keep.min(own.len()));
        for ancestor in &claim.ancestors {
            let is_its = |of: &Manifest| of.job_id() == ancestor.job_id;
            if removable.iter().any(is_its) && !self.is_over(job, job_id, ancestor).await? {
                removable.retain(|of| !is_its(of));
            }
        }
        Ok(removable.iter().rev().map(Manifest::version).collect())
    }

    /// Returns whether an ancestor is over: its coordinator has said so, or it has shown no life
    /// since the job's claim, and the job has lived for longer than [`GRACE`] since then.
    async fn is_over(&self, job: &str, job_id: u64, ancestor: &Ancestor) -> Result<bool> {
        if let Some(ended) = self.described(&self.path_of(job, ancestor.job_id, ENDED)).await? {
            let alive = self.described(&self.path_of(job, ancestor.job_id, ALIVE)).await?;
            if alive.is_none_or(|alive| alive.last_modified <= ended.last_modified) {
                return Ok(true);
            }
        }
        if self.last_sign(job, ancestor.job_id).await? != ancestor.alive {
            return Ok(false);
        }
        let claimed = self.described(&self.claim_path(job, ancestor.successor)).await?;
        let now = self.described(&self.path_of(job, job_id, ALIVE)).await?;
        let (Some(claimed), Some(now)) = (claimed, now) else { return Ok(false) };
        let age = now.last_modified.signed_duration_since(claimed.last_modified);
        // It is negative if the clock was set back.
        Ok(age.to_std().is_ok_and(|age| age > GRACE))
    }

    /// Returns the size and time of a file; `None` if it does not exist.
    async fn described(&self, path: &Path) -> Result<Option<ObjectMeta>> {
        match self.store().head(path).await {
            Ok(found) => Ok(Some(found)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("read", path, &error)),
        }
    }

    /// The ancestors of a job that starts from `version` of the job with this id, by the claim with
    /// this number.
    async fn ancestry(
        &self,
        job: &str,
        job_id: u64,
        version: u64,
        successor: u64,
    ) -> Result<Vec<Ancestor>> {
        let before = self.claim_of(job, job_id).await?.ancestors;
        let older = before.into_iter().map(|of| Ancestor { until: of.until.min(version), ..of });
        let alive = self.last_sign(job, job_id).await?;
        let nearest = Ancestor { job_id, until: version, alive, successor };
        Ok([nearest].into_iter().chain(older).collect())
    }

    /// Writes a sign of life of a job, if its name has claims. `sign`: a number that no earlier
    /// sign of the job had.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn beat(&self, job: &str, job_id: u64, sign: u64) -> Result<()> {
        let path = self.path_of(job, job_id, ALIVE);
        // A directory that somebody has removed with all its checkpoints must not come back.
        let is_removed =
            self.described(&path).await?.is_none() && self.claims(job).await?.numbers.is_empty();
        if is_removed {
            return Ok(());
        }
        match self.store().put(&path, format!("{sign:016x}").into()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    /// Watches a job until it shows that it lives, at most for [`PATIENCE`].
    async fn is_alive(&self, job: &str, job_id: u64) -> Result<bool> {
        let before = self.last_sign(job, job_id).await?;
        let deadline = Deadline::after(PATIENCE);
        while !deadline.left().is_zero() {
            tokio::time::sleep(LOOK).await;
            if self.last_sign(job, job_id).await? != before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The last sign of life of a job; empty: none.
    async fn last_sign(&self, job: &str, job_id: u64) -> Result<String> {
        let path = self.path_of(job, job_id, ALIVE);
        let read = match self.store().get(&path).await {
            Ok(found) => found.bytes().await,
            Err(object_store::Error::NotFound { .. }) => return Ok(String::new()),
            Err(error) => Err(error),
        };
        let sign = read.map_err(|error| self.failed("read", &path, &error))?;
        Ok(String::from_utf8_lossy(&sign).into_owned())
    }

    /// The file about a job with this end of its name.
    fn path_of(&self, job: &str, job_id: u64, suffix: &str) -> Path {
        self.claims_directory(job).join(format!("{job_id:016x}{suffix}"))
    }

    async fn claims(&self, job: &str) -> Result<Claims> {
        let directory = self.claims_directory(job);
        let listed = self.store().list_with_delimiter(Some(&directory)).await;
        let listed = listed.map_err(|error| self.failed("list", &directory, &error))?;
        let names = listed.objects.iter().filter_map(|file| file.location.filename());
        let mut claims = Claims::default();
        for name in names {
            if let Some(number) = name.strip_suffix(".json").and_then(|name| name.parse().ok()) {
                claims.numbers.push(number);
                continue;
            }
            let id = name.strip_suffix(ENDED).or_else(|| name.strip_suffix(RELEASED));
            claims.free.extend(id.and_then(|id| u64::from_str_radix(id, 16).ok()));
        }
        claims.numbers.sort_unstable();
        Ok(claims)
    }

    async fn read_claim(&self, job: &str, number: u64) -> Result<Claim> {
        let path = self.claim_path(job, number);
        let text = match self.store().get(&path).await {
            Ok(found) => found.bytes().await,
            Err(error) => Err(error),
        };
        let text = text.map_err(|error| self.failed("read", &path, &error))?;
        serde_json::from_slice(&text).map_err(|error| Error::CheckpointDamaged {
            file: self.name(&path),
            cause: format!("it is not a claim: {error}"),
        })
    }

    fn owned_by(&self, job: &str, owner: &Claim) -> Error {
        let Claim { job_id, by, .. } = owner;
        let cause = format!(
            "the checkpoints of job {job:?} there belong to another job of this name, with id \
             {job_id:016x}, which the coordinator {by} has started; choose another job name or \
             URL, or delete that job; if its cluster is gone and you do not want to wait until that \
             is noticed, run `zsctl checkpoint release {job} --url {}`",
            self.url()
        );
        Error::Storage { action: "write to".to_owned(), url: self.url().to_owned(), cause }
    }

    fn claims_directory(&self, job: &str) -> Path {
        self.job_directory(job).join(CLAIMS)
    }

    fn claim_path(&self, job: &str, number: u64) -> Path {
        self.claims_directory(job).join(format!("{number:020}.json"))
    }
}
