//! Claims: which job may write to the checkpoints of a name, and which ones a job may read.
//!
//! ```text
//! <url>/<job>/claims/<number, 20 digits>.json
//!                    <id of a job, hexadecimal>.ended
//! ```
//!
//! A name can be used again: by a job that continues from a checkpoint, or by a job of another
//! cluster. Each job that writes creates the next claim, which no two jobs can do at once, and the
//! job of the last claim is the owner. A claim lists the ancestors of its job, each with the
//! version up to which its checkpoints are those of the new job as well. `.ended` states that a job
//! is over: then its successors may remove its checkpoints.

use object_store::{ObjectStoreExt, PutMode, path::Path};
use serde::{Deserialize, Serialize};
use zeroshard_proto::{Error, Result};

use crate::{Manifest, Storage};

/// The directory of the claims.
const CLAIMS: &str = "claims";
/// The end of the name of the file that states that a job is over.
const ENDED: &str = ".ended";

/// A job that writes checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimant<'a> {
    /// The name of the job.
    pub job: &'a str,
    /// Its id.
    pub job_id: u64,
    /// The coordinator that runs it, for messages: its host and port.
    pub by: &'a str,
    /// What the job does with checkpoints of the name that are there already.
    pub start: Start,
}

/// How a job begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Without a checkpoint.
    Anew,
    /// From the latest checkpoint of the name, of which there was none.
    AnewWithoutCheckpoint,
    /// From this version of the job with this id, which has the same name.
    From(u64, u64),
}

/// A claim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Claim {
    job_id: u64,
    /// The nearest ancestor first.
    ancestors: Vec<Ancestor>,
    by: String,
}

/// A job from whose checkpoint another job has started.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Ancestor {
    job_id: u64,
    /// The last version that the new job shares.
    until: u64,
}

/// All claims of a name.
#[derive(Debug, Default)]
struct Claims {
    /// The numbers, ascending.
    numbers: Vec<u64>,
    /// The jobs that are over.
    ended: Vec<u64>,
}

impl Claim {
    /// The id of the job.
    pub fn job_id(&self) -> u64 {
        self.job_id
    }

    /// Whether a checkpoint is one of the job, or of an ancestor before the job started from it.
    pub fn admits(&self, checkpoint: &Manifest) -> bool {
        let (id, version) = (checkpoint.job_id(), checkpoint.version());
        id == self.job_id || self.ancestors.iter().any(|of| of.job_id == id && version <= of.until)
    }

    /// The id of the job that has written a version that [`Self::admits`] admits.
    fn writer_of(&self, version: u64) -> u64 {
        let ancestor = self.ancestors.iter().rev().find(|of| version <= of.until);
        ancestor.map_or(self.job_id, |of| of.job_id)
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
    /// [`Error::Storage`] that names the owner, if that is another job from which this job does not
    /// continue, or if another job becomes the owner at the same time.
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
            let may_follow = match start {
                Start::From(..) | Start::AnewWithoutCheckpoint => true,
                // The names of the jobs of a cluster are unique.
                Start::Anew => owner.by == by || claims.ended.contains(&owner.job_id),
            };
            if !may_follow {
                return Err(self.owned_by(job, owner));
            }
        }
        let ancestors = match start {
            Start::From(id, version) => self.ancestry(job, id, version).await?,
            Start::Anew | Start::AnewWithoutCheckpoint => Vec::new(),
        };
        let claim = Claim { job_id, ancestors, by: by.to_owned() };
        let text = serde_json::to_string(&claim)
            .map_err(|error| Error::Internal { cause: error.to_string() })?;
        let number = claims.numbers.last().map_or(1, |last| last.saturating_add(1));
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

    /// The claim of the job that owns the checkpoints of this name; `None`: no job has claimed them.
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

    /// States that a job is over, if it owns the checkpoints of its name: another job may claim
    /// them, and its successors may remove them.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn end_claim(&self, job: &str, job_id: u64) -> Result<()> {
        let claims = self.claims(job).await?;
        let is_claimed = self.claim_of(job, job_id).await?.by != "";
        if !is_claimed || claims.ended.contains(&job_id) {
            return Ok(());
        }
        let path = self.claims_directory(job).join(format!("{job_id:016x}{ENDED}"));
        match self.store().put(&path, Vec::new().into()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    /// Of the oldest complete checkpoints of a job, those that the job may remove: its own, and
    /// those of ancestors that are over.
    pub(crate) async fn removable(
        &self,
        job: &str,
        job_id: u64,
        oldest: &[u64],
    ) -> Result<Vec<u64>> {
        let (claim, claims) = (self.claim_of(job, job_id).await?, self.claims(job).await?);
        let mut removable = Vec::new();
        for &version in oldest {
            let writer = claim.writer_of(version);
            let is_over = writer == job_id || claims.ended.contains(&writer);
            if is_over && self.manifest(job, version).await?.job_id() == writer {
                removable.push(version);
            }
        }
        Ok(removable)
    }

    /// The ancestors of a job that starts from `version` of the job with this id.
    async fn ancestry(&self, job: &str, job_id: u64, version: u64) -> Result<Vec<Ancestor>> {
        let before = self.claim_of(job, job_id).await?.ancestors;
        let older = before.into_iter().map(|of| Ancestor { until: of.until.min(version), ..of });
        Ok([Ancestor { job_id, until: version }].into_iter().chain(older).collect())
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
            } else if let Some(id) = name.strip_suffix(ENDED) {
                claims.ended.extend(u64::from_str_radix(id, 16));
            }
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
             URL, or resume from its checkpoints, or run `zsctl checkpoint release {job} --url {}` \
             if that job is over",
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
