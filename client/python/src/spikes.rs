//! Policies on spikes, as Python describes them.

use pyo3::prelude::*;
use zeroshard_client::Error;
use zeroshard_model::{SpikeAction, SpikePolicy};

use crate::error::raise;

/// Action, factors of norm and loss, window, steps with inf or NaN, steps to rewind, limit and its
/// batches.
pub(crate) type Spikes = (String, Option<f64>, Option<f64>, u32, u32, u64, u32, u64);

/// # Errors
/// `InvalidArgumentError` for an unknown action. The servers check the numbers.
pub(crate) fn policy(given: Spikes) -> PyResult<SpikePolicy> {
    let (action, norm_factor, loss_factor, window, nonfinite_steps, steps, limit, limit_batches) =
        given;
    let action = match action.as_str() {
        "skip" => SpikeAction::Skip,
        "rewind" => SpikeAction::Rewind { steps },
        "stop" => SpikeAction::Stop,
        other => {
            let found = format!("{other:?}");
            return Err(raise(Error::invalid("action", found, "\"skip\", \"rewind\" or \"stop\"")));
        }
    };
    Ok(SpikePolicy {
        action,
        norm_factor,
        loss_factor,
        window,
        nonfinite_steps,
        limit,
        limit_batches,
    })
}
