//! The hyperparameters of each optimizer, with torch's names, defaults and ranges. Numbers must
//! also be finite as f32, because the kernels compute in f32.

use serde::{Deserialize, Serialize};

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
enum Range {
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
    fn check(
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

fn check(
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

/// Declares the hyperparameters of an optimizer, with their defaults and the ranges of numbers.
macro_rules! hyperparameters {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr $(=> $range:ident)?,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $name {
            #[allow(unused_variables, reason = "an optimizer may have no hyperparameters")]
            pub(super) fn check_ranges(&self, optimizer: &'static str) -> Result<(), Invalid> {
                $($(Range::$range.check(optimizer, stringify!($field), self.$field)?;)?)*
                Ok(())
            }
        }
    };
}

hyperparameters! {
    /// Hyperparameters of stochastic gradient descent.
    Sgd {
        /// Learning rate.
        lr: f64 = 1e-3 => NonNegative,
        /// Momentum factor; with 0 the optimizer keeps no state.
        momentum: f64 = 0.0 => NonNegative,
        /// The fraction of the gradient that is not added to the momentum buffer, from the second
        /// step on.
        dampening: f64 = 0.0 => Finite,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Nesterov momentum.
        nesterov: bool = false,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of averaged stochastic gradient descent. Step `t` sets the learning rate of
    /// the next step to `lr / (1 + lambd * lr * t)^alpha`.
    Asgd {
        /// Learning rate.
        lr: f64 = 1e-2 => NonNegative,
        /// Decay of the parameters and of the learning rate.
        lambd: f64 = 1e-4 => NonNegative,
        /// The exponent in the decay of the learning rate.
        alpha: f64 = 0.75 => NonNegative,
        /// The number of steps after which the parameters are averaged.
        t0: f64 = 1e6 => Finite,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adam.
    Adam {
        /// Learning rate.
        lr: f64 = 1e-3 => NonNegative,
        /// Decay of the first moment.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the second moment.
        beta2: f64 = 0.999 => BelowOne,
        /// Added to the denominator.
        eps: f64 = 1e-8 => NonNegative,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Divide by the maximum of all second moments so far.
        amsgrad: bool = false,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of AdamW.
    AdamW {
        /// Learning rate.
        lr: f64 = 1e-3 => NonNegative,
        /// Decay of the first moment.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the second moment.
        beta2: f64 = 0.999 => BelowOne,
        /// Added to the denominator.
        eps: f64 = 1e-8 => NonNegative,
        /// Decoupled weight decay: parameters are reduced by `lr * weight_decay` of their value.
        weight_decay: f64 = 1e-2 => NonNegative,
        /// Divide by the maximum of all second moments so far.
        amsgrad: bool = false,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adamax.
    Adamax {
        /// Learning rate.
        lr: f64 = 2e-3 => NonNegative,
        /// Decay of the first moment.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the infinity norm.
        beta2: f64 = 0.999 => BelowOne,
        /// Added to the absolute value of the gradient.
        eps: f64 = 1e-8 => NonNegative,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
        /// The formula of Paddle, which adds `eps` to the decayed infinity norm instead.
        paddle: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of NAdam.
    NAdam {
        /// Learning rate.
        lr: f64 = 2e-3 => NonNegative,
        /// Decay of the first moment.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the second moment.
        beta2: f64 = 0.999 => BelowOne,
        /// Added to the denominator.
        eps: f64 = 1e-8 => NonNegative,
        /// Weight decay, added to the gradient or, if it is decoupled, applied to the parameters.
        weight_decay: f64 = 0.0 => NonNegative,
        /// The speed at which the momentum approaches `beta1`, from half of it.
        momentum_decay: f64 = 4e-3 => NonNegative,
        /// Weight decay reduces the parameters by `lr * weight_decay` of their value, as in AdamW.
        decoupled_weight_decay: bool = false,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
        /// The arithmetic of Paddle, where the momentum stays constant from about step 2,470 on.
        paddle: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of RAdam.
    RAdam {
        /// Learning rate.
        lr: f64 = 1e-3 => NonNegative,
        /// Decay of the first moment.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the second moment.
        beta2: f64 = 0.999 => BelowOne,
        /// Added to the denominator.
        eps: f64 = 1e-8 => NonNegative,
        /// Weight decay, added to the gradient or, if it is decoupled, applied to the parameters.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Weight decay reduces the parameters by `lr * weight_decay` of their value, as in AdamW.
        decoupled_weight_decay: bool = false,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adagrad.
    Adagrad {
        /// Learning rate.
        lr: f64 = 1e-2 => NonNegative,
        /// The learning rate of step `t` (from 1) is `lr / (1 + (t - 1) * lr_decay)`.
        lr_decay: f64 = 0.0 => NonNegative,
        /// Added to the denominator.
        eps: f64 = 1e-10 => NonNegative,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// The initial value of the sum of squares. It is read once, when the state is created.
        initial_accumulator_value: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adadelta.
    Adadelta {
        /// Learning rate.
        lr: f64 = 1.0 => NonNegative,
        /// Decay of both running averages.
        rho: f64 = 0.9 => AtMostOne,
        /// Added under both square roots.
        eps: f64 = 1e-6 => NonNegative,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adafactor.
    Adafactor {
        /// Learning rate: the factor of the weight decay, and the limit of the step relative to the
        /// root mean square of the parameter, which is `1 / sqrt(t)` in step `t` if that is lower.
        lr: f64 = 1e-2 => NonNegative,
        /// The second moments of step `t` move towards the squared gradient by `t^beta2_decay`.
        beta2_decay: f64 = -0.8 => NonPositive,
        /// The minimum of the root of the estimated second moment, and of its mean. torch's default
        /// is the machine epsilon of the parameter's dtype; this is that of f32.
        eps1: f64 = f32::EPSILON as f64 => NonNegative,
        /// The minimum of the parameter's root mean square.
        eps2: f64 = 1e-3 => NonNegative,
        /// The root mean square of the update above which it is clipped.
        d: f64 = 1.0 => AtLeastOne,
        /// Decoupled weight decay: parameters are reduced by `lr * weight_decay` of their value.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of RMSprop.
    RmsProp {
        /// Learning rate.
        lr: f64 = 1e-2 => NonNegative,
        /// Decay of the mean of squares.
        alpha: f64 = 0.99 => AtMostOne,
        /// Added to the denominator.
        eps: f64 = 1e-8 => NonNegative,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Momentum factor; with 0 the optimizer keeps no momentum buffer.
        momentum: f64 = 0.0 => NonNegative,
        /// Divide by the standard deviation instead of the root mean square.
        centered: bool = false,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
        /// The formula of Paddle, which adds `eps` under the square root, and whose momentum buffer
        /// accumulates updates that are multiplied by their learning rate.
        paddle: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Lion.
    Lion {
        /// Learning rate.
        lr: f64 = 1e-4 => NonNegative,
        /// Weight of the momentum in the sign of the update.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the momentum.
        beta2: f64 = 0.99 => BelowOne,
        /// Decoupled weight decay: parameters are reduced by `lr * weight_decay` of their value.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of LAMB. The trust ratio is the tensor's `||w|| / ||update||`, or 1 if
    /// either norm is 0.
    Lamb {
        /// Learning rate.
        lr: f64 = 1e-3 => NonNegative,
        /// Decay of the first moment.
        beta1: f64 = 0.9 => BelowOne,
        /// Decay of the second moment.
        beta2: f64 = 0.999 => BelowOne,
        /// Added to the denominator.
        eps: f64 = 1e-6 => NonNegative,
        /// Weight decay, part of the update whose norm determines the trust ratio.
        weight_decay: f64 = 0.0 => NonNegative,
        /// Maximise the objective instead of minimising it.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Averaging has no hyperparameters.
    Average {}
}

impl Sgd {
    /// Nesterov momentum restricts the other hyperparameters.
    pub(super) fn check_nesterov(&self) -> Result<(), Invalid> {
        if !self.nesterov {
            return Ok(());
        }
        let expected = "greater than 0 if nesterov is true";
        check("sgd", "momentum", self.momentum, self.momentum > 0.0, expected)?;
        let expected = "0 if nesterov is true";
        check("sgd", "dampening", self.dampening, self.dampening == 0.0, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Optimizer, *};

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
