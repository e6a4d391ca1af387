//! Optimizers in messages.

use serde_json::Value;
use zeroshard_model::{Error, Optimizer, Result, job::check_number, limits::MAX_GROUPS};

use crate::pb;

/// Converts the parameter groups of a message.
///
/// # Errors
/// [`Error::Invalid`] for an unknown optimizer or hyperparameter, which it names, and for more than
/// [`MAX_GROUPS`] groups.
pub fn optimizers(messages: Vec<pb::Optimizer>) -> Result<Vec<Optimizer>> {
    check_number("parameter groups", messages.len(), MAX_GROUPS)?;
    messages.into_iter().map(Optimizer::try_from).collect()
}

impl From<&Optimizer> for pb::Optimizer {
    fn from(optimizer: &Optimizer) -> Self {
        let number = |value: Value| match value {
            Value::Bool(flag) => f64::from(u8::from(flag)),
            value => value.as_f64().unwrap_or(f64::NAN),
        };
        let fields =
            optimizer.hyperparameters().into_iter().map(|(name, value)| (name, number(value)));
        Self { name: optimizer.name().to_owned(), hyperparameters: fields.collect() }
    }
}

impl TryFrom<pb::Optimizer> for Optimizer {
    type Error = Error;

    fn try_from(message: pb::Optimizer) -> Result<Self> {
        let default: Optimizer = message.name.parse().map_err(|_| {
            let expected = format!("one of {}", Optimizer::NAMES.join(", "));
            Error::invalid("optimizer", format_args!("{:?}", message.name), expected)
        })?;
        let mut fields = default.hyperparameters();
        for (name, number) in message.hyperparameters {
            let what = format!("{name} of {}", default.name());
            let names = fields.keys().cloned().collect::<Vec<_>>().join(", ");
            let Some(field) = fields.get_mut(&name) else {
                let (optimizer, names) =
                    (default.name(), if names.is_empty() { "none" } else { &names });
                return Err(Error::refused(format!(
                    "{optimizer} has no hyperparameter {name:.200}; it has {names}"
                )));
            };
            *field = match field {
                Value::Bool(_) if number == 0.0 || number == 1.0 => Value::Bool(number == 1.0),
                Value::Bool(_) => return Err(Error::invalid(what, number, "0 or 1")),
                _ if number.is_finite() => Value::from(number),
                _ => return Err(Error::invalid(what, number, "a finite number")),
            };
        }
        fields.insert("name".to_owned(), Value::from(default.name()));
        serde_json::to_value(fields).and_then(serde_json::from_value).map_err(|e| {
            Error::refused(format!("the hyperparameters of {} are invalid: {e}", default.name()))
        })
    }
}
