//! The launches of an optimizer's step.

use zeroshard_model::{geometry::blocks::BLOCK, optimizer::Optimizer};

use super::launch::{Address, Array, Launch, Published};
use crate::{
    Update,
    loops::{
        adadelta, adafactor, adagrad, adam, adamax, asgd, lamb, lion, nadam, radam, rmsprop, sgd,
    },
};

/// The arrays of a step, and their numbers of elements.
pub(super) struct Step {
    pub(super) numel: usize,
    pub(super) master: Array,
    pub(super) state: Vec<(Array, usize)>,
    pub(super) gradient: Address,
    pub(super) published: Published,
}

/// Memory for the sums of a step. Its initial content does not matter.
struct Scratch(Address);

impl Scratch {
    fn take(&mut self, bytes: usize) -> Address {
        let taken = self.0;
        self.0 += bytes.next_multiple_of(size_of::<f64>()) as Address;
        taken
    }
}

/// The matrices of a slice.
#[derive(Clone, Copy)]
#[repr(C)]
struct Matrices {
    height: u64,
    width: u64,
    count: u64,
}

impl Step {
    /// The number of bytes that the step needs for its sums.
    pub(super) fn scratch_bytes(&self) -> usize {
        let rows = self.state.first().map_or(0, |(_, rows)| *rows);
        size_of::<f64>() * (2 * self.sum_blocks() + 2 * rows + 1)
    }

    /// The launches, in order. `scratch` is the address of [`Self::scratch_bytes`] of memory.
    pub(super) fn launches(&self, update: &Update<'_>, scratch: Address) -> Vec<Launch> {
        let &Update { step, coefficient, scalar_state, .. } = update;
        if self.numel == 0 {
            return self.copies().collect();
        }
        match update.optimizer {
            Optimizer::Sgd(h) => {
                let name = if h.momentum == 0.0 { "sgd" } else { "sgd_momentum" };
                self.one(name, sgd::Scalars::new(h, step, coefficient))
            }
            Optimizer::Asgd(h) => {
                let s = asgd::Scalars::new(h, scalar_state, coefficient);
                self.one("asgd", s)
            }
            Optimizer::Adam(h) => self.adam(adam::Scalars::adam(h, step, coefficient), h.amsgrad),
            Optimizer::AdamW(h) => self.adam(adam::Scalars::adamw(h, step, coefficient), h.amsgrad),
            Optimizer::Adamax(h) => {
                let s = adamax::Scalars::new(h, step, coefficient);
                self.one("adamax", s)
            }
            Optimizer::NAdam(h) => {
                let s = nadam::Scalars::new(h, step, scalar_state[0], coefficient);
                self.one("nadam", s)
            }
            Optimizer::RAdam(h) => {
                let s = radam::Scalars::new(h, step, coefficient);
                self.one("radam", s)
            }
            Optimizer::Adagrad(h) => {
                let s = adagrad::Scalars::new(h, step, coefficient);
                self.one("adagrad", s)
            }
            Optimizer::Adadelta(h) => {
                let s = adadelta::Scalars::new(h, coefficient);
                self.one("adadelta", s)
            }
            Optimizer::Adafactor(h) => {
                self.adafactor(adafactor::Scalars::new(h, step, coefficient), Scratch(scratch))
            }
            Optimizer::RmsProp(h) => {
                let name = match (h.momentum != 0.0, h.centered) {
                    (false, false) => "rmsprop",
                    (true, false) => "rmsprop_momentum",
                    (false, true) => "rmsprop_centered",
                    (true, true) => "rmsprop_centered_momentum",
                };
                self.one(name, rmsprop::Scalars::new(h, coefficient))
            }
            Optimizer::Lion(h) => self.one("lion", lion::Scalars::new(h, coefficient)),
            Optimizer::Lamb(h) => {
                self.lamb(lamb::Scalars::new(h, step, coefficient), Scratch(scratch))
            }
            Optimizer::Average(_) => self.one("average", coefficient),
        }
    }

    /// One launch over all elements, with the arrays in the order of the kernels.
    fn one<S: Copy>(&self, kernel: &'static str, scalars: S) -> Vec<Launch> {
        let launch = Launch::over_elements(kernel, self.numel).with(scalars).with(self.numel);
        let launch = launch.with(self.gradient).with(self.published).with(self.master);
        vec![self.state.iter().fold(launch, |launch, (state, _)| launch.with(*state))]
    }

    fn adam(&self, s: adam::Scalars, amsgrad: bool) -> Vec<Launch> {
        self.one(if amsgrad { "adam_amsgrad" } else { "adam" }, s)
    }

    fn lamb(&self, s: lamb::Scalars, mut scratch: Scratch) -> Vec<Launch> {
        let [(m, _), (v, _)] = self.state[..] else { unreachable!("LAMB has two moments") };
        let sums = self.sum_blocks();
        let [parameters, updates, rate] = [8 * sums, 8 * sums, 4].map(|bytes| scratch.take(bytes));
        vec![
            Launch::over_sums("lamb_moments", self.numel)
                .with(s)
                .with(self.numel)
                .with(self.gradient)
                .with(self.master.from)
                .with(m)
                .with(v)
                .with(parameters)
                .with(updates),
            Launch::over_elements("lamb_rate", 1)
                .with(s)
                .with(sums)
                .with(parameters)
                .with(updates)
                .with(rate),
            Launch::over_elements("lamb_descend", self.numel)
                .with(s)
                .with(self.numel)
                .with(m.to)
                .with(v.to)
                .with(rate)
                .with(self.published)
                .with(self.master),
        ]
    }

    fn adafactor(&self, s: adafactor::Scalars, scratch: Scratch) -> Vec<Launch> {
        let [rows, columns, variance] = self.state[..] else {
            unreachable!("Adafactor has three state tensors")
        };
        match variance {
            (_, 0) => self.adafactor_matrices(s, rows, columns, scratch),
            (variance, _) => self.adafactor_vector(s, variance, scratch),
        }
    }

    fn adafactor_vector(
        &self,
        s: adafactor::Scalars,
        variance: Array,
        mut scratch: Scratch,
    ) -> Vec<Launch> {
        let sums = self.sum_blocks();
        let [parameters, updates, rate] = [8 * sums, 8 * sums, 4].map(|bytes| scratch.take(bytes));
        vec![
            Launch::over_sums("adafactor_vector", self.numel)
                .with(s)
                .with(self.numel)
                .with(self.gradient)
                .with(self.master.from)
                .with(variance)
                .with(parameters)
                .with(updates),
            self.adafactor_rate(s, (parameters, sums), (updates, sums), rate),
            Launch::over_elements("adafactor_vector_descend", self.numel)
                .with(s)
                .with(self.numel)
                .with(self.gradient)
                .with(variance.to)
                .with(rate)
                .with(self.published)
                .with(self.master),
        ]
    }

    fn adafactor_matrices(
        &self,
        s: adafactor::Scalars,
        (rows, height): (Array, usize),
        (columns, width): (Array, usize),
        mut scratch: Scratch,
    ) -> Vec<Launch> {
        // The state tensors have a value for each row and for each column of all matrices.
        let of = Matrices {
            height: (self.numel / width) as u64,
            width: (self.numel / height) as u64,
            count: (height * width / self.numel) as u64,
        };
        let sums = self.sum_blocks();
        let parameters = scratch.take(8 * sums);
        let updates = scratch.take(8 * height);
        let means = scratch.take(4 * of.count as usize);
        let rate = scratch.take(4);
        let with = |launch: Launch| launch.with(s).with(of).with(self.gradient);
        vec![
            Launch::over_sums("squares", self.numel)
                .with(self.master.from)
                .with(self.numel)
                .with(parameters),
            with(Launch::over_rows("adafactor_rows", height)).with(rows),
            with(Launch::over_elements("adafactor_columns", width)).with(columns),
            Launch::over_elements("adafactor_means", of.count as usize)
                .with(s)
                .with(of)
                .with(rows.to)
                .with(means),
            with(Launch::over_rows("adafactor_update_squares", height))
                .with(rows.to)
                .with(columns.to)
                .with(means)
                .with(updates),
            self.adafactor_rate(s, (parameters, sums), (updates, height), rate),
            with(Launch::over_elements("adafactor_descend", self.numel))
                .with(rows.to)
                .with(columns.to)
                .with(means)
                .with(rate)
                .with(self.published)
                .with(self.master),
        ]
    }

    fn adafactor_rate(
        &self,
        s: adafactor::Scalars,
        (parameters, parameter_sums): (Address, usize),
        (updates, update_sums): (Address, usize),
        rate: Address,
    ) -> Launch {
        Launch::over_elements("adafactor_rate", 1)
            .with(s)
            .with(self.numel)
            .with(parameters)
            .with(parameter_sums)
            .with(updates)
            .with(update_sums)
            .with(rate)
    }

    /// The launches that copy held values of state tensors, because there is nothing to step.
    fn copies(&self) -> impl Iterator<Item = Launch> {
        let held = self.state.iter().filter(|(state, numel)| state.from != state.to && *numel > 0);
        held.map(|(state, numel)| super::conversion((state.to, 0), *numel, (state.from, 0)))
    }

    fn sum_blocks(&self) -> usize {
        self.numel.div_ceil(BLOCK)
    }
}
