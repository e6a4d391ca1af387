//! How fast each optimizer's step is, beside what the memory can do.
//!
//! The limit is the better of two loops that do nothing but move memory, over the same buffers and in the same repeats:
//! `memcpy`, and one addition to each array that the step writes. Bytes are counted as the loops name them (4 for a read,
//! 4 for a write), for both sides.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use comfy_table::Table;
use serde::Serialize;
use zeroshard_proto::blocks::SLICE;
use zeroshard_proto::dtype::DType;
use zeroshard_proto::optimizer::{Optimizer, Sgd};
use zeroshard_server::backend::cpu::Buffer;
use zeroshard_server::backend::kernels::{Level, stream};
use zeroshard_server::backend::{Backend, Cpu, OutOfMemory, Update};

/// Numbers of threads that are measured.
const THREADS: [usize; 2] = [1, 2];

/// Measure the optimizers' steps: G parameters/s, and GB/s beside the memory's limit.
#[derive(Args)]
pub(crate) struct Options {
    /// How many parameters: far more than fit into the last-level cache. Memory: 32 bytes each.
    #[arg(long, default_value = "67108864")]
    elements: NonZero<usize>,
    /// How often everything is measured; the median counts.
    #[arg(long, default_value = "7")]
    repeat: NonZero<usize>,
}

/// One line of output.
#[derive(Serialize)]
struct Line {
    bench: &'static str,
    optimizer: &'static str,
    threads: usize,
    gparams_per_s: f64,
    gbps: f64,
    /// The copy loop's GB/s on as many threads.
    copy_gbps: f64,
    /// The better GB/s of copying and of adding to the arrays that the step writes, on as many threads.
    memory_gbps: f64,
    /// `gbps / memory_gbps`.
    ratio_memory: f64,
}

/// What is timed.
#[derive(Clone, Copy)]
enum Subject {
    Copy,
    /// Adds the gradient to that many arrays.
    Add(usize),
    Step(&'static str, Optimizer),
}

impl Subject {
    fn all() -> Vec<Subject> {
        let momentum = Sgd { momentum: 0.9, ..Sgd::default() };
        let mut all = vec![Subject::Copy, Subject::Add(1), Subject::Add(2), Subject::Add(3)];
        all.extend(Optimizer::defaults().map(|optimizer| Subject::Step(optimizer.name(), optimizer)));
        all.push(Subject::Step("sgd_momentum", Optimizer::Sgd(momentum)));
        all
    }

    /// Bytes read and written an element.
    fn bytes(&self) -> usize {
        match self {
            Subject::Copy => 8,
            Subject::Add(arrays) => 4 + 8 * arrays,
            // The second pass reads all but the gradient again, and writes the parameter.
            Subject::Step(_, Optimizer::Lamb(_)) => 40,
            Subject::Step(_, optimizer) => 12 + 8 * optimizer.state().len(),
        }
    }

    fn run(&self, cpu: &Cpu, slice: &mut Slice) {
        let level = Level::best();
        let Slice { arrays: [a, b, c], gradient } = slice;
        match self {
            Subject::Copy => cpu.copy(gradient, a),
            Subject::Add(arrays) => {
                let (a, b, c) = (a.values_mut(), b.values_mut(), c.values_mut());
                match arrays {
                    1 => stream::one(level, a, gradient.values()),
                    2 => stream::two(level, a, b, gradient.values()),
                    _ => stream::three(level, a, b, c, gradient.values()),
                }
            }
            Subject::Step(_, optimizer) => {
                let update = Update { optimizer, step: 2, coefficient: 0.5 };
                let mut state = [b, c];
                let state = &mut state[..optimizer.state().len()];
                cpu.apply(&update, a, state, gradient, None);
            }
        }
    }
}

/// Part of the model: a parameter, two state tensors and a gradient.
struct Slice {
    arrays: [Buffer; 3],
    gradient: Buffer,
}

impl Slice {
    fn new(cpu: &Cpu, numel: usize) -> Result<Slice, OutOfMemory> {
        let array = || cpu.allocate(DType::F32, numel);
        let mut gradient = array()?;
        for (i, value) in gradient.values_mut().iter_mut().enumerate() {
            *value = 0.25 + (i % 1021) as f32 / 2048.0;
        }
        Ok(Slice { arrays: [array()?, array()?, array()?], gradient })
    }

    /// Fills the arrays with positive numbers, which every optimizer can take for its state.
    fn reset(&mut self, cpu: &Cpu) {
        for array in &mut self.arrays {
            cpu.copy(&self.gradient, array);
        }
    }
}

/// Runs the bench and prints its lines.
pub(crate) fn run(options: &Options, json: bool) -> Result<(), OutOfMemory> {
    let cpu = Cpu::new();
    let elements = options.elements.get();
    let sizes = (0..elements).step_by(SLICE).map(|start| SLICE.min(elements - start));
    let mut slices = sizes.map(|numel| Slice::new(&cpu, numel)).collect::<Result<Vec<_>, _>>()?;
    let subjects = Subject::all();
    let mut lines = Vec::new();
    for threads in THREADS {
        let mut seconds = vec![Vec::new(); subjects.len()];
        for _ in 0..options.repeat.get() {
            for (subject, seconds) in subjects.iter().zip(&mut seconds) {
                in_parallel(&mut slices, threads, |slice| slice.reset(&cpu));
                let start = Instant::now();
                in_parallel(&mut slices, threads, |slice| subject.run(&cpu, slice));
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        lines.extend(summarise(&subjects, seconds, elements, threads));
    }
    if json {
        print_json(&lines)
    } else {
        print_table(&lines)
    }
    Ok(())
}

/// Gives every slice to one of the threads, whichever is free.
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

fn summarise(subjects: &[Subject], seconds: Vec<Vec<f64>>, elements: usize, threads: usize) -> Vec<Line> {
    let mut copy_gbps = 0.0;
    let mut add_gbps = [0.0; 4];
    let mut lines = Vec::new();
    for (subject, seconds) in subjects.iter().zip(seconds) {
        let gparams_per_s = elements as f64 / median(seconds) / 1e9;
        let gbps = subject.bytes() as f64 * gparams_per_s;
        match subject {
            Subject::Copy => copy_gbps = gbps,
            &Subject::Add(arrays) => add_gbps[arrays] = gbps,
            Subject::Step(name, optimizer) => {
                let memory_gbps = f64::max(copy_gbps, add_gbps[1 + optimizer.state().len()]);
                lines.push(Line {
                    bench: "optimizer",
                    optimizer: name,
                    threads,
                    gparams_per_s,
                    gbps,
                    copy_gbps,
                    memory_gbps,
                    ratio_memory: gbps / memory_gbps,
                });
            }
        }
    }
    lines
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[allow(clippy::print_stdout, reason = "the bench's output")]
fn print_json(lines: &[Line]) {
    for line in lines {
        println!("{}", serde_json::json!(line));
    }
}

#[allow(clippy::print_stdout, reason = "the bench's output")]
fn print_table(lines: &[Line]) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["optimizer", "threads", "G params/s", "GB/s", "copy GB/s", "memory GB/s", "ratio"]);
    for line in lines {
        let numbers = [line.gparams_per_s, line.gbps, line.copy_gbps, line.memory_gbps, line.ratio_memory];
        let mut row = vec![line.optimizer.to_owned(), line.threads.to_string()];
        row.extend(numbers.map(|number| format!("{number:.2}")));
        table.add_row(row);
    }
    println!("{table}");
}
