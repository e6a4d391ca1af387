//! A job as the predecessor of another one.

use std::sync::Arc;

use zeroshard_model::{Error, Result, Succession};

use crate::{job::Job, succession::Source};

impl Job {
    /// This job as the predecessor of another one, if its current version is the one to copy.
    ///
    /// # Errors
    /// [`Error::JobReplaced`], [`Error::JobFailed`]; [`Error::VersionGone`] if it has a later
    /// version, [`Error::Invalid`] if it has not reached the version.
    pub(crate) fn as_source(&self, succession: &Arc<Succession>) -> Result<Source> {
        let from = &succession.from;
        if self.id != from.job_id {
            return Err(Error::JobReplaced { job: from.job.clone() });
        }
        let open = self.phase.open(&from.job)?;
        match open.version {
            Some(version) if version == from.version => Ok(Source {
                succession: succession.clone(),
                spec: self.spec.clone(),
                placement: open.placement.clone(),
            }),
            Some(current) if current > from.version => {
                let (job, version) = (from.job.clone(), from.version);
                Err(Error::VersionGone { job, version, current })
            }
            current => Err(Error::invalid(
                format!("version of job {:?} to continue from", from.job),
                from.version,
                match current {
                    Some(current) => format!("its current version, {current}"),
                    None => {
                        "a version that it has; its initial parameters are not complete".to_owned()
                    }
                },
            )),
        }
    }
}
