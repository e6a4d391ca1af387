//! The optimizer of a job and its hyperparameters. Names, defaults and rules are those of torch.
//!
//! This module only describes optimizers, for clients and servers. The arithmetic of a step is in
//! the server's kernels. The state tensors are listed here ([`Optimizer::state`]), because
//! snapshots and checkpoints name them.
//!
//! A parameter group keeps the kind and the state layout that it has in the job's specification;
//! everything else may differ between steps. A step may use fewer state tensors
//! ([`Optimizer::uses_state_of`]), and keeps the others.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

mod applied;
mod hyperparameters;
mod kinds;
mod state_dtype;
mod state_shape;

use hyperparameters::Range;

pub use applied::AppliedSteps;
pub use hyperparameters::Invalid;
pub use state_dtype::{Code, StateDType, UnknownStateDType};
pub use state_shape::StateShape;

/// Declares the optimizers of the table in [`kinds`], and their hyperparameters.
macro_rules! declare {
    ($($(#[$doc:meta])* $kind:ident $name:ident {
        state($it:pat) = $state:expr;
        $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr $(=> $range:ident)?,)*
    })*) => {
        /// An optimizer with its hyperparameters.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name", rename_all = "lowercase")]
        pub enum Optimizer {
            $($(#[$doc])* $kind($kind),)*
        }

        impl Optimizer {
            /// The names of all optimizers.
            pub const NAMES: &[&str] = &[$(stringify!($name),)*];

            /// Every optimizer with torch's defaults.
            pub fn defaults() -> Vec<Optimizer> {
                vec![$(Optimizer::$kind($kind::default()),)*]
            }

            /// The name, as flags and manifests write it.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Optimizer::$kind(_) => stringify!($name),)*
                }
            }

            /// The state tensors of the optimizer, by torch's names, in the order in which they are
            /// stored. [`Optimizer::state_shapes`] are their shapes.
            pub const fn state(&self) -> &'static [&'static str] {
                match self {
                    $(Optimizer::$kind($it) => $state,)*
                }
            }

            /// The hyperparameters that are numbers, and their ranges.
            fn numbers(&mut self) -> Vec<(&'static str, Range, &mut f64)> {
                match self {
                    $(#[allow(unused_variables, reason = "an optimizer may have no numbers")]
                    Optimizer::$kind(it) => {
                        vec![$($((stringify!($field), Range::$range, &mut it.$field),)?)*]
                    })*
                }
            }
        }

        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $kind { $($(#[$field_doc])* pub $field: $type,)* }

            impl Default for $kind {
                fn default() -> Self {
                    Self { $($field: $default,)* }
                }
            }
        )*
    };
}

crate::optimizers!(declare);

impl Optimizer {
    /// The learning rate; `None` if the optimizer does not have one.
    pub fn lr(mut self) -> Option<f64> {
        self.number("lr").copied()
    }

    /// Sets the learning rate, if the optimizer has one.
    pub fn set_lr(&mut self, lr: f64) {
        self.number("lr").into_iter().for_each(|of| *of = lr);
    }

    /// The weight decay; `None` if the optimizer does not have one.
    pub fn weight_decay(mut self) -> Option<f64> {
        self.number("weight_decay").copied()
    }

    /// Sets the weight decay, if the optimizer has one.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        self.number("weight_decay").into_iter().for_each(|of| *of = weight_decay);
    }

    fn number(&mut self, name: &str) -> Option<&mut f64> {
        self.numbers().into_iter().find_map(|(field, _, value)| (field == name).then_some(value))
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
    pub fn validate(mut self) -> Result<(), Invalid> {
        let name = self.name();
        for (field, range, value) in self.numbers() {
            range.check(name, field, *value)?;
        }
        self.check_combinations()
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
