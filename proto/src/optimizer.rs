//! Which optimizer a job runs and with which hyperparameters: names, defaults and rules are
//! torch's.
//!
//! Pure description, shared by client and servers. What a step does to numbers is the server's
//! `backend`; which state tensors it keeps is said here ([`Optimizer::state`]), because snapshots
//! and checkpoints name them.
//!
//! All parameter groups of a job share the kind and the state layout
//! ([`Optimizer::same_state_layout`]); everything else may differ from group to group and from step
//! to step.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

mod rules;

pub use rules::Invalid;

/// An optimizer with its hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Optimizer {
    /// `torch.optim.SGD`.
    Sgd(Sgd),
    /// `torch.optim.Adam`: weight decay is added to the gradient.
    Adam(Adam),
    /// `torch.optim.AdamW`: weight decay is decoupled.
    AdamW(AdamW),
    /// `torch.optim.Adagrad`.
    Adagrad(Adagrad),
    /// `torch.optim.Adadelta`.
    Adadelta(Adadelta),
    /// `torch.optim.RMSprop`.
    RmsProp(RmsProp),
    /// Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
    Lion(Lion),
    /// You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.
    Lamb(Lamb),
    /// No optimizer: the parameters become the mean gradient, which every worker then applies by
    /// itself (plain data parallelism). It never skips a step: inf and NaN pass through.
    Average(Average),
}

/// Declares one optimizer's hyperparameters with torch's defaults.
macro_rules! hyperparameters {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

hyperparameters! {
    /// Hyperparameters of stochastic gradient descent.
    Sgd {
        /// Learning rate.
        lr: f64 = 1e-3,
        /// Momentum factor; 0 keeps no state.
        momentum: f64 = 0.0,
        /// Share of the gradient kept out of the momentum buffer, from the second step on.
        dampening: f64 = 0.0,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0,
        /// Nesterov momentum.
        nesterov: bool = false,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adam.
    Adam {
        /// Learning rate.
        lr: f64 = 1e-3,
        /// Decay of the first moment.
        beta1: f64 = 0.9,
        /// Decay of the second moment.
        beta2: f64 = 0.999,
        /// Added to the denominator.
        eps: f64 = 1e-8,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0,
        /// Divide by the largest second moment so far.
        amsgrad: bool = false,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of AdamW.
    AdamW {
        /// Learning rate.
        lr: f64 = 1e-3,
        /// Decay of the first moment.
        beta1: f64 = 0.9,
        /// Decay of the second moment.
        beta2: f64 = 0.999,
        /// Added to the denominator.
        eps: f64 = 1e-8,
        /// Decoupled weight decay: parameters shrink by `lr * weight_decay` of themselves.
        weight_decay: f64 = 1e-2,
        /// Divide by the largest second moment so far.
        amsgrad: bool = false,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adagrad.
    Adagrad {
        /// Learning rate.
        lr: f64 = 1e-2,
        /// The learning rate of step `t` (from 1) is `lr / (1 + (t - 1) * lr_decay)`.
        lr_decay: f64 = 0.0,
        /// Added to the denominator.
        eps: f64 = 1e-10,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0,
        /// What the sum of squares starts at. Read once, when the state is made.
        initial_accumulator_value: f64 = 0.0,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Adadelta.
    Adadelta {
        /// Learning rate.
        lr: f64 = 1.0,
        /// Decay of both running averages.
        rho: f64 = 0.9,
        /// Added under both square roots.
        eps: f64 = 1e-6,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of RMSprop.
    RmsProp {
        /// Learning rate.
        lr: f64 = 1e-2,
        /// Decay of the mean of squares.
        alpha: f64 = 0.99,
        /// Added to the denominator.
        eps: f64 = 1e-8,
        /// Weight decay, added to the gradient.
        weight_decay: f64 = 0.0,
        /// Momentum factor; 0 keeps no momentum buffer.
        momentum: f64 = 0.0,
        /// Divide by the standard deviation instead of the root mean square.
        centered: bool = false,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of Lion.
    Lion {
        /// Learning rate.
        lr: f64 = 1e-4,
        /// Weight of the momentum in the update's sign.
        beta1: f64 = 0.9,
        /// Decay of the momentum.
        beta2: f64 = 0.99,
        /// Decoupled weight decay: parameters shrink by `lr * weight_decay` of themselves.
        weight_decay: f64 = 0.0,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Hyperparameters of LAMB. The trust ratio is the tensor's `||w|| / ||update||`, or 1 where
    /// either is 0.
    Lamb {
        /// Learning rate.
        lr: f64 = 1e-3,
        /// Decay of the first moment.
        beta1: f64 = 0.9,
        /// Decay of the second moment.
        beta2: f64 = 0.999,
        /// Added to the denominator.
        eps: f64 = 1e-6,
        /// Weight decay, a part of the update whose norm makes the trust ratio.
        weight_decay: f64 = 0.0,
        /// Climb instead of descend.
        maximize: bool = false,
    }
}

hyperparameters! {
    /// Averaging has no hyperparameters.
    Average {}
}

/// Evaluates an expression on whichever optimizer it is; another for the one that has no
/// hyperparameters.
macro_rules! for_any {
    ($optimizer:expr, $it:ident => $body:expr, else $none:expr) => {
        match $optimizer {
            Optimizer::Sgd($it) => $body,
            Optimizer::Adam($it) => $body,
            Optimizer::AdamW($it) => $body,
            Optimizer::Adagrad($it) => $body,
            Optimizer::Adadelta($it) => $body,
            Optimizer::RmsProp($it) => $body,
            Optimizer::Lion($it) => $body,
            Optimizer::Lamb($it) => $body,
            Optimizer::Average(_) => $none,
        }
    };
}

impl Optimizer {
    /// Every kind with torch's defaults.
    pub fn defaults() -> [Optimizer; 9] {
        [
            Optimizer::Sgd(Sgd::default()),
            Optimizer::Adam(Adam::default()),
            Optimizer::AdamW(AdamW::default()),
            Optimizer::Adagrad(Adagrad::default()),
            Optimizer::Adadelta(Adadelta::default()),
            Optimizer::RmsProp(RmsProp::default()),
            Optimizer::Lion(Lion::default()),
            Optimizer::Lamb(Lamb::default()),
            Optimizer::Average(Average::default()),
        ]
    }

    /// The kind's name, as flags and manifests write it.
    pub const fn name(&self) -> &'static str {
        match self {
            Optimizer::Sgd(_) => "sgd",
            Optimizer::Adam(_) => "adam",
            Optimizer::AdamW(_) => "adamw",
            Optimizer::Adagrad(_) => "adagrad",
            Optimizer::Adadelta(_) => "adadelta",
            Optimizer::RmsProp(_) => "rmsprop",
            Optimizer::Lion(_) => "lion",
            Optimizer::Lamb(_) => "lamb",
            Optimizer::Average(_) => "average",
        }
    }

    /// The state tensors it keeps, by torch's names, in the order in which they are stored. Each is
    /// f32 and of the parameter's size.
    pub const fn state(&self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd(sgd) if sgd.momentum != 0.0 => &["momentum_buffer"],
            Optimizer::Sgd(_) => &[],
            Optimizer::Adam(Adam { amsgrad, .. }) | Optimizer::AdamW(AdamW { amsgrad, .. }) => {
                if *amsgrad {
                    &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
                } else {
                    &["exp_avg", "exp_avg_sq"]
                }
            }
            Optimizer::Adagrad(_) => &["sum"],
            Optimizer::Adadelta(_) => &["square_avg", "acc_delta"],
            Optimizer::RmsProp(rms) => match (rms.momentum != 0.0, rms.centered) {
                (false, false) => &["square_avg"],
                (true, false) => &["square_avg", "momentum_buffer"],
                (false, true) => &["square_avg", "grad_avg"],
                (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
            },
            Optimizer::Lion(_) => &["exp_avg"],
            Optimizer::Lamb(_) => &["exp_avg", "exp_avg_sq"],
            Optimizer::Average(_) => &[],
        }
    }

    /// Whether a step needs a tensor in one piece (its norm decides the update), so that the tensor
    /// must be one slice.
    pub const fn needs_whole_tensors(&self) -> bool {
        matches!(self, Optimizer::Lamb(_))
    }

    /// Whether a step is skipped when a gradient is inf or NaN.
    pub const fn skips_overflow(&self) -> bool {
        !matches!(self, Optimizer::Average(_))
    }

    /// The learning rate; `None` where there is none to have.
    pub const fn lr(&self) -> Option<f64> {
        for_any!(self, it => Some(it.lr), else None)
    }

    /// Sets the learning rate, where there is one.
    pub const fn set_lr(&mut self, lr: f64) {
        for_any!(self, it => it.lr = lr, else ())
    }

    /// The weight decay; `None` where there is none to have.
    pub const fn weight_decay(&self) -> Option<f64> {
        for_any!(self, it => Some(it.weight_decay), else None)
    }

    /// Sets the weight decay, where there is one.
    pub const fn set_weight_decay(&mut self, weight_decay: f64) {
        for_any!(self, it => it.weight_decay = weight_decay, else ())
    }

    /// Whether state that one of them made can go on under the other: same kind, same state
    /// tensors.
    pub fn same_state_layout(&self, other: &Optimizer) -> bool {
        self.name() == other.name() && self.state() == other.state()
    }

    /// Checks every hyperparameter.
    ///
    /// # Errors
    /// The first one that is out of its range.
    pub fn validate(&self) -> Result<(), Invalid> {
        rules::validate(self)
    }
}

impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no optimizer's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown optimizer {0:?}: it must be one of sgd, adam, adamw, adagrad, adadelta, rmsprop, lion, lamb, average"
)]
pub struct UnknownOptimizer(pub String);

/// A kind's name gives it with torch's defaults.
impl FromStr for Optimizer {
    type Err = UnknownOptimizer;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Optimizer::defaults()
            .into_iter()
            .find(|optimizer| optimizer.name() == name)
            .ok_or_else(|| UnknownOptimizer(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_serde_writes_the_same_names() {
        for optimizer in Optimizer::defaults() {
            assert_eq!(optimizer.name().parse(), Ok(optimizer));
            let json = serde_json::to_value(optimizer).unwrap();
            assert_eq!(json["name"], optimizer.name());
            assert_eq!(serde_json::from_value::<Optimizer>(json).unwrap(), optimizer);
        }
        let error = "adamax".parse::<Optimizer>().unwrap_err();
        for optimizer in Optimizer::defaults() {
            assert!(error.to_string().contains(optimizer.name()));
        }
    }

    #[test]
    fn absent_hyperparameters_are_torch_defaults_and_unknown_ones_are_refused() {
        let adamw: Optimizer = serde_json::from_str(r#"{"name":"adamw","lr":0.5}"#).unwrap();
        let expected = AdamW { lr: 0.5, ..AdamW::default() };
        assert_eq!(adamw, Optimizer::AdamW(expected));
        assert!(serde_json::from_str::<Optimizer>(r#"{"name":"adamw","lrr":0.5}"#).is_err());
    }

    #[test]
    fn setters_change_what_the_getters_read() {
        for mut optimizer in Optimizer::defaults() {
            optimizer.set_lr(0.25);
            optimizer.set_weight_decay(0.125);
            let expected = match optimizer {
                Optimizer::Average(_) => (None, None),
                _ => (Some(0.25), Some(0.125)),
            };
            assert_eq!((optimizer.lr(), optimizer.weight_decay()), expected);
        }
    }

    #[test]
    fn only_what_changes_the_state_tensors_changes_the_layout() {
        let plain = Optimizer::Sgd(Sgd::default());
        let momentum = Optimizer::Sgd(Sgd { momentum: 0.9, ..Sgd::default() });
        let mut other_lr = plain;
        other_lr.set_lr(7.0);
        assert!(plain.same_state_layout(&other_lr));
        assert!(!plain.same_state_layout(&momentum));
        // Adam and LAMB keep tensors of the same names, and still cannot go on from each other.
        let adam = Optimizer::Adam(Adam::default());
        assert!(!adam.same_state_layout(&Optimizer::Lamb(Lamb::default())));
    }
}
