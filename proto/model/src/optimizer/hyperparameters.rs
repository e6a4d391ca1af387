//! The ranges of hyperparameters, which are torch's. Numbers must also be finite as f32, because
//! the kernels compute in f32.

/// A hyperparameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} of {optimizer} is {value}; it must be {expected}")]
pub struct Invalid {
    /// The optimizer's name.
    pub optimizer: &'static str,
    /// The hyperparameter's name.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// The allowed values.
    pub expected: &'static str,
}

/// The allowed range of a hyperparameter.
#[derive(Clone, Copy)]
pub(super) enum Range {
    /// Any finite number.
    Finite,
    NonNegative,
    NonPositive,
    AtLeastOne,
    /// 0 to 1, without 1.
    BelowOne,
    /// 0 to 1, with 1.
    AtMostOne,
}

impl Range {
    pub(super) fn check(
        self,
        optimizer: &'static str,
        field: &'static str,
        value: f64,
    ) -> Result<(), Invalid> {
        let is_finite = (value as f32).is_finite();
        let (holds, expected) = match self {
            Self::Finite => (is_finite, "a finite number"),
            Self::NonNegative => (is_finite && value >= 0.0, "a finite number of at least 0"),
            Self::NonPositive => (is_finite && value <= 0.0, "a finite number of at most 0"),
            Self::AtLeastOne => (is_finite && value >= 1.0, "a finite number of at least 1"),
            Self::BelowOne => ((0.0..1.0).contains(&value), "at least 0 and less than 1"),
            Self::AtMostOne => ((0.0..=1.0).contains(&value), "at least 0 and at most 1"),
        };
        check(optimizer, field, value, holds, expected)
    }
}

pub(super) fn check(
    optimizer: &'static str,
    field: &'static str,
    value: f64,
    holds: bool,
    expected: &'static str,
) -> Result<(), Invalid> {
    if holds {
        return Ok(());
    }
    Err(Invalid { optimizer, field, value: value.to_string(), expected })
}

#[cfg(test)]
mod tests {
    use super::super::{Adadelta, Adam, Lion, Optimizer, Sgd};

    /// The field named by the error for an optimizer in JSON.
    fn refused(json: &str) -> &'static str {
        let optimizer: Optimizer = serde_json::from_str(json).unwrap();
        optimizer.validate().unwrap_err().field
    }

    #[test]
    fn torch_defaults_are_valid() {
        for optimizer in Optimizer::defaults() {
            assert_eq!(optimizer.validate(), Ok(()));
        }
    }

    #[test]
    fn every_hyperparameter_is_checked_for_sign_and_magnitude() {
        for optimizer in Optimizer::defaults() {
            let json = serde_json::to_value(optimizer).unwrap();
            let numbers = json.as_object().unwrap().iter().filter(|(_, value)| value.is_f64());
            for (field, _) in numbers {
                for bad in [-1.0, 1e39] {
                    if ["dampening", "t0", "beta2_decay"].contains(&field.as_str()) && bad == -1.0 {
                        continue; // torch allows it here
                    }
                    let mut json = json.clone();
                    json[field] = bad.into();
                    assert_eq!(refused(&json.to_string()), field);
                }
            }
        }
    }

    #[test]
    fn nan_and_infinity_are_refused() {
        for mut optimizer in Optimizer::defaults().into_iter().filter(|it| it.lr().is_some()) {
            for bad in [f64::NAN, f64::INFINITY] {
                optimizer.set_lr(bad);
                assert_eq!(optimizer.validate().unwrap_err().field, "lr");
            }
            optimizer.set_lr(0.0);
            optimizer.set_weight_decay(f64::NAN);
            assert_eq!(optimizer.validate().unwrap_err().field, "weight_decay");
        }
        let nan = f64::NAN;
        let sgd = Sgd { dampening: nan, ..Sgd::default() };
        let adam = Adam { beta2: nan, ..Adam::default() };
        let adadelta = Adadelta { rho: nan, ..Adadelta::default() };
        assert_eq!(Optimizer::Sgd(sgd).validate().unwrap_err().field, "dampening");
        assert_eq!(Optimizer::Adam(adam).validate().unwrap_err().field, "beta2");
        assert_eq!(Optimizer::Adadelta(adadelta).validate().unwrap_err().field, "rho");
    }

    #[test]
    fn nesterov_needs_momentum_and_no_dampening() {
        assert_eq!(refused(r#"{"name":"sgd","nesterov":true}"#), "momentum");
        let dampened = r#"{"name":"sgd","nesterov":true,"momentum":0.9,"dampening":0.1}"#;
        assert_eq!(refused(dampened), "dampening");
        let json = r#"{"name":"sgd","nesterov":true,"momentum":0.9}"#;
        let right: Optimizer = serde_json::from_str(json).unwrap();
        assert_eq!(right.validate(), Ok(()));
    }

    #[test]
    fn a_beta_of_one_is_refused_and_a_rho_of_one_is_not() {
        assert_eq!(refused(r#"{"name":"adam","beta2":1.0}"#), "beta2");
        let json = r#"{"name":"adadelta","rho":1.0}"#;
        let adadelta: Optimizer = serde_json::from_str(json).unwrap();
        assert_eq!(adadelta.validate(), Ok(()));
    }

    #[test]
    fn the_error_states_the_invalid_value_and_the_valid_range() {
        let lion = Optimizer::Lion(Lion { beta1: 1.5, ..Lion::default() });
        assert_eq!(
            lion.validate().unwrap_err().to_string(),
            "beta1 of lion is 1.5; it must be at least 0 and less than 1"
        );
    }
}
