//! When and where jobs are saved, and what they are restored from.

use std::{ops::RangeInclusive, time::Duration};

use crate::{Error, Result, limits::MAX_JOB_NAME, manifest::check_name, pb};

/// The allowed intervals between checkpoints that are taken by time.
pub const INTERVALS: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(86_400 * 365);
/// The schemes of the URLs at which checkpoints can be stored.
pub const SCHEMES: [&str; 4] = ["file", "s3", "gs", "az"];
/// The maximum size of the data that a rank stores in a checkpoint, in bytes.
pub const MAX_USER_DATA: usize = 16 << 20;

/// The maximum length of a URL.
const MAX_URL: usize = 4096;

/// When and where a job is saved, and what happens when a server is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// The directory or prefix that holds the checkpoints of all jobs.
    pub url: String,
    /// The job is saved at each multiple of this version.
    pub every_steps: Option<u64>,
    /// The job is saved at the first version after this time since the last save began.
    pub every: Option<Duration>,
    /// The number of complete checkpoints that are kept; 0: all.
    pub keep: u32,
    /// The effect of the loss of a server that holds the only copy of a slice.
    pub on_loss: OnLoss,
    /// The effect of a server that has no memory for second copies of slices that are being saved.
    pub on_memory_shortage: OnMemoryShortage,
}

/// The effect of the loss of a server that holds the only copy of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLoss {
    /// The job fails.
    #[default]
    Fail,
    /// The job is restored from its last checkpoint.
    Restore,
}

/// The effect of a step on a slice that is being saved, where the server has no memory for a second
/// copy of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnMemoryShortage {
    /// The step waits until the slice is written, at most for 30 s. Then the save is given up.
    #[default]
    Wait,
    /// The save is given up with an error, and the step continues.
    GiveUp,
}

/// A checkpoint from which a job starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    /// The directory or prefix that holds the checkpoints.
    pub url: String,
    /// The name of the job that was saved.
    pub job: String,
    /// The version.
    pub version: RestoreVersion,
}

/// The version from which a job starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestoreVersion {
    /// This one.
    Exactly(u64),
    /// The latest complete checkpoint.
    Latest,
    /// The latest complete checkpoint; without one the job starts anew.
    LatestIfAny,
}

impl CheckpointPolicy {
    /// Checks the URL and the intervals.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn validate(&self) -> Result<()> {
        check_url(&self.url)?;
        if self.every_steps == Some(0) {
            return Err(Error::invalid("every_steps of the checkpoints", 0, "at least 1"));
        }
        if let Some(every) = self.every.filter(|every| !INTERVALS.contains(every)) {
            let expected = format!("{:?} to {:?}", INTERVALS.start(), INTERVALS.end());
            let what = "every_ms of the checkpoints";
            return Err(Error::invalid(what, format!("{every:?}"), expected));
        }
        Ok(())
    }
}

/// Checks the form of a URL. The store may still be unreachable.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_url(url: &str) -> Result<()> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    let is_known = scheme.is_some_and(|scheme| SCHEMES.contains(&scheme));
    if is_known && url.len() <= MAX_URL {
        return Ok(());
    }
    let expected = format!(
        "a URL with one of the schemes {}, for example file:///checkpoints or \
         s3://bucket/prefix, of at most {MAX_URL} bytes",
        SCHEMES.join(", ")
    );
    Err(Error::invalid("url of the checkpoints", format_args!("{url:?}"), expected))
}

impl From<&CheckpointPolicy> for pb::CheckpointPolicy {
    fn from(policy: &CheckpointPolicy) -> Self {
        Self {
            url: policy.url.clone(),
            every_steps: policy.every_steps,
            every_ms: policy.every.map(|every| every.as_millis() as u64),
            keep: policy.keep,
            on_loss: match policy.on_loss {
                OnLoss::Fail => pb::OnLoss::Fail,
                OnLoss::Restore => pb::OnLoss::Restore,
            }
            .into(),
            on_memory_shortage: match policy.on_memory_shortage {
                OnMemoryShortage::Wait => pb::OnMemoryShortage::Wait,
                OnMemoryShortage::GiveUp => pb::OnMemoryShortage::GiveUp,
            }
            .into(),
        }
    }
}

impl TryFrom<pb::CheckpointPolicy> for CheckpointPolicy {
    type Error = Error;

    fn try_from(message: pb::CheckpointPolicy) -> Result<Self> {
        let policy = Self {
            url: message.url,
            every_steps: message.every_steps,
            every: message.every_ms.map(Duration::from_millis),
            keep: message.keep,
            on_loss: match pb::OnLoss::try_from(message.on_loss) {
                Ok(pb::OnLoss::Unspecified | pb::OnLoss::Fail) => OnLoss::Fail,
                Ok(pb::OnLoss::Restore) => OnLoss::Restore,
                Err(_) => {
                    return Err(Error::invalid("on_loss", message.on_loss, "FAIL or RESTORE"));
                }
            },
            on_memory_shortage: match pb::OnMemoryShortage::try_from(message.on_memory_shortage) {
                Ok(pb::OnMemoryShortage::Unspecified | pb::OnMemoryShortage::Wait) => {
                    OnMemoryShortage::Wait
                }
                Ok(pb::OnMemoryShortage::GiveUp) => OnMemoryShortage::GiveUp,
                Err(_) => {
                    let (what, found) = ("on_memory_shortage", message.on_memory_shortage);
                    return Err(Error::invalid(what, found, "WAIT or GIVE_UP"));
                }
            },
        };
        policy.validate()?;
        Ok(policy)
    }
}

impl From<&Restore> for pb::Restore {
    fn from(Restore { url, job, version }: &Restore) -> Self {
        let (version, if_any) = match *version {
            RestoreVersion::Exactly(version) => (Some(version), false),
            RestoreVersion::Latest => (None, false),
            RestoreVersion::LatestIfAny => (None, true),
        };
        Self { url: url.clone(), job: job.clone(), version, if_any }
    }
}

impl TryFrom<pb::Restore> for Restore {
    type Error = Error;

    fn try_from(pb::Restore { url, job, version, if_any }: pb::Restore) -> Result<Self> {
        check_url(&url)?;
        check_name("name of the job that was saved", &job, MAX_JOB_NAME)?;
        let version = match (version, if_any) {
            (Some(u64::MAX), _) => {
                return Err(Error::invalid("version of the checkpoint", u64::MAX, "lower"));
            }
            (Some(version), false) => RestoreVersion::Exactly(version),
            (Some(version), true) => {
                let what = "if_any of the checkpoint";
                let found = format!("true with version {version}");
                return Err(Error::invalid(what, found, "false for a certain version"));
            }
            (None, false) => RestoreVersion::Latest,
            (None, true) => RestoreVersion::LatestIfAny,
        };
        Ok(Self { url, job, version })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> CheckpointPolicy {
        CheckpointPolicy {
            url: "file:///checkpoints".to_owned(),
            every_steps: Some(50),
            every: Some(Duration::from_secs(60)),
            keep: 3,
            on_loss: OnLoss::Restore,
            on_memory_shortage: OnMemoryShortage::GiveUp,
        }
    }

    #[test]
    fn a_policy_survives_the_wire() {
        let message = pb::CheckpointPolicy::from(&policy());
        assert_eq!(CheckpointPolicy::try_from(message), Ok(policy()));
    }

    #[test]
    fn an_invalid_policy_is_refused() {
        let message = || pb::CheckpointPolicy::from(&policy());
        for invalid in [
            pb::CheckpointPolicy { url: "/checkpoints".to_owned(), ..message() },
            pb::CheckpointPolicy { url: "ftp://host/checkpoints".to_owned(), ..message() },
            pb::CheckpointPolicy { url: format!("file:///{}", "a".repeat(MAX_URL)), ..message() },
            pb::CheckpointPolicy { every_steps: Some(0), ..message() },
            pb::CheckpointPolicy { every_ms: Some(999), ..message() },
            pb::CheckpointPolicy { every_ms: Some(u64::MAX), ..message() },
            pb::CheckpointPolicy { on_loss: 7, ..message() },
            pb::CheckpointPolicy { on_memory_shortage: 7, ..message() },
        ] {
            let refused = CheckpointPolicy::try_from(invalid);
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        }
    }

    #[test]
    fn a_checkpoint_to_restore_survives_the_wire() {
        for version in
            [RestoreVersion::Exactly(7), RestoreVersion::Latest, RestoreVersion::LatestIfAny]
        {
            let restore = Restore { url: "s3://b/p".to_owned(), job: "a".to_owned(), version };
            assert_eq!(Restore::try_from(pb::Restore::from(&restore)), Ok(restore));
        }
        let both = pb::Restore {
            url: "s3://b".to_owned(),
            job: "a".to_owned(),
            version: Some(1),
            if_any: true,
        };
        assert!(matches!(Restore::try_from(both), Err(Error::Invalid { .. })));
    }
}
