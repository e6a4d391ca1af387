//! Python exceptions for [`Error`]: classes of `zeroshard.errors`.
//!
//! The class of a variant has the variant's name with `Error` appended: `JobFailed` is
//! `JobFailedError`. The exceptions are `Invalid` and `Refused`, which are `InvalidArgumentError`.

use pyo3::{exceptions::PyRuntimeError, prelude::*};
use zeroshard_model::Error;

/// The exception for `error`. Its attributes are the fields of the variant (job, step, ...).
pub(crate) fn raise(error: Error) -> PyErr {
    Python::attach(|py| exception(py, &error).unwrap_or_else(|broken| broken))
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let serde_json::Value::Object(fields) = serde_json::to_value(error).unwrap_or_default() else {
        return Err(PyRuntimeError::new_err(error.to_string()));
    };
    let reason = fields.get("reason").and_then(|reason| reason.as_str()).unwrap_or_default();
    let module = py.import("zeroshard.errors")?;
    let class = module.getattr(class_name(reason)).or_else(|_| module.getattr("Error"))?;
    let value = class.call1((error.to_string(),))?;
    for (name, field) in &fields {
        match field {
            serde_json::Value::String(text) => value.setattr(name.as_str(), text)?,
            serde_json::Value::Number(number) => value.setattr(name.as_str(), number.as_u64())?,
            _ => {}
        }
    }
    Ok(PyErr::from_value(value))
}

/// `STEP_ABORTED` -> `StepAbortedError`.
fn class_name(reason: &str) -> String {
    let is_argument = matches!(reason, "INVALID" | "REFUSED");
    let reason = if is_argument { "INVALID_ARGUMENT" } else { reason };
    let words = reason.split('_').chain(["ERROR"]).map(|word| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_uppercase() + &rest.to_lowercase()
    });
    words.collect()
}
