//! The optimizers: the one place that states their names, state tensors and hyperparameters, with
//! the defaults and ranges. Rust and Python derive everything else from this table, which
//! [`optimizers!`](crate::optimizers) hands to a macro.

use super::{Invalid, Optimizer, StateShape, hyperparameters::check};

/// Calls a macro with the table of all optimizers. An entry has the documentation, the type and the
/// name of an optimizer. In braces follow its state tensors, given its hyperparameters, and each
/// hyperparameter with its default and, if it is a number, its range.
#[macro_export]
macro_rules! optimizers {
    ($with:ident) => {
        $with! {
            /// `torch.optim.SGD`.
            Sgd sgd {
                state(h) = if h.momentum != 0.0 { &["momentum_buffer"] } else { &[] };
                /// Learning rate.
                lr: f64 = 1e-3 => NonNegative,
                /// Momentum factor; with 0 the optimizer keeps no state.
                momentum: f64 = 0.0 => NonNegative,
                /// The fraction of the gradient that is not added to the momentum buffer, from the
                /// second step on.
                dampening: f64 = 0.0 => Finite,
                /// Weight decay, added to the gradient.
                weight_decay: f64 = 0.0 => NonNegative,
                /// Nesterov momentum.
                nesterov: bool = false,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
            }

            /// `torch.optim.ASGD`: averaged stochastic gradient descent. Step `t` sets the learning
            /// rate of the next step to `lr / (1 + lambd * lr * t)^alpha`.
            Asgd asgd {
                state(_) = &["ax"];
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

            /// `torch.optim.Adam`: weight decay is added to the gradient.
            Adam adam {
                state(h) = if h.amsgrad {
                    &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
                } else {
                    &["exp_avg", "exp_avg_sq"]
                };
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

            /// `torch.optim.AdamW`: weight decay is decoupled.
            AdamW adamw {
                state(h) = if h.amsgrad {
                    &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
                } else {
                    &["exp_avg", "exp_avg_sq"]
                };
                /// Learning rate.
                lr: f64 = 1e-3 => NonNegative,
                /// Decay of the first moment.
                beta1: f64 = 0.9 => BelowOne,
                /// Decay of the second moment.
                beta2: f64 = 0.999 => BelowOne,
                /// Added to the denominator.
                eps: f64 = 1e-8 => NonNegative,
                /// Decoupled weight decay: parameters are reduced by `lr * weight_decay` of their
                /// value.
                weight_decay: f64 = 1e-2 => NonNegative,
                /// Divide by the maximum of all second moments so far.
                amsgrad: bool = false,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
            }

            /// `torch.optim.Adamax`: Adam with the infinity norm.
            Adamax adamax {
                state(_) = &["exp_avg", "exp_inf"];
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

            /// `torch.optim.NAdam`: Adam with Nesterov momentum.
            NAdam nadam {
                state(_) = &["exp_avg", "exp_avg_sq"];
                /// Learning rate.
                lr: f64 = 2e-3 => NonNegative,
                /// Decay of the first moment.
                beta1: f64 = 0.9 => BelowOne,
                /// Decay of the second moment.
                beta2: f64 = 0.999 => BelowOne,
                /// Added to the denominator.
                eps: f64 = 1e-8 => NonNegative,
                /// Weight decay, added to the gradient or, if it is decoupled, applied to the
                /// parameters.
                weight_decay: f64 = 0.0 => NonNegative,
                /// The speed at which the momentum approaches `beta1`, from half of it.
                momentum_decay: f64 = 4e-3 => NonNegative,
                /// Weight decay reduces the parameters by `lr * weight_decay` of their value, as in
                /// AdamW.
                decoupled_weight_decay: bool = false,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
                /// The arithmetic of Paddle, where the momentum stays constant from about step
                /// 2,470 on.
                paddle: bool = false,
            }

            /// `torch.optim.RAdam`: Adam with a rectified adaptive learning rate.
            RAdam radam {
                state(_) = &["exp_avg", "exp_avg_sq"];
                /// Learning rate.
                lr: f64 = 1e-3 => NonNegative,
                /// Decay of the first moment.
                beta1: f64 = 0.9 => BelowOne,
                /// Decay of the second moment.
                beta2: f64 = 0.999 => BelowOne,
                /// Added to the denominator.
                eps: f64 = 1e-8 => NonNegative,
                /// Weight decay, added to the gradient or, if it is decoupled, applied to the
                /// parameters.
                weight_decay: f64 = 0.0 => NonNegative,
                /// Weight decay reduces the parameters by `lr * weight_decay` of their value, as in
                /// AdamW.
                decoupled_weight_decay: bool = false,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
            }

            /// `torch.optim.Adagrad`.
            Adagrad adagrad {
                state(_) = &["sum"];
                /// Learning rate.
                lr: f64 = 1e-2 => NonNegative,
                /// The learning rate of step `t` (from 1) is `lr / (1 + (t - 1) * lr_decay)`.
                lr_decay: f64 = 0.0 => NonNegative,
                /// Added to the denominator.
                eps: f64 = 1e-10 => NonNegative,
                /// Weight decay, added to the gradient.
                weight_decay: f64 = 0.0 => NonNegative,
                /// The initial value of the sum of squares. It is read once, when the state is
                /// created.
                initial_accumulator_value: f64 = 0.0 => NonNegative,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
            }

            /// `torch.optim.Adadelta`.
            Adadelta adadelta {
                state(_) = &["square_avg", "acc_delta"];
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

            /// `torch.optim.Adafactor`: the second moments of a matrix are those of its rows and
            /// columns.
            Adafactor adafactor {
                state(_) = &["row_var", "col_var", "variance"];
                /// Learning rate: the factor of the weight decay, and the limit of the step
                /// relative to the root mean square of the parameter, which is `1 / sqrt(t)` in
                /// step `t` if that is lower.
                lr: f64 = 1e-2 => NonNegative,
                /// The second moments of step `t` move towards the squared gradient by
                /// `t^beta2_decay`.
                beta2_decay: f64 = -0.8 => NonPositive,
                /// The minimum of the root of the estimated second moment, and of its mean. torch's
                /// default is the machine epsilon of the parameter's dtype; this is that of f32.
                eps1: f64 = f32::EPSILON as f64 => NonNegative,
                /// The minimum of the parameter's root mean square.
                eps2: f64 = 1e-3 => NonNegative,
                /// The root mean square of the update above which it is clipped.
                d: f64 = 1.0 => AtLeastOne,
                /// Decoupled weight decay: parameters are reduced by `lr * weight_decay` of their
                /// value.
                weight_decay: f64 = 0.0 => NonNegative,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
            }

            /// `torch.optim.RMSprop`.
            RmsProp rmsprop {
                state(h) = match (h.momentum != 0.0, h.centered) {
                    (false, false) => &["square_avg"],
                    (true, false) => &["square_avg", "momentum_buffer"],
                    (false, true) => &["square_avg", "grad_avg"],
                    (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
                };
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
                /// The formula of Paddle, which adds `eps` under the square root, and whose
                /// momentum buffer accumulates updates that are multiplied by their learning rate.
                paddle: bool = false,
            }

            /// Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
            Lion lion {
                state(_) = &["exp_avg"];
                /// Learning rate.
                lr: f64 = 1e-4 => NonNegative,
                /// Weight of the momentum in the sign of the update.
                beta1: f64 = 0.9 => BelowOne,
                /// Decay of the momentum.
                beta2: f64 = 0.99 => BelowOne,
                /// Decoupled weight decay: parameters are reduced by `lr * weight_decay` of their
                /// value.
                weight_decay: f64 = 0.0 => NonNegative,
                /// Maximise the objective instead of minimising it.
                maximize: bool = false,
            }

            /// You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2. The
            /// trust ratio is the tensor's `||w|| / ||update||`, or 1 if either norm is 0.
            Lamb lamb {
                state(_) = &["exp_avg", "exp_avg_sq"];
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

            /// No optimizer: the parameters become the mean gradient, which every worker then
            /// applies by itself (plain data parallelism). It never skips a step: inf and NaN pass
            /// through.
            Average average {
                state(_) = &[];
            }
        }
    };
}

impl Optimizer {
    /// The state that is one f32 for a whole tensor, by torch's names, in the order in which
    /// [`AppliedSteps`](super::AppliedSteps) has them. (A number that depends on the number of
    /// applied steps alone is not part of the state.)
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

    /// The shapes of the state tensors of a parameter, in the order of [`Optimizer::state`].
    pub fn state_shapes(&self, parameter: &[u64]) -> Vec<StateShape> {
        use StateShape::{Absent, Columns, Elements, Rows};
        match (self, parameter) {
            (Self::Adafactor(_), [.., rows, columns]) => {
                // Without elements, the lengths do not matter.
                let (rows, columns) = ((*rows).max(1) as usize, (*columns).max(1) as usize);
                vec![Rows { columns }, Columns { rows, columns }, Absent]
            }
            (Self::Adafactor(_), _) => vec![Absent, Absent, Elements],
            _ => vec![Elements; self.state().len()],
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

    /// Checks the hyperparameters that restrict each other: Nesterov momentum.
    pub(super) fn check_combinations(&self) -> Result<(), Invalid> {
        let Optimizer::Sgd(sgd) = self else { return Ok(()) };
        if !sgd.nesterov {
            return Ok(());
        }
        let expected = "greater than 0 if nesterov is true";
        check("sgd", "momentum", sgd.momentum, sgd.momentum > 0.0, expected)?;
        let expected = "0 if nesterov is true";
        check("sgd", "dampening", sgd.dampening, sgd.dampening == 0.0, expected)
    }
}
