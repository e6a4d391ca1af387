//! The optimizer of a job and its hyperparameters. Names, defaults and rules are those of torch.
//!
//! This module only describes optimizers, for clients and servers. The arithmetic of a step is in
//! the server's `backend`. The state tensors are listed here ([`Optimizer::state`]), because
//! snapshots and checkpoints name them.
//!
//! All parameter groups of a job share the kind and the state layout
//! ([`Optimizer::same_state_layout`]); everything else may differ between groups and between steps.
//! A step may use fewer state tensors ([`Optimizer::uses_state_of`]), and keeps the others.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

mod applied;
mod hyperparameters;
mod state_shape;

pub use applied::AppliedSteps;
pub use hyperparameters::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, Average, Invalid, Lamb, Lion, NAdam,
    RAdam, RmsProp, Sgd,
};
pub use state_shape::StateShape;

/// Declares the optimizers and their names.
macro_rules! optimizers {
    ($($(#[$doc:meta])* $kind:ident $name:literal,)*) => {
        /// An optimizer with its hyperparameters.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name", rename_all = "lowercase")]
        pub enum Optimizer {
            $($(#[$doc])* $kind($kind),)*
        }

        impl Optimizer {
            /// The names of all optimizers.
            pub const NAMES: &[&str] = &[$($name,)*];

            /// Every optimizer with torch's defaults.
            pub fn defaults() -> Vec<Optimizer> {
                vec![$(Optimizer::$kind($kind::default()),)*]
            }

            /// The name, as flags and manifests write it.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Optimizer::$kind(_) => $name,)*
                }
            }

            fn check_ranges(&self) -> Result<(), Invalid> {
                match self {
                    $(Optimizer::$kind(it) => it.check_ranges($name),)*
                }
            }
        }
    };
}

optimizers! {
    /// `torch.optim.SGD`.
    Sgd "sgd",
    /// `torch.optim.ASGD`: averaged stochastic gradient descent.
    Asgd "asgd",
    /// `torch.optim.Adam`: weight decay is added to the gradient.
    Adam "adam",
    /// `torch.optim.AdamW`: weight decay is decoupled.
    AdamW "adamw",
    /// `torch.optim.Adamax`: Adam with the infinity norm.
    Adamax "adamax",
    /// `torch.optim.NAdam`: Adam with Nesterov momentum.
    NAdam "nadam",
    /// `torch.optim.RAdam`: Adam with a rectified adaptive learning rate.
    RAdam "radam",
    /// `torch.optim.Adagrad`.
    Adagrad "adagrad",
    /// `torch.optim.Adadelta`.
    Adadelta "adadelta",
    /// `torch.optim.Adafactor`: the second moments of a matrix are those of its rows and columns.
    Adafactor "adafactor",
    /// `torch.optim.RMSprop`.
    RmsProp "rmsprop",
    /// Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
    Lion "lion",
    /// You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.
    Lamb "lamb",
    /// No optimizer: the parameters become the mean gradient, which every worker then applies by
    /// itself (plain data parallelism). It never skips a step: inf and NaN pass through.
    Average "average",
}

/// Evaluates an expression for the hyperparameters of any optimizer, and another expression for the
/// optimizer without hyperparameters.
macro_rules! for_any {
    ($optimizer:expr, $it:ident => $body:expr, else $none:expr) => {
        match $optimizer {
            Optimizer::Sgd($it) => $body,
            Optimizer::Asgd($it) => $body,
            Optimizer::Adam($it) => $body,
            Optimizer::AdamW($it) => $body,
            Optimizer::Adamax($it) => $body,
            Optimizer::NAdam($it) => $body,
            Optimizer::RAdam($it) => $body,
            Optimizer::Adagrad($it) => $body,
            Optimizer::Adadelta($it) => $body,
            Optimizer::Adafactor($it) => $body,
            Optimizer::RmsProp($it) => $body,
            Optimizer::Lion($it) => $body,
            Optimizer::Lamb($it) => $body,
            Optimizer::Average(_) => $none,
        }
    };
}

impl Optimizer {
    /// The state tensors of the optimizer, by torch's names, in the order in which they are stored.
    /// Each is f32; [`Optimizer::state_shapes`] are their shapes.
    pub const fn state(&self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd(sgd) if sgd.momentum != 0.0 => &["momentum_buffer"],
            Optimizer::Sgd(_) => &[],
            Optimizer::Asgd(_) => &["ax"],
            Optimizer::Adam(Adam { amsgrad, .. }) | Optimizer::AdamW(AdamW { amsgrad, .. }) => {
                if *amsgrad {
                    &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
                } else {
                    &["exp_avg", "exp_avg_sq"]
                }
            }
            Optimizer::Adamax(_) => &["exp_avg", "exp_inf"],
            Optimizer::NAdam(_) | Optimizer::RAdam(_) => &["exp_avg", "exp_avg_sq"],
            Optimizer::Adagrad(_) => &["sum"],
            Optimizer::Adadelta(_) => &["square_avg", "acc_delta"],
            Optimizer::Adafactor(_) => &["row_var", "col_var", "variance"],
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

    /// The state that is one f32 for a whole tensor, by torch's names, in the order in which
    /// [`AppliedSteps`] has them. (A number that depends on the number of applied steps alone
    /// is not part of the state.)
    pub const fn scalar_state(&self) -> &'static [&'static str] {
        match self {
            Optimizer::NAdam(_) => &["mu_product"],
            Optimizer::Asgd(_) => &["eta", "mu"],
            _ => &[],
        }
    }

    /// The initial value of all elements of the state tensors.
    pub const fn initial_state(&self) -> f32 {
        match self {
            Optimizer::Adagrad(adagrad) => adagrad.initial_accumulator_value as f32,
            _ => 0.0,
        }
    }

    /// Returns whether a step needs the whole tensor (its norm decides the update), so that the
    /// tensor must be one slice.
    pub const fn needs_whole_tensors(&self) -> bool {
        matches!(self, Optimizer::Lamb(_) | Optimizer::Adafactor(_))
    }

    /// Returns whether a step is skipped when a gradient is inf or NaN.
    pub const fn skips_overflow(&self) -> bool {
        !matches!(self, Optimizer::Average(_))
    }

    /// The learning rate; `None` if the optimizer does not have one.
    pub const fn lr(&self) -> Option<f64> {
        for_any!(self, it => Some(it.lr), else None)
    }

    /// Sets the learning rate, if the optimizer has one.
    pub const fn set_lr(&mut self, lr: f64) {
        for_any!(self, it => it.lr = lr, else ())
    }

    /// The weight decay; `None` if the optimizer does not have one.
    pub const fn weight_decay(&self) -> Option<f64> {
        for_any!(self, it => Some(it.weight_decay), else None)
    }

    /// Sets the weight decay, if the optimizer has one.
    pub const fn set_weight_decay(&mut self, weight_decay: f64) {
        for_any!(self, it => it.weight_decay = weight_decay, else ())
    }

    /// Returns whether the state of one optimizer can be used by the other: same kind, same state
    /// tensors.
    pub fn same_state_layout(&self, other: &Optimizer) -> bool {
        self.name() == other.name() && self.state() == other.state()
    }

    /// Returns whether a step of this optimizer finds its state tensors in a job of the other one:
    /// same kind, and no further state tensors.
    pub fn uses_state_of(&self, job: &Optimizer) -> bool {
        self.name() == job.name() && self.state().iter().all(|name| job.state().contains(name))
    }

    /// Checks every hyperparameter.
    ///
    /// # Errors
    /// The first hyperparameter that is out of range.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        match self {
            Optimizer::Sgd(sgd) => sgd.check_nesterov(),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for an unknown optimizer name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown optimizer {0:?}; it must be one of {names}", names = Optimizer::NAMES.join(", "))]
pub struct UnknownOptimizer(pub String);

/// Returns the optimizer with this name and torch's defaults.
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
        let error = "rprop".parse::<Optimizer>().unwrap_err();
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
    fn setters_change_the_results_of_the_getters() {
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
    fn only_changes_of_the_state_tensors_change_the_layout() {
        let plain = Optimizer::Sgd(Sgd::default());
        let momentum = Optimizer::Sgd(Sgd { momentum: 0.9, ..Sgd::default() });
        let mut other_lr = plain;
        other_lr.set_lr(7.0);
        assert!(plain.same_state_layout(&other_lr));
        assert!(!plain.same_state_layout(&momentum));
        assert!(plain.uses_state_of(&momentum) && !momentum.uses_state_of(&plain));
        // Adam and LAMB have state tensors of the same names, but cannot use each other's state.
        let adam = Optimizer::Adam(Adam::default());
        assert!(!adam.same_state_layout(&Optimizer::Lamb(Lamb::default())));
    }
}
