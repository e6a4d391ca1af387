//! Selects the checkpoints of a line: its own, and those that it shares with the lines it
//! continues. The job has abandoned all others.

use std::time::Duration;

use zeroshard_model::{Error, JobLine, LineVersion, Result};

use crate::{
    Claim, Manifest, Storage,
    claims::{ALIVE, Ancestor, ENDED},
};

/// How long after its claim a job keeps the checkpoints of ancestors that may still run.
const GRACE: Duration = Duration::from_secs(600);

impl Storage {
    /// Reads the checkpoint with this number: on `line`, even if the job has abandoned it, or one
    /// that `claim` admits. If there are several, reads the one on the latest line.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`], [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn checkpoint(
        &self,
        job: &str,
        (version, line): (u64, Option<u64>),
        claim: Option<&Claim>,
    ) -> Result<Manifest> {
        if let Some(line) = line {
            return self.manifest(job, LineVersion { version, line }).await;
        }
        let of_number = self.versions(job).await?.into_iter().filter(|of| of.version == version);
        let mut abandoned = Vec::new();
        for found in of_number.rev() {
            if let Some(manifest) = self.admitted(job, found, claim).await? {
                return Ok(manifest);
            }
            abandoned.push(found.to_string());
        }
        let version = match abandoned.is_empty() {
            true => format!("version {version}"),
            false => format!(
                "version {version} on its current line (there is {} on an abandoned one)",
                abandoned.join(" and ")
            ),
        };
        Err(Error::NoCheckpoint { url: self.url().to_owned(), job: job.to_owned(), version })
    }

    /// Reads the latest complete checkpoint that `claim` admits, or the latest of all without a
    /// claim.
    ///
    /// # Errors
    /// [`Error::Storage`], [`Error::CheckpointDamaged`].
    pub async fn latest(&self, job: &str, claim: Option<&Claim>) -> Result<Option<Manifest>> {
        self.latest_until(job, u64::MAX, claim).await
    }

    /// Reads the latest complete checkpoint like [`Self::latest`], of a version up to `until`.
    ///
    /// # Errors
    /// Those of [`Self::latest`].
    pub async fn latest_until(
        &self,
        job: &str,
        until: u64,
        claim: Option<&Claim>,
    ) -> Result<Option<Manifest>> {
        let versions = self.versions(job).await?.into_iter().rev();
        for version in versions.filter(|of| of.version <= until) {
            if let Some(manifest) = self.admitted(job, version, claim).await? {
                return Ok(Some(manifest));
            }
        }
        Ok(None)
    }

    /// Reads the manifest of a version; `None` if `claim` does not admit it.
    async fn admitted(
        &self,
        job: &str,
        version: LineVersion,
        claim: Option<&Claim>,
    ) -> Result<Option<Manifest>> {
        // A manifest that the claim cannot admit may be damaged.
        if claim.is_some_and(|claim| !claim.may_admit(version)) {
            return Ok(None);
        }
        let manifest = self.manifest(job, version).await?;
        Ok(Some(manifest).filter(|found| claim.is_none_or(|claim| claim.admits(found))))
    }

    /// Returns the complete checkpoints that a line may remove while it keeps the latest `keep` of
    /// those that its job can return to. It may remove its own, those of ancestors that are over,
    /// and those that the same jobs have abandoned, up to the line's newest version.
    pub(crate) async fn removable(
        &self,
        job: &str,
        of: JobLine,
        keep: usize,
    ) -> Result<Vec<LineVersion>> {
        let claim = self.claim_of(job, of).await?;
        let is_own = |id| id == of.job_id || claim.ancestors.iter().any(|of| of.job_id == id);
        let (mut own, mut left) = (Vec::new(), Vec::new());
        for version in self.versions(job).await?.into_iter().rev() {
            match self.manifest(job, version).await {
                Ok(manifest) if claim.admits(&manifest) => own.push(manifest),
                Ok(manifest) if is_own(manifest.job_id()) => left.push(manifest),
                // A damaged manifest does not name its job; `zsctl checkpoint verify` finds it.
                Ok(_) | Err(Error::CheckpointDamaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let newest = own.first().map(|own| own.version().version);
        left.retain(|left| newest.is_some_and(|newest| left.version().version <= newest));
        let mut removable = own.split_off(keep.min(own.len()));
        removable.extend(left);
        for ancestor in &claim.ancestors {
            let is_its = |of: &Manifest| of.job_id() == ancestor.job_id;
            let is_older = ancestor.job_id != of.job_id && removable.iter().any(is_its);
            if is_older && !self.is_over(job, of.job_id, ancestor).await? {
                removable.retain(|of| !is_its(of));
            }
        }
        let mut removable: Vec<LineVersion> = removable.iter().map(Manifest::version).collect();
        removable.sort_unstable();
        Ok(removable)
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
}
