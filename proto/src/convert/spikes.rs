//! Policies on spikes, and the figures of recent steps, in messages.

use zeroshard_model::{Error, RecentSteps, Result, SpikeAction, SpikePolicy};

use crate::pb;

impl From<&SpikePolicy> for pb::SpikePolicy {
    fn from(policy: &SpikePolicy) -> Self {
        let (action, rewind_steps) = match policy.action {
            SpikeAction::Skip => (pb::SpikeAction::Skip, 0),
            SpikeAction::Rewind { steps } => (pb::SpikeAction::Rewind, steps),
            SpikeAction::Stop => (pb::SpikeAction::Stop, 0),
        };
        Self {
            action: action.into(),
            norm_factor: policy.norm_factor,
            loss_factor: policy.loss_factor,
            window: policy.window,
            nonfinite_steps: policy.nonfinite_steps,
            rewind_steps,
            limit: policy.limit,
            limit_batches: policy.limit_batches,
        }
    }
}

impl TryFrom<pb::SpikePolicy> for SpikePolicy {
    type Error = Error;

    fn try_from(message: pb::SpikePolicy) -> Result<Self> {
        let action = match pb::SpikeAction::try_from(message.action) {
            Ok(pb::SpikeAction::Skip) => SpikeAction::Skip,
            Ok(pb::SpikeAction::Rewind) => SpikeAction::Rewind { steps: message.rewind_steps },
            Ok(pb::SpikeAction::Stop) => SpikeAction::Stop,
            Ok(pb::SpikeAction::Unspecified) | Err(_) => {
                let expected = "SKIP, REWIND or STOP";
                return Err(Error::invalid(
                    "action of the policy on spikes",
                    message.action,
                    expected,
                ));
            }
        };
        Ok(Self {
            action,
            norm_factor: message.norm_factor,
            loss_factor: message.loss_factor,
            window: message.window,
            nonfinite_steps: message.nonfinite_steps,
            limit: message.limit,
            limit_batches: message.limit_batches,
        })
    }
}

impl From<&RecentSteps> for pb::RecentSteps {
    fn from(recent: &RecentSteps) -> Self {
        let RecentSteps { norms, losses, nonfinite, spikes } = recent.clone();
        Self { norms, losses, nonfinite, spikes }
    }
}

impl TryFrom<pb::RecentSteps> for RecentSteps {
    type Error = Error;

    fn try_from(message: pb::RecentSteps) -> Result<Self> {
        let pb::RecentSteps { norms, losses, nonfinite, spikes } = message;
        let recent = Self { norms, losses, nonfinite, spikes };
        recent.validate()?;
        Ok(recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_survive_the_wire_and_unknown_actions_are_refused() {
        for action in [SpikeAction::Skip, SpikeAction::Rewind { steps: 7 }, SpikeAction::Stop] {
            let policy = SpikePolicy { loss_factor: Some(2.0), ..SpikePolicy::new(action) };
            assert_eq!(SpikePolicy::try_from(pb::SpikePolicy::from(&policy)), Ok(policy));
        }
        for action in [0, 9] {
            let message = pb::SpikePolicy { action, ..pb::SpikePolicy::default() };
            assert!(matches!(SpikePolicy::try_from(message), Err(Error::Invalid { .. })));
        }
    }

    #[test]
    fn recent_steps_survive_the_wire_and_damaged_ones_are_refused() {
        let recent = RecentSteps {
            norms: vec![1.0, 2.0],
            losses: vec![-1.0],
            nonfinite: 3,
            spikes: vec![4, 9],
        };
        let message = pb::RecentSteps::from(&recent);
        assert_eq!(RecentSteps::try_from(message.clone()), Ok(recent));
        let damaged = [
            pb::RecentSteps { norms: vec![-1.0], ..message.clone() },
            pb::RecentSteps { losses: vec![f64::NAN], ..message.clone() },
            pb::RecentSteps { spikes: vec![2, 1], ..message },
        ];
        for message in damaged {
            assert!(matches!(RecentSteps::try_from(message), Err(Error::Invalid { .. })));
        }
    }
}
