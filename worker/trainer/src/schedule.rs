//! The hyperparameters of each step: the learning rate follows a schedule, and the weight decay
//! depends on the parameter group.

use std::fmt;

use zeroshard_model::Optimizer;

use super::model::Group;

/// The fraction of a run over which the learning rate rises.
const WARM_UP: f64 = 0.1;
/// The learning rate at the end, as a fraction of the highest learning rate.
const FLOOR: f64 = 0.1;

/// The optimizers of each step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The optimizer with the highest learning rate, and with the weight decay of matrices.
    optimizer: Optimizer,
    steps: u64,
}

impl Schedule {
    /// Creates the schedule of a run of `steps` steps.
    pub fn new(optimizer: Optimizer, steps: u64) -> Self {
        Self { optimizer, steps }
    }

    /// The optimizers of a step, one for each parameter group (`model::Group`). The learning rate
    /// rises linearly, then falls to a tenth along half a cosine (Loshchilov and Hutter 2017,
    /// without restarts).
    pub fn at(&self, step: u64) -> Vec<Optimizer> {
        self.groups(self.factor(step))
    }

    /// The optimizers at the highest learning rate.
    pub fn highest(&self) -> Vec<Optimizer> {
        self.groups(1.0)
    }

    /// The optimizer's name.
    pub fn name(&self) -> &'static str {
        self.optimizer.name()
    }

    fn groups(&self, factor: f64) -> Vec<Optimizer> {
        let mut decayed = self.optimizer;
        decayed.set_lr(self.optimizer.lr().unwrap_or_default() * factor);
        let mut plain = decayed;
        plain.set_weight_decay(0.0);
        let mut groups = [decayed; 2];
        groups[Group::NoDecay as usize] = plain;
        groups.to_vec()
    }

    fn factor(&self, step: u64) -> f64 {
        let warm_up = (self.steps as f64 * WARM_UP).ceil().max(1.0);
        let done = step as f64 + 1.0;
        if done <= warm_up {
            return done / warm_up;
        }
        let progress = ((done - warm_up) / (self.steps as f64 - warm_up)).min(1.0);
        FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lr, decay) = (self.optimizer.lr(), self.optimizer.weight_decay());
        let [lr, decay] = [lr, decay].map(Option::unwrap_or_default);
        write!(f, "{}, learning rate {lr}, weight decay {decay}", self.optimizer)
    }
}

/// The default learning rate of an optimizer, tuned for the default model.
pub fn default_lr(optimizer: &Optimizer) -> f64 {
    match optimizer {
        Optimizer::Adam(_) | Optimizer::AdamW(_) | Optimizer::NAdam(_) => 4e-3,
        Optimizer::Sgd(_) | Optimizer::Asgd(_) => 0.5,
        Optimizer::Adadelta(_) => 1.0,
        Optimizer::RmsProp(_) => 1e-3,
        Optimizer::Lion(_) => 3e-4,
        _ => 1e-2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adamw() -> Optimizer {
        let mut optimizer: Optimizer = "adamw".parse().unwrap();
        optimizer.set_lr(1.0);
        optimizer
    }

    #[test]
    fn learning_rate_rises_then_falls_to_a_tenth() {
        let schedule = Schedule::new(adamw(), 100);
        let lr: Vec<f64> = (0..100).map(|step| schedule.at(step)[0].lr().unwrap()).collect();
        assert!((lr[0] - 0.1).abs() < 1e-12 && (lr[9] - 1.0).abs() < 1e-12);
        assert!(lr[..10].is_sorted() && lr[9..].iter().rev().is_sorted());
        assert!((lr[99] - 0.1).abs() < 1e-12);
    }

    #[test]
    fn a_run_of_one_step_has_the_whole_learning_rate() {
        assert_eq!(Schedule::new(adamw(), 1).at(0)[0].lr(), Some(1.0));
    }

    #[test]
    fn only_the_first_group_is_decayed() {
        let groups = Schedule::new(adamw(), 10).at(3);
        assert_eq!(groups[Group::Decay as usize].weight_decay(), adamw().weight_decay());
        assert_eq!(groups[Group::NoDecay as usize].weight_decay(), Some(0.0));
        assert_eq!(groups[0].lr(), groups[1].lr());
    }
}
