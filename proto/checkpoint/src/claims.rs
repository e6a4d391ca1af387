//! Claims: which job may write to the checkpoints of a name, and which ones a job may read.
//!
//! ```text
//! <url>/<job>/claims/<number, 20 digits>.json
//!                    <id of a job, hexadecimal>.alive, .ended, .released
//! ```
//!
//! A name can be used again: by a job that continues from a checkpoint, or by a job of another
//! cluster. Each job that writes creates the next claim, which no two jobs can do at once, and the
//! job of the last claim is the owner. A job that returns to a checkpoint creates another claim,
//! for its new line. A claim lists the ancestors of its line: the earlier lines, of this job or of
//! others, that the line continues. Each ancestor has the last version that both lines share.
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
use zeroshard_model::{Error, JobLine, Line, LineVersion, Result, checkpoint::Start};
use zeroshard_net::Deadline;

use crate::{
    Manifest, Storage,
    stored::{is_zero, read_line, stored_skips},
};

/// The directory of the claims.
const CLAIMS: &str = "claims";
/// The end of the name of the file in which the coordinator of a job states that the job is over.
pub(crate) const ENDED: &str = ".ended";
/// The end of the name of the file in which an operator allows other jobs to follow a job.
const RELEASED: &str = ".released";
/// The end of the name of the file that changes while a job lives.
pub(crate) const ALIVE: &str = ".alive";
/// How often that file changes.
pub const BEAT: Duration = Duration::from_secs(3);
/// How long the owner has not changed it before another job becomes the owner.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two looks at it.
const LOOK: Duration = Duration::from_secs(1);

/// A line whose job is going to write checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimant<'a> {
    /// The name of the job.
    pub job: &'a str,
    /// Its id.
    pub job_id: u64,
    /// The line.
    pub line: &'a Line,
    /// The coordinator that runs it, for messages: its host and port.
    pub by: &'a str,
    /// The checkpoint that the line continues, if it is among those of the name.
    pub start: Start,
}

/// A claim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Claim {
    /// The id of the job.
    job_id: u64,
    /// The number of the line. Line 0 is not stored.
    #[serde(default, skip_serializing_if = "is_zero")]
    line: u64,
    /// The batches that the line skips, as (begin, end) pairs. `end` is not skipped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    skips: Vec<(u64, u64)>,
    /// The lines that this one continues, the nearest first.
    pub(crate) ancestors: Vec<Ancestor>,
    /// The coordinator that runs the job, for messages: its host and port.
    by: String,
}

/// The latest claim format that this program reads.
const FORMAT: u32 = 2;

/// The file of a claim for line 1 or later. Programs that do not know lines cannot parse it, and so
/// they refuse the checkpoints.
#[derive(Debug, Serialize, Deserialize)]
struct Later {
    /// The version of the format.
    format: u32,
    /// The claim.
    claim: Claim,
}

/// A line that a later line continues from one of its checkpoints.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ancestor {
    /// The id of its job.
    pub(crate) job_id: u64,
    /// Its number. Line 0 is not stored.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) line: u64,
    /// The last version that both lines share.
    pub(crate) until: u64,
    /// The last sign of life that its job had given when the later line claimed; empty: none.
    pub(crate) alive: String,
    /// The number of the later line's claim.
    pub(crate) successor: u64,
}

/// All claims of a name.
#[derive(Debug, Default)]
struct Claims {
    /// The numbers, ascending.
    numbers: Vec<u64>,
    /// The jobs that are over or released.
    free: Vec<u64>,
}

impl Claims {
    /// Returns the number of the next claim.
    fn next(&self) -> u64 {
        self.numbers.last().map_or(1, |last| last.saturating_add(1))
    }
}

impl Claim {
    /// Returns the job and the line that it is for.
    pub fn of(&self) -> JobLine {
        JobLine { job_id: self.job_id, line: self.line }
    }

    /// Returns the line, with the batches that it skips.
    ///
    /// # Errors
    /// [`Error::Invalid`] if somebody has changed the file.
    pub fn line(&self) -> Result<Line> {
        read_line(self.line, &self.skips)
    }

    /// Returns whether a checkpoint is one of the line, or of an ancestor before the line started
    /// from it.
    pub fn admits(&self, checkpoint: &Manifest) -> bool {
        let LineVersion { version, line } = checkpoint.version();
        let of = JobLine { job_id: checkpoint.job_id(), line };
        of == self.of() || self.ancestors.iter().any(|it| it.of() == of && version <= it.until)
    }

    /// Returns `false` if the claim admits no checkpoint of this version, whichever job has saved
    /// it.
    pub(crate) fn may_admit(&self, LineVersion { version, line }: LineVersion) -> bool {
        line == self.line || self.ancestors.iter().any(|of| of.line == line && version <= of.until)
    }

    /// Creates a claim that only admits the checkpoints of the line itself.
    fn without_ancestors(JobLine { job_id, line }: JobLine) -> Self {
        Self { job_id, line, skips: Vec::new(), ancestors: Vec::new(), by: String::new() }
    }
}

impl Ancestor {
    fn of(&self) -> JobLine {
        JobLine { job_id: self.job_id, line: self.line }
    }
}

impl Storage {
    /// Makes the line the owner of the checkpoints of its job's name.
    ///
    /// # Errors
    /// [`Error::Storage`] that names the owner, if that is another job that is not over, or if
    /// another job becomes the owner at the same time.
    pub async fn claim(&self, claimant: &Claimant<'_>) -> Result<()> {
        let &Claimant { job, job_id, line, by, start } = claimant;
        let of = JobLine { job_id, line: line.number };
        if self.continue_claim(job, of).await? {
            return Ok(());
        }
        let claims = self.claims(job).await?;
        if let Some(&last) = claims.numbers.last() {
            let owner = self.read_claim(job, last).await?;
            let is_free = owner.job_id == job_id || claims.free.contains(&owner.job_id);
            if !is_free && self.is_alive(job, owner.job_id).await? {
                return Err(self.owned_by(job, &owner));
            }
        }
        let number = claims.next();
        let ancestors = match start {
            Start::From(id, version) => self.ancestry(job, id, version, number).await?,
            Start::Anew => Vec::new(),
        };
        let (line, skips) = (line.number, stored_skips(line));
        let claim = Claim { job_id, line, skips, ancestors, by: by.to_owned() };
        self.write_claim(job, number, claim).await
    }

    /// Claims the checkpoints of a name for a line that has claimed them before. A coordinator may
    /// have claimed them for a newer line, and died before the job continued on it. Returns `false`
    /// if another job is the owner, or if the line has no claim.
    ///
    /// # Errors
    /// [`Error::Storage`] if another job becomes the owner at the same time.
    pub async fn continue_claim(&self, job: &str, of: JobLine) -> Result<bool> {
        let claims = self.claims(job).await?;
        let Some(&last) = claims.numbers.last() else { return Ok(false) };
        let owner = self.read_claim(job, last).await?;
        if owner.of() == of || owner.job_id != of.job_id {
            return Ok(owner.of() == of);
        }
        let Some(earlier) = self.find_claim(job, |claim| claim.of() == of).await? else {
            return Ok(false);
        };
        self.write_claim(job, claims.next(), earlier).await?;
        Ok(true)
    }

    /// Creates the claim with this number.
    async fn write_claim(&self, job: &str, number: u64, claim: Claim) -> Result<()> {
        let of = claim.of();
        let text = match of.line {
            0 => serde_json::to_string(&claim),
            _ => serde_json::to_string(&Later { format: FORMAT, claim }),
        };
        let text = text.map_err(|error| Error::Internal { cause: error.to_string() })?;
        let path = self.claim_path(job, number);
        match self.store().put_opts(&path, text.into(), PutMode::Create.into()).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::AlreadyExists { .. }) => {
                let owner = self.read_claim(job, number).await?;
                if owner.of() == of { Ok(()) } else { Err(self.owned_by(job, &owner)) }
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

    /// Returns the number of a line on which no job of this name has made a version.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn next_line(&self, job: &str) -> Result<u64> {
        let mut next = 0;
        for number in self.claims(job).await?.numbers {
            next = next.max(self.read_claim(job, number).await?.line.saturating_add(1));
        }
        Ok(next)
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

    /// Returns the claim of a line, even if there are newer claims. Without one, returns a claim
    /// that admits only the line's own checkpoints.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn claim_of(&self, job: &str, of: JobLine) -> Result<Claim> {
        let claim = self.find_claim(job, |claim| claim.of() == of).await?;
        Ok(claim.unwrap_or_else(|| Claim::without_ancestors(of)))
    }

    /// Returns the last claim of a job; `None` if the job has none.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn last_claim_of(&self, job: &str, job_id: u64) -> Result<Option<Claim>> {
        self.find_claim(job, |claim| claim.job_id == job_id).await
    }

    /// Returns the last claim that passes the test.
    async fn find_claim(&self, job: &str, test: impl Fn(&Claim) -> bool) -> Result<Option<Claim>> {
        for number in self.claims(job).await?.numbers.into_iter().rev() {
            let claim = self.read_claim(job, number).await?;
            if test(&claim) {
                return Ok(Some(claim));
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
        let is_claimed = self.last_claim_of(job, job_id).await?.is_some();
        if !is_claimed || self.described(&path).await?.is_some() {
            return Ok(());
        }
        match self.store().put(&path, Vec::new().into()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed("write", &path, &error)),
        }
    }

    /// Returns the size and time of a file; `None` if it does not exist.
    pub(crate) async fn described(&self, path: &Path) -> Result<Option<ObjectMeta>> {
        match self.store().head(path).await {
            Ok(found) => Ok(Some(found)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("read", path, &error)),
        }
    }

    /// Returns the ancestors of a line that starts from a version of the job with this id.
    /// `successor`: the number of the new line's claim.
    async fn ancestry(
        &self,
        job: &str,
        job_id: u64,
        LineVersion { version, line }: LineVersion,
        successor: u64,
    ) -> Result<Vec<Ancestor>> {
        let before = self.claim_of(job, JobLine { job_id, line }).await?.ancestors;
        let older = before.into_iter().map(|of| Ancestor { until: of.until.min(version), ..of });
        let alive = self.last_sign(job, job_id).await?;
        let nearest = Ancestor { job_id, line, until: version, alive, successor };
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
    pub(crate) async fn last_sign(&self, job: &str, job_id: u64) -> Result<String> {
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
    pub(crate) fn path_of(&self, job: &str, job_id: u64, suffix: &str) -> Path {
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
        let damaged = |cause| Error::CheckpointDamaged { file: self.name(&path), cause };
        match serde_json::from_slice(&text) {
            Ok(Later { format: 0..=FORMAT, claim }) => Ok(claim),
            Ok(Later { format, .. }) => Err(damaged(format!(
                "its format is {format}, and this version of ZeroShard reads up to {FORMAT}; \
                 install a later version"
            ))),
            Err(_) => serde_json::from_slice(&text)
                .map_err(|error| damaged(format!("it is not a claim: {error}"))),
        }
    }

    pub(crate) fn owned_by(&self, job: &str, owner: &Claim) -> Error {
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

    pub(crate) fn claim_path(&self, job: &str, number: u64) -> Path {
        self.claims_directory(job).join(format!("{number:020}.json"))
    }
}
