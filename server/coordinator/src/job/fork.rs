//! A job as the predecessor of another one.

use std::sync::Arc;

use zeroshard_model::{Error, Fork, Result};

use crate::{job::Job, placement::fork::Source};

impl Job {
    /// This job as the predecessor of another one, if its current version is the one to copy.
    ///
    /// # Errors
    /// [`Error::JobReplaced`], [`Error::JobFailed`]; [`Error::VersionGone`] if it has a later
    /// version, [`Error::Invalid`] if it has not reached the version.
    pub(crate) fn as_source(&self, fork: &Arc<Fork>) -> Result<Source> {
        let from = &fork.from;
        if self.id != from.job_id {
            return Err(Error::JobReplaced { job: from.job.clone() });
        }
        let open = self.phase.open(&from.job)?;
        match open.version.current() {
            Some(version) if version == from.version => Ok(Source {
                fork: fork.clone(),
                spec: self.spec.clone(),
                placement: open.plan.placement.clone(),
            }),
            Some(current) if current > from.version => {
                let (job, version) = (from.job.clone(), from.version);
                Err(Error::VersionGone { job, version, current })
            }
            Some(current) => Err(Error::invalid(
                format!("version of job {:?} to continue from", from.job),
                from.version,
                format!("its current version, {current}"),
            )),
            None => Err(Error::refused(format!(
                "job {:?} has no version yet; wait until its initial parameters are uploaded",
                from.job
            ))),
        }
    }
}
