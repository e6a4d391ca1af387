//! The policy for checkpoints, and the checkpoint to restore, in messages.

use std::time::Duration;

use zeroshard_model::{
    CheckpointPolicy, Error, OnLoss, OnMemoryShortage, Restore, RestoreVersion, Result,
    checkpoint::check_url, limits::MAX_JOB_NAME, name::check_name,
};

use crate::pb;

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
    fn from(Restore { url, job, version, line }: &Restore) -> Self {
        let (version, if_any) = match *version {
            RestoreVersion::Exactly(version) => (Some(version), false),
            RestoreVersion::Latest => (None, false),
            RestoreVersion::LatestIfAny => (None, true),
        };
        Self { url: url.clone(), job: job.clone(), version, if_any, line: *line }
    }
}

impl TryFrom<pb::Restore> for Restore {
    type Error = Error;

    fn try_from(pb::Restore { url, job, version, if_any, line }: pb::Restore) -> Result<Self> {
        check_url(&url)?;
        check_name("name of the job that was saved", &job, MAX_JOB_NAME)?;
        let version = match (version, if_any) {
            (Some(u64::MAX), _) => {
                return Err(Error::invalid("version of the checkpoint", u64::MAX, "lower"));
            }
            (Some(version), false) => RestoreVersion::Exactly(version),
            (Some(version), true) => {
                return Err(Error::refused(format!(
                    "`if_any` is set for version {version}; leave out one of the two"
                )));
            }
            (None, false) => RestoreVersion::Latest,
            (None, true) => RestoreVersion::LatestIfAny,
        };
        Ok(Self { url, job, version, line })
    }
}

#[cfg(test)]
mod tests {
    use zeroshard_model::checkpoint::MAX_URL;

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
            let (url, job) = ("s3://b/p".to_owned(), "a".to_owned());
            let restore = Restore { url, job, version, line: Some(2) };
            assert_eq!(Restore::try_from(pb::Restore::from(&restore)), Ok(restore));
        }
        let both = pb::Restore {
            url: "s3://b".to_owned(),
            job: "a".to_owned(),
            version: Some(1),
            if_any: true,
            line: None,
        };
        assert!(matches!(Restore::try_from(both), Err(Error::Refused { .. })));
    }
}
