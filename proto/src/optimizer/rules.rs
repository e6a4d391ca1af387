//! Every hyperparameter's range. torch's rules, and two of our own: a number must be finite as f32,
//! since the kernels compute in f32, and averages' weights must not leave `0..=1`.

use super::{Adadelta, Adagrad, Adam, AdamW, Lamb, Lion, Optimizer, RmsProp, Sgd};

/// A hyperparameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{optimizer}: {field} is {value}: it must be {expected}")]
pub struct Invalid {
    /// The optimizer's name.
    pub optimizer: &'static str,
    /// The hyperparameter's name.
    pub field: &'static str,
    /// What it was.
    pub value: String,
    /// What would be right.
    pub expected: &'static str,
}

pub(super) fn validate(optimizer: &Optimizer) -> Result<(), Invalid> {
    let rules = Rules(optimizer.name());
    match *optimizer {
        Optimizer::Sgd(sgd) => rules.sgd(&sgd),
        Optimizer::Adam(Adam { lr, beta1, beta2, eps, weight_decay, .. })
        | Optimizer::AdamW(AdamW { lr, beta1, beta2, eps, weight_decay, .. })
        | Optimizer::Lamb(Lamb { lr, beta1, beta2, eps, weight_decay, .. }) => {
            rules.non_negative(&[("lr", lr), ("eps", eps), ("weight_decay", weight_decay)])?;
            rules.below_one(&[("beta1", beta1), ("beta2", beta2)])
        }
        Optimizer::Adagrad(Adagrad {
            lr,
            lr_decay,
            eps,
            weight_decay,
            initial_accumulator_value,
            ..
        }) => rules.non_negative(&[
            ("lr", lr),
            ("lr_decay", lr_decay),
            ("eps", eps),
            ("weight_decay", weight_decay),
            ("initial_accumulator_value", initial_accumulator_value),
        ]),
        Optimizer::Adadelta(Adadelta { lr, rho, eps, weight_decay, .. }) => {
            rules.non_negative(&[("lr", lr), ("eps", eps), ("weight_decay", weight_decay)])?;
            rules.share("rho", rho)
        }
        Optimizer::RmsProp(RmsProp { lr, alpha, eps, weight_decay, momentum, .. }) => {
            rules.non_negative(&[
                ("lr", lr),
                ("eps", eps),
                ("weight_decay", weight_decay),
                ("momentum", momentum),
            ])?;
            rules.share("alpha", alpha)
        }
        Optimizer::Lion(Lion { lr, beta1, beta2, weight_decay, .. }) => {
            rules.non_negative(&[("lr", lr), ("weight_decay", weight_decay)])?;
            rules.below_one(&[("beta1", beta1), ("beta2", beta2)])
        }
        Optimizer::Average(_) => Ok(()),
    }
}

/// The checks, for the optimizer of that name.
struct Rules(&'static str);

impl Rules {
    fn sgd(&self, sgd: &Sgd) -> Result<(), Invalid> {
        self.non_negative(&[
            ("lr", sgd.lr),
            ("momentum", sgd.momentum),
            ("weight_decay", sgd.weight_decay),
        ])?;
        let dampening_fits = in_f32(sgd.dampening);
        self.check("dampening", sgd.dampening, dampening_fits, "a finite number")?;
        if sgd.nesterov {
            let expected = "greater than 0 where nesterov is on";
            self.check("momentum", sgd.momentum, sgd.momentum > 0.0, expected)?;
            let expected = "0 where nesterov is on";
            self.check("dampening", sgd.dampening, sgd.dampening == 0.0, expected)?;
        }
        Ok(())
    }

    fn non_negative(&self, fields: &[(&'static str, f64)]) -> Result<(), Invalid> {
        fields.iter().try_for_each(|&(field, value)| {
            let holds = value >= 0.0 && in_f32(value);
            self.check(field, value, holds, "a finite number of at least 0")
        })
    }

    fn below_one(&self, fields: &[(&'static str, f64)]) -> Result<(), Invalid> {
        fields.iter().try_for_each(|&(field, value)| {
            let holds = (0.0..1.0).contains(&value);
            self.check(field, value, holds, "at least 0 and less than 1")
        })
    }

    fn share(&self, field: &'static str, value: f64) -> Result<(), Invalid> {
        let holds = (0.0..=1.0).contains(&value);
        self.check(field, value, holds, "at least 0 and at most 1")
    }

    fn check(
        &self,
        field: &'static str,
        value: f64,
        holds: bool,
        expected: &'static str,
    ) -> Result<(), Invalid> {
        if holds {
            return Ok(());
        }
        Err(Invalid { optimizer: self.0, field, value: value.to_string(), expected })
    }
}

fn in_f32(value: f64) -> bool {
    (value as f32).is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The optimizer of that JSON, refused: the field that is named.
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
    fn every_number_of_every_optimizer_is_checked_for_sign_and_size() {
        for optimizer in Optimizer::defaults() {
            let json = serde_json::to_value(optimizer).unwrap();
            let numbers = json.as_object().unwrap().iter().filter(|(_, value)| value.is_f64());
            for (field, _) in numbers {
                for bad in [-1.0, 1e39] {
                    if field == "dampening" && bad == -1.0 {
                        continue; // torch allows any number here
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
    fn the_error_says_what_was_wrong_and_what_would_be_right() {
        let lion = Optimizer::Lion(Lion { beta1: 1.5, ..Lion::default() });
        assert_eq!(
            lion.validate().unwrap_err().to_string(),
            "lion: beta1 is 1.5: it must be at least 0 and less than 1"
        );
    }
}
