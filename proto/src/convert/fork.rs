//! Versions of jobs in messages.

use zeroshard_model::{Error, JobVersion, Result};

use crate::pb;

impl From<&JobVersion> for pb::JobVersion {
    fn from(JobVersion { job, job_id, version }: &JobVersion) -> Self {
        Self { job: job.clone(), job_id: *job_id, version: *version }
    }
}

impl TryFrom<pb::JobVersion> for JobVersion {
    type Error = Error;

    fn try_from(pb::JobVersion { job, job_id, version }: pb::JobVersion) -> Result<Self> {
        if job_id == 0 {
            let what = format!("job_id of the predecessor, job {job:?}");
            return Err(Error::invalid(
                what,
                0,
                "the job_id of JoinResponse or DescribeJobResponse",
            ));
        }
        Ok(Self { job, job_id, version })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_of_a_job_without_an_id_is_refused() {
        let named = JobVersion { job: "a".to_owned(), job_id: 7, version: 3 };
        assert_eq!(JobVersion::try_from(pb::JobVersion::from(&named)), Ok(named.clone()));
        let anonymous = pb::JobVersion { job_id: 0, ..(&named).into() };
        assert!(matches!(JobVersion::try_from(anonymous), Err(Error::Invalid { .. })));
    }
}
