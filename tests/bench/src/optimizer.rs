//! The speed of each optimizer's step, compared with the memory bandwidth.
//!
//! The limit is the faster of two loops that only transfer memory, over the same buffers and
//! directly before the step in every repetition: `memcpy`, and one addition to each array that the
//! step writes. Bytes are counted as the loops access them (4 for a read, 4 for a write), for both
//! sides.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use comfy_table::Table;
use serde::Serialize;
use zeroshard_kernels::{
    Backend, Cpu, Failure, Update,
    cpu::Buffer,
    initial_state,
    loops::{Level, stream},
};
use zeroshard_model::{
    dtype::DType,
    geometry::blocks::SLICE,
    optimizer::{Adafactor, AppliedSteps, Code, Optimizer, Sgd, StateDType},
};

use crate::table::print_json;

/// The numbers of threads that are measured.
const THREADS: [usize; 2] = [1, 2];

/// The CPU has no failures but missing memory.
const WORKS: &str = "the processors do not fail";

/// Measure the steps of the optimizers in G parameters/s, and in GB/s compared with the memory
/// bandwidth.
#[derive(Args)]
pub(crate) struct Options {
    /// Number of parameters, which should be far more than fit into the last-level cache. Each
    /// takes 18 bytes of memory.
    #[arg(long, default_value = "67108864")]
    elements: NonZero<usize>,
    /// Number of repetitions; the median is shown.
    #[arg(long, default_value = "7")]
    repeat: NonZero<usize>,
}

/// One line of output.
#[derive(Serialize)]
struct Line {
    bench: &'static str,
    optimizer: &'static str,
    state_dtype: &'static str,
    threads: usize,
    gparams_per_s: f64,
    gbps: f64,
    /// The rate of the copy loop in GB/s with the same number of threads.
    copy_gbps: f64,
    /// The higher rate in GB/s of copying and of adding to the arrays that the step writes, with
    /// the same number of threads.
    memory_gbps: f64,
    /// `gbps / memory_gbps`.
    ratio_memory: f64,
}

/// An optimizer that is measured.
struct Subject {
    name: &'static str,
    optimizer: Optimizer,
    state_dtype: StateDType,
}

/// The measured optimizers, with f32 state, and those that can have it with 8-bit state.
fn subjects() -> Vec<Subject> {
    let momentum = Sgd { momentum: 0.9, ..Sgd::default() };
    let mut named = Vec::from_iter(Optimizer::defaults().into_iter().map(|it| (it.name(), it)));
    named.push(("sgd_momentum", Optimizer::Sgd(momentum)));
    let subjects = StateDType::ALL.into_iter().flat_map(|state_dtype| {
        let subject = move |&(name, optimizer): &_| Subject { name, optimizer, state_dtype };
        named.iter().map(subject).collect::<Vec<_>>()
    });
    subjects.filter(Subject::is_possible).collect()
}

impl Subject {
    fn is_possible(&self) -> bool {
        match self.state_dtype {
            StateDType::F32 => true,
            StateDType::Int8 => self.optimizer.state_codes().is_some_and(|codes| !codes.is_empty()),
        }
    }

    /// The number of bytes that a step reads and writes for each parameter.
    fn bytes_a_parameter(&self) -> f64 {
        match (&self.optimizer, self.state_dtype) {
            // The second pass reads everything except the gradient again, and writes the parameter.
            (Optimizer::Lamb(_), _) => 40.0,
            // Three passes read the gradient. The parameter is read twice and written once.
            (Optimizer::Adafactor(_), _) => 24.0,
            (_, StateDType::F32) => self.bytes_added(),
            (optimizer, StateDType::Int8) => {
                let state = optimizer.state().len() * 2 * StateDType::Int8.bytes(SLICE);
                self.bytes_added() + state as f64 / SLICE as f64
            }
        }
    }

    /// The number of bytes per parameter that an addition to the same number of f32 arrays reads
    /// and writes.
    fn bytes_added(&self) -> f64 {
        4.0 + 8.0 * self.arrays() as f64
    }

    /// The number of f32 arrays of the parameter's size that a step writes.
    fn arrays(&self) -> usize {
        match (&self.optimizer, self.state_dtype) {
            // The state of a matrix is small.
            (Optimizer::Adafactor(_), _) | (_, StateDType::Int8) => 1,
            (optimizer, StateDType::F32) => 1 + optimizer.state().len(),
        }
    }
}

/// The shape of the matrix that Adafactor steps. It has 1,024 columns if `numel` is a multiple.
fn matrix(numel: usize) -> [u64; 2] {
    let columns = 1 << numel.trailing_zeros().min(10);
    [numel as u64 / columns, columns]
}

/// A part of the model: a parameter, two state tensors and a gradient.
struct Slice {
    arrays: [Buffer; 3],
    gradient: Buffer,
    /// The state of Adafactor.
    factors: Vec<Buffer>,
    /// 8-bit state.
    coded: [Buffer; 2],
}

impl Slice {
    fn new(cpu: &Cpu, numel: usize) -> Result<Slice, Failure> {
        let array = || cpu.allocate(DType::F32, numel);
        let mut gradient = array()?;
        for (i, value) in gradient.values_mut().iter_mut().enumerate() {
            *value = 0.25 + (i % 1021) as f32 / 2048.0;
        }
        let adafactor = Optimizer::Adafactor(Adafactor::default());
        let factors = initial_state(cpu, &adafactor, &matrix(numel), numel)?;
        let [signed, positive] = [Code::Signed, Code::Positive];
        Ok(Slice {
            arrays: [array()?, array()?, array()?],
            gradient,
            factors,
            coded: [cpu.allocate_coded(signed, numel)?, cpu.allocate_coded(positive, numel)?],
        })
    }

    /// Fills the arrays with positive numbers, which are valid state for every optimizer.
    fn reset(&mut self, cpu: &Cpu) {
        for array in self.arrays.iter_mut().chain(&mut self.coded) {
            cpu.copy(&self.gradient, array).expect(WORKS);
        }
    }
}

impl Slice {
    fn add(&mut self, arrays: usize) {
        let level = Level::best();
        let gradient = self.gradient.values();
        let [a, b, c] = self.arrays.each_mut().map(Buffer::values_mut);
        match arrays {
            1 => stream::one(level, a, gradient),
            2 => stream::two(level, a, b, gradient),
            _ => stream::three(level, a, b, c, gradient),
        }
    }

    fn step(&mut self, cpu: &Cpu, subject: &Subject) {
        let Subject { optimizer, state_dtype, .. } = subject;
        let update = Update::after(AppliedSteps::new(1), optimizer, 0.5);
        let [master, state @ ..] = &mut self.arrays;
        let state = match (optimizer, state_dtype) {
            (Optimizer::Adafactor(_), _) => &mut self.factors[..],
            (_, StateDType::F32) => &mut state[..optimizer.state().len()],
            (_, StateDType::Int8) => &mut self.coded[..optimizer.state().len()],
        };
        let state = state.iter_mut().map(Into::into).collect();
        cpu.apply(&update, master.into(), state, Some(&self.gradient), None, None).expect(WORKS);
    }
}

/// Runs the benchmark and prints its lines.
pub(crate) fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let cpu = Cpu::new();
    let elements = options.elements.get();
    let sizes = (0..elements).step_by(SLICE).map(|start| SLICE.min(elements - start));
    let mut slices = sizes.map(|numel| Slice::new(&cpu, numel)).collect::<Result<Vec<_>, _>>()?;
    let subjects = subjects();
    let mut lines = Vec::new();
    for threads in THREADS {
        let mut times = vec![Times::default(); subjects.len()];
        for _ in 0..options.repeat.get() {
            for (subject, times) in subjects.iter().zip(&mut times) {
                times.measure(&cpu, subject, &mut slices, threads);
            }
        }
        for (subject, times) in subjects.iter().zip(times) {
            lines.push(times.line(subject, elements, threads));
        }
    }
    if json {
        lines.iter().for_each(|line| print_json(serde_json::json!(line)));
    } else {
        print_table(&lines)
    }
    Ok(())
}

/// The seconds that an optimizer and its baselines took over all slices, in each repetition.
#[derive(Clone, Default)]
struct Times {
    copy: Vec<f64>,
    add: Vec<f64>,
    step: Vec<f64>,
}

impl Times {
    fn measure(&mut self, cpu: &Cpu, subject: &Subject, slices: &mut [Slice], threads: usize) {
        let mut time = |work: &(dyn Fn(&mut Slice) + Sync)| {
            let start = Instant::now();
            in_parallel(slices, threads, work);
            start.elapsed().as_secs_f64()
        };
        let arrays = subject.arrays();
        self.copy
            .push(time(&|slice| cpu.copy(&slice.gradient, &mut slice.arrays[0]).expect(WORKS)));
        self.add.push(time(&|slice| slice.add(arrays)));
        time(&|slice| slice.reset(cpu));
        self.step.push(time(&|slice| slice.step(cpu, subject)));
    }

    fn line(self, subject: &Subject, elements: usize, threads: usize) -> Line {
        let gparams_per_s = |times| elements as f64 / median(times) / 1e9;
        let step = gparams_per_s(self.step);
        let gbps = step * subject.bytes_a_parameter();
        let copy_gbps = gparams_per_s(self.copy) * 8.0;
        let memory_gbps = copy_gbps.max(gparams_per_s(self.add) * subject.bytes_added());
        Line {
            bench: "optimizer",
            optimizer: subject.name,
            state_dtype: subject.state_dtype.name(),
            threads,
            gparams_per_s: step,
            gbps,
            copy_gbps,
            memory_gbps,
            ratio_memory: gbps / memory_gbps,
        }
    }
}

/// Distributes the slices over the threads; the next free thread takes the next slice.
fn in_parallel(slices: &mut [Slice], threads: usize, work: impl Fn(&mut Slice) + Sync) {
    let queue = Mutex::new(slices.iter_mut());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || {
        while let Some(slice) = next() {
            work(slice);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(worker);
        }
        worker();
    });
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[allow(clippy::print_stdout, reason = "the bench's output")]
fn print_table(lines: &[Line]) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY);
    table.set_header([
        "optimizer",
        "state",
        "threads",
        "G params/s",
        "GB/s",
        "copy GB/s",
        "memory GB/s",
        "ratio",
    ]);
    for line in lines {
        let numbers =
            [line.gparams_per_s, line.gbps, line.copy_gbps, line.memory_gbps, line.ratio_memory];
        let [optimizer, state] = [line.optimizer, line.state_dtype].map(str::to_owned);
        let mut row = vec![optimizer, state, line.threads.to_string()];
        row.extend(numbers.map(|number| format!("{number:.2}")));
        table.add_row(row);
    }
    println!("{table}");
}
