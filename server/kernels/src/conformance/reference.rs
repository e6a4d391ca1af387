//! The contract as scalar code: one element at a time, each operation rounded to f32 separately.
//! For an optimizer without such code here, the loop of the CPU is the reference, without vector
//! instructions and, unless it needs the whole tensor, for one element at a time.

use zeroshard_model::{
    dtype::DType,
    geometry::blocks::BLOCK,
    optimizer::{
        Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, Lamb, Lion, NAdam, Optimizer,
        RAdam, RmsProp, Sgd, StateDType,
    },
};

use super::buffer_of;
use crate::{Backend, Cpu, Update, loops::Level};

/// Element `i` of a block is added to lane `i % 128`, the lanes are added as a tree, and the blocks
/// in order.
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    let block_sum = |block: &[f32]| {
        let mut lanes = vec![0.0f64; 128];
        for (i, &value) in block.iter().enumerate() {
            lanes[i % 128] += f64::from(value) * f64::from(value);
        }
        while lanes.len() > 1 {
            let upper = lanes.split_off(lanes.len() / 2);
            lanes.iter_mut().zip(upper).for_each(|(lane, other)| *lane += other);
        }
        lanes[0]
    };
    values.chunks(BLOCK).fold(0.0, |sum, block| sum + block_sum(block))
}

/// One step on a whole tensor. `state_dtype` decides the formula of Adam.
pub(super) fn apply(
    update: &Update<'_>,
    state_dtype: StateDType,
    w: &mut [f32],
    state: &mut Vec<Vec<f32>>,
    gradient: &[f32],
) {
    if let Optimizer::Lamb(lamb) = update.optimizer {
        return lamb_step(lamb, update, w, state, gradient);
    }
    if let Optimizer::Adafactor(adafactor) = update.optimizer {
        return adafactor_step(adafactor, update, w, state, gradient);
    }
    if update.optimizer.needs_whole_tensors() {
        return on_the_cpu(update, w, state, gradient);
    }
    for i in 0..w.len() {
        let mut element: Vec<f32> = state.iter().map(|tensor| tensor[i]).collect();
        w[i] = element_step(update, state_dtype, w[i], &mut element, gradient[i]);
        for (tensor, value) in state.iter_mut().zip(element) {
            tensor[i] = value;
        }
    }
}

fn element_step(
    update: &Update<'_>,
    state_dtype: StateDType,
    w: f32,
    state: &mut [f32],
    gradient: f32,
) -> f32 {
    let step = update.step;
    match *update.optimizer {
        Optimizer::Sgd(h) => sgd(h, step, w, state, scaled(update, gradient, h.maximize)),
        Optimizer::Asgd(h) => {
            let g = decayed(scaled(update, gradient, h.maximize), w, h.weight_decay);
            asgd(h, update.scalar_state, w, state, g)
        }
        Optimizer::Adam(h) => {
            let g = decayed(scaled(update, gradient, h.maximize), w, h.weight_decay);
            adam(h, (step, state_dtype), w, state, g)
        }
        Optimizer::AdamW(h) => {
            let AdamW { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize } = h;
            let plain = Adam { lr, beta1, beta2, eps, weight_decay: 0.0, amsgrad, maximize };
            let w = w * (1.0 - lr * weight_decay) as f32;
            adam(plain, (step, state_dtype), w, state, scaled(update, gradient, maximize))
        }
        Optimizer::Adamax(h) => {
            let g = decayed(scaled(update, gradient, h.maximize), w, h.weight_decay);
            adamax(h, step, w, state, g)
        }
        Optimizer::NAdam(h) => nadam(h, update, w, state, scaled(update, gradient, h.maximize)),
        Optimizer::RAdam(h) => radam(h, step, w, state, scaled(update, gradient, h.maximize)),
        Optimizer::Adagrad(h) => {
            let g = decayed(scaled(update, gradient, h.maximize), w, h.weight_decay);
            adagrad(h, step, w, state, g)
        }
        Optimizer::Adadelta(h) => {
            let g = decayed(scaled(update, gradient, h.maximize), w, h.weight_decay);
            adadelta(h, w, state, g)
        }
        Optimizer::RmsProp(h) => {
            let g = decayed(scaled(update, gradient, h.maximize), w, h.weight_decay);
            rmsprop(h, w, state, g)
        }
        Optimizer::Lion(h) => lion(h, w, state, scaled(update, gradient, h.maximize)),
        _ => {
            let (mut w, mut state_of_one) = ([w], state.iter().map(|&of| vec![of]).collect());
            on_the_cpu(update, &mut w, &mut state_of_one, &[gradient]);
            state.iter_mut().zip(state_of_one).for_each(|(of, one)| *of = one[0]);
            w[0]
        }
    }
}

fn on_the_cpu(update: &Update<'_>, w: &mut [f32], state: &mut Vec<Vec<f32>>, gradient: &[f32]) {
    let baseline = Level::all().pop().expect("every machine has a baseline");
    let cpu = Cpu::at(baseline);
    let of = |values: &[f32]| buffer_of(&cpu, values, DType::F32);
    let (mut master, gradient) = (of(w), of(gradient));
    let mut buffers: Vec<_> = state.iter().map(|values| of(values)).collect();
    let states = buffers.iter_mut().map(Into::into).collect();
    cpu.apply(update, (&mut master).into(), states, Some(&gradient), None, None).unwrap();
    w.copy_from_slice(master.values());
    *state = buffers.iter().map(|buffer| buffer.values().to_vec()).collect();
}

fn scaled(update: &Update<'_>, gradient: f32, maximize: bool) -> f32 {
    let gradient = gradient * update.coefficient;
    if maximize { -gradient } else { gradient }
}

fn decayed(gradient: f32, w: f32, weight_decay: f64) -> f32 {
    if weight_decay == 0.0 { gradient } else { gradient + weight_decay as f32 * w }
}

fn lerp(start: f32, end: f32, weight: f64) -> f32 {
    let weight = weight as f32;
    if weight < 0.5 { start + weight * (end - start) } else { end + (weight - 1.0) * (end - start) }
}

fn power(beta: f64, step: u64) -> f64 {
    (0..step).fold(1.0, |power, _| power * beta)
}

/// `1 - beta^step`.
fn correction(beta: f64, step: u64) -> f64 {
    1.0 - power(beta, step)
}

fn sgd(h: Sgd, step: u64, w: f32, state: &mut [f32], gradient: f32) -> f32 {
    let g = decayed(gradient, w, h.weight_decay);
    let mut direction = g;
    if h.momentum != 0.0 {
        let momentum = h.momentum as f32;
        state[0] = if step == 1 { g } else { state[0] * momentum + (1.0 - h.dampening) as f32 * g };
        direction = if h.nesterov { g + momentum * state[0] } else { state[0] };
    }
    w - h.lr as f32 * direction
}

fn asgd(h: Asgd, [eta, mu]: [f32; 2], w: f32, state: &mut [f32], g: f32) -> f32 {
    let w = w * (1.0 - h.lambd * f64::from(eta)) as f32 - eta * g;
    state[0] = if mu == 1.0 { w } else { state[0] + (w - state[0]) * mu };
    w
}

fn adam(h: Adam, (step, state_dtype): (u64, StateDType), w: f32, state: &mut [f32], g: f32) -> f32 {
    state[0] = lerp(state[0], g, 1.0 - h.beta1);
    state[1] = state[1] * h.beta2 as f32 + (1.0 - h.beta2) as f32 * g * g;
    let mut v = state[1];
    if h.amsgrad {
        state[2] = state[2].max(v);
        v = state[2];
    }
    let root = correction(h.beta2, step).sqrt();
    if state_dtype == StateDType::Int8 {
        let step_size = (h.lr * root / correction(h.beta1, step)) as f32;
        return w - step_size * state[0] / (v.sqrt() + (h.eps * root) as f32);
    }
    let denominator = v.sqrt() / root as f32 + h.eps as f32;
    let step_size = (h.lr / correction(h.beta1, step)) as f32;
    w - step_size * state[0] / denominator
}

fn adamax(h: Adamax, step: u64, w: f32, state: &mut [f32], g: f32) -> f32 {
    state[0] = lerp(state[0], g, 1.0 - h.beta1);
    let (decayed, eps) = (state[1] * h.beta2 as f32, h.eps as f32);
    state[1] = match h.paddle {
        true => (decayed + eps).max(g.abs()),
        false => decayed.max(g.abs() + eps),
    };
    w - (h.lr / correction(h.beta1, step)) as f32 * state[0] / state[1]
}

fn nadam(h: NAdam, update: &Update<'_>, w: f32, state: &mut [f32], gradient: f32) -> f32 {
    let (w, g) = match h.decoupled_weight_decay {
        true => (w * (1.0 - h.lr * h.weight_decay) as f32, gradient),
        false => (w, decayed(gradient, w, h.weight_decay)),
    };
    let mu = |power: f64| h.beta1 * (1.0 - 0.5 * power);
    let power = |step: u64| libm::pow(0.96, step as f64 * h.momentum_decay);
    let (now, next) = match h.paddle {
        true => {
            let power = (0..update.step).fold(1.0f32, |power, _| power * 0.96);
            let power = libm::pow(f64::from(power), h.momentum_decay);
            (mu(power), mu(power * libm::pow(0.96, h.momentum_decay)))
        }
        false => (mu(power(update.step)), mu(power(update.step + 1))),
    };
    let product = f64::from(update.scalar_state[0] * now as f32);
    state[0] = lerp(state[0], g, 1.0 - h.beta1);
    state[1] = state[1] * h.beta2 as f32 + (1.0 - h.beta2) as f32 * g * g;
    let denominator = (state[1] / correction(h.beta2, update.step) as f32).sqrt() + h.eps as f32;
    let w = w - (h.lr * (1.0 - now) / (1.0 - product)) as f32 * g / denominator;
    w - (h.lr * next / (1.0 - product * next)) as f32 * state[0] / denominator
}

fn radam(h: RAdam, step: u64, w: f32, state: &mut [f32], gradient: f32) -> f32 {
    let (w, g) = match h.decoupled_weight_decay {
        true => (w * (1.0 - h.lr * h.weight_decay) as f32, gradient),
        false => (w, decayed(gradient, w, h.weight_decay)),
    };
    state[0] = lerp(state[0], g, 1.0 - h.beta1);
    state[1] = state[1] * h.beta2 as f32 + (1.0 - h.beta2) as f32 * g * g;
    let update = state[0] / correction(h.beta1, step) as f32 * h.lr as f32;
    let second = correction(h.beta2, step);
    let longest = 2.0 / (1.0 - h.beta2) - 1.0;
    let length = longest - 2.0 * step as f64 * power(h.beta2, step) / second;
    if length <= 5.0 {
        return w - update;
    }
    let rectification = ((length - 4.0) * (length - 2.0) * longest
        / ((longest - 4.0) * (longest - 2.0) * length))
        .sqrt();
    let adaptive = 1.0 / (state[1].sqrt() + h.eps as f32) * second.sqrt() as f32;
    w - update * adaptive * rectification as f32
}

fn adagrad(h: Adagrad, step: u64, w: f32, state: &mut [f32], g: f32) -> f32 {
    state[0] += g * g;
    let lr = (h.lr / (1.0 + (step - 1) as f64 * h.lr_decay)) as f32;
    w - lr * g / (state[0].sqrt() + h.eps as f32)
}

fn adadelta(h: Adadelta, w: f32, state: &mut [f32], g: f32) -> f32 {
    let (rho, rest, eps) = (h.rho as f32, (1.0 - h.rho) as f32, h.eps as f32);
    state[0] = state[0] * rho + rest * g * g;
    let delta = (state[1] + eps).sqrt() / (state[0] + eps).sqrt() * g;
    state[1] = state[1] * rho + rest * delta * delta;
    w - h.lr as f32 * delta
}

fn rmsprop(h: RmsProp, w: f32, state: &mut [f32], g: f32) -> f32 {
    state[0] = state[0] * h.alpha as f32 + (1.0 - h.alpha) as f32 * g * g;
    let mut variance = state[0];
    if h.centered {
        let mean = state.last_mut().expect("the mean is the last state tensor");
        *mean = lerp(*mean, g, 1.0 - h.alpha);
        variance -= *mean * *mean;
    }
    let (lr, eps, momentum) = (h.lr as f32, h.eps as f32, h.momentum as f32);
    if h.paddle {
        let update = lr * g / (variance + eps).sqrt();
        return match h.momentum == 0.0 {
            true => w - update,
            false => {
                state[1] = momentum * state[1] + update;
                w - state[1]
            }
        };
    }
    let denominator = variance.sqrt() + eps;
    if h.momentum == 0.0 {
        return w - lr * g / denominator;
    }
    state[1] = state[1] * momentum + g / denominator;
    w - lr * state[1]
}

fn lion(h: Lion, w: f32, state: &mut [f32], g: f32) -> f32 {
    let c = state[0] * h.beta1 as f32 + (1.0 - h.beta1) as f32 * g;
    state[0] = state[0] * h.beta2 as f32 + (1.0 - h.beta2) as f32 * g;
    let w = w * (1.0 - h.lr * h.weight_decay) as f32;
    let lr = h.lr as f32;
    if c > 0.0 {
        w - lr
    } else if c < 0.0 {
        w + lr
    } else {
        w
    }
}

fn lamb_step(
    h: &Lamb,
    update: &Update<'_>,
    w: &mut [f32],
    state: &mut [Vec<f32>],
    gradient: &[f32],
) {
    let first = (1.0 / correction(h.beta1, update.step)) as f32;
    let second = (1.0 / correction(h.beta2, update.step).sqrt()) as f32;
    let mut updates = Vec::new();
    for i in 0..w.len() {
        let g = scaled(update, gradient[i], h.maximize);
        state[0][i] = lerp(state[0][i], g, 1.0 - h.beta1);
        state[1][i] = state[1][i] * h.beta2 as f32 + (1.0 - h.beta2) as f32 * g * g;
        let denominator = state[1][i].sqrt() * second + h.eps as f32;
        updates.push(state[0][i] * first / denominator + h.weight_decay as f32 * w[i]);
    }
    let (w_norm, update_norm) = (sum_of_squares(w).sqrt(), sum_of_squares(&updates).sqrt());
    let either_is_zero = w_norm == 0.0 || update_norm == 0.0;
    let trust = if either_is_zero { 1.0 } else { w_norm / update_norm };
    for (w, update) in w.iter_mut().zip(updates) {
        *w -= (h.lr * trust) as f32 * update;
    }
}

fn adafactor_step(
    h: &Adafactor,
    update: &Update<'_>,
    w: &mut [f32],
    state: &mut [Vec<f32>],
    gradient: &[f32],
) {
    let t = update.step as f64;
    let weight = libm::pow(t, h.beta2_decay);
    let g: Vec<f32> = gradient.iter().map(|&g| scaled(update, g, h.maximize)).collect();
    let at_least = |value: f32, minimum: f64| {
        if value < minimum as f32 { minimum as f32 } else { value }
    };
    let [rows, columns, variance] = state else { panic!("three state tensors") };
    let mut moments = Vec::new();
    if rows.is_empty() {
        for (variance, g) in variance.iter_mut().zip(&g) {
            *variance = lerp(*variance, g * g, weight);
            moments.push(*variance);
        }
    } else {
        let (width, height) = (w.len() / rows.len(), w.len() / columns.len());
        let square = |i: usize| f64::from(g[i]) * f64::from(g[i]);
        for (row, moment) in rows.iter_mut().enumerate() {
            let sum = sixteen_lanes((0..width).map(|column| square(row * width + column)));
            *moment = lerp(*moment, (sum / width as f64) as f32, weight);
        }
        for (i, moment) in columns.iter_mut().enumerate() {
            let first = i / width * width * height + i % width;
            let sum = (0..height).fold(0.0, |sum, row| sum + square(first + row * width));
            *moment = lerp(*moment, (sum / height as f64) as f32, weight);
        }
        for i in 0..w.len() {
            let matrix = i / (width * height);
            let of_matrix = &rows[matrix * height..(matrix + 1) * height];
            let sum = of_matrix.iter().fold(0.0, |sum, &row| sum + f64::from(row));
            let mean = at_least((sum / height as f64) as f32, h.eps1);
            moments.push(rows[i / width] * columns[matrix * width + i % width] / mean);
        }
    }
    let updates: Vec<f32> = g
        .iter()
        .zip(moments)
        .map(|(g, moment)| g / at_least(moment, h.eps1 * h.eps1).sqrt())
        .collect();
    let squares = if rows.is_empty() {
        sum_of_squares(&updates)
    } else {
        let square = |&update: &f32| f64::from(update) * f64::from(update);
        let of_rows = updates.chunks(w.len() / rows.len());
        of_rows.fold(0.0, |sum, row| sum + sixteen_lanes(row.iter().map(square)))
    };
    let root_mean = |squares: f64| (squares / g.len() as f64).sqrt();
    let lr = root_mean(sum_of_squares(w)).max(h.eps2) * h.lr.min(1.0 / t.sqrt());
    let clipped = -(lr / (root_mean(squares) / h.d).max(1.0)) as f32;
    for (w, update) in w.iter_mut().zip(updates) {
        *w = *w * (1.0 - h.lr * h.weight_decay) as f32 + update * clipped;
    }
}

/// Element `i` is added to lane `i % 16`, and the lanes are added as a tree.
fn sixteen_lanes(values: impl Iterator<Item = f64>) -> f64 {
    let mut lanes = vec![0.0; 16];
    values.enumerate().for_each(|(i, value)| lanes[i % 16] += value);
    while lanes.len() > 1 {
        let upper = lanes.split_off(lanes.len() / 2);
        lanes.iter_mut().zip(upper).for_each(|(lane, other)| *lane += other);
    }
    lanes[0]
}
