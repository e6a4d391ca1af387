//! AdamW, which is [`super::adam`] with decoupled weight decay: Loshchilov and Hutter, "Decoupled
//! Weight Decay Regularization" (2019).

use zeroshard_model::optimizer::{Adam, AdamW};

use super::adam::Scalars;
use crate::kernel::{Arrays, Cpu, Kernel, Launch, Scratch, Step, Update};

/// Adam without weight decay, and the scalars of a step.
fn scalars(adamw: &AdamW, update: &Update<'_>) -> (Adam, Scalars) {
    let &AdamW { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize } = adamw;
    let adam = Adam { lr, beta1, beta2, eps, weight_decay: 0.0, amsgrad, maximize };
    let mut scalars = Scalars::new(&adam, update);
    scalars.kept = (1.0 - lr * weight_decay) as f32;
    (adam, scalars)
}

impl Kernel for AdamW {
    fn step(&self, cpu: &Cpu, update: &Update<'_>, arrays: Arrays<'_>) {
        let (adam, scalars) = scalars(self, update);
        scalars.step(&adam, update, cpu, arrays);
    }

    fn launches(&self, update: &Update<'_>, step: &Step, _: Scratch) -> Vec<Launch> {
        let (adam, scalars) = scalars(self, update);
        scalars.launches(&adam, update, step)
    }
}
