//! The kernels of a GPU, compared with a kernel that copies, and the transfers between the host and
//! the device.
//!
//! The time of kernels is the device's own, between events before and after their launches. Every
//! repetition measures the copy again, directly before the kernel. Bytes are counted as the kernels
//! access memory (4 for a read of f32, 4 for a write), for both.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use zeroshard_kernels::{Backend, Failure, Update, gpu, initial_state};
use zeroshard_model::{
    dtype::DType,
    optimizer::{Adam, AppliedSteps, Optimizer, RmsProp, Sgd},
};

use crate::{Error, sample::median, table::Table};

/// The columns of the matrices that Adafactor steps.
const COLUMNS: usize = 4096;
/// The number of launches that are measured together.
const LAUNCHES: u32 = 10;
/// The largest number of elements that a pull reads at a time.
const PART: usize = 1 << 20;
/// The numbers of threads of the host that transfer at the same time.
const THREADS: [usize; 2] = [1, 4];

/// Measure the kernels of a GPU in G parameters/s, and in GB/s compared with copying in its memory,
/// and transfers between the host and the GPU.
#[derive(Args)]
pub(crate) struct Options {
    /// Number of the GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Number of parameters, a multiple of 4096, which should be far more than fit into the GPU's
    /// cache. Each takes up to 24 bytes of its memory.
    #[arg(long, default_value = "134217728", value_parser = multiple)]
    elements: NonZero<usize>,
    /// Number of repetitions; the median is shown.
    #[arg(long, default_value = "5")]
    repeat: NonZero<usize>,
}

fn multiple(text: &str) -> Result<NonZero<usize>, String> {
    let elements = text.parse::<NonZero<usize>>().map_err(|error| error.to_string())?;
    match elements.get() % COLUMNS {
        0 => Ok(elements),
        _ => Err(format!("it is not a multiple of {COLUMNS}")),
    }
}

/// The measured optimizers: the kernel, hyperparameters, and the bytes that a step reads and writes
/// for each parameter.
fn subjects() -> Vec<(&'static str, Optimizer, usize)> {
    let rmsprop = RmsProp::default();
    let variants = [
        ("sgd_momentum", Optimizer::Sgd(Sgd { momentum: 0.9, ..Sgd::default() })),
        ("adam_amsgrad", Optimizer::Adam(Adam { amsgrad: true, ..Adam::default() })),
        ("rmsprop_momentum", Optimizer::RmsProp(RmsProp { momentum: 0.9, ..rmsprop })),
        ("rmsprop_centered", Optimizer::RmsProp(RmsProp { centered: true, ..rmsprop })),
        (
            "rmsprop_centered_momentum",
            Optimizer::RmsProp(RmsProp { momentum: 0.9, centered: true, ..rmsprop }),
        ),
    ];
    let defaults = Optimizer::defaults().into_iter().map(|it| (it.name(), it));
    let bytes = |optimizer: &Optimizer| match optimizer {
        // The first pass writes the moments. The second one reads everything but the gradient
        // again, and writes the parameter.
        Optimizer::Lamb(_) => 40,
        // The parameter is only written.
        Optimizer::Average(_) => 8,
        // Four passes read the gradient. The parameter is read twice, and written once.
        Optimizer::Adafactor(_) => 28,
        _ => 12 + 8 * optimizer.state().len(),
    };
    defaults.chain(variants).map(|(name, of)| (name, of, bytes(&of))).collect()
}

/// Runs the benchmark and prints its lines.
pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let gpu = gpu(options.device)?;
    let fields =
        ["kernel", "bytes_a_parameter", "gparams_per_s", "gbps", "copy_gbps", "ratio_copy"];
    let mut table = Table::new(json, &fields);
    let bench = Bench::new(&gpu, options.elements.get(), options.repeat.get())?;
    let squares = bench.measure(|gradient| gpu.block_sums(gradient, 0..bench.numel).map(drop));
    table.row(bench.row("squares", 4, squares?));
    for (kernel, optimizer, bytes) in subjects() {
        table.row(bench.row(kernel, bytes, bench.step(&optimizer)?));
    }
    table.finish();
    let mut table = Table::new(json, &["transfer", "dtype", "threads", "gbps"]);
    for (threads, dtype) in
        THREADS.into_iter().flat_map(|n| [DType::F32, DType::Bf16].map(|t| (n, t)))
    {
        let [upload, download] = bench.transfers(threads, dtype)?;
        for (transfer, gbps) in [("upload", upload), ("download", download)] {
            let dtype = dtype.to_string();
            table.row(json!({
                "bench": "transfers", "transfer": transfer, "dtype": dtype, "threads": threads,
                "gbps": gbps,
            }));
        }
    }
    table.finish();
    Ok(())
}

/// The seconds of a kernel and of the copy of all parameters.
struct Times {
    kernel: f64,
    copy: f64,
}

struct Bench<'a, B: Backend> {
    gpu: &'a B,
    gradient: B::Buffer,
    numel: usize,
    repeat: usize,
}

impl<'a, B: Backend> Bench<'a, B> {
    fn new(gpu: &'a B, numel: usize, repeat: usize) -> Result<Self, Failure> {
        let mut gradient = gpu.allocate(DType::F32, numel)?;
        let values = (0..numel).map(|i| 0.25 + (i % 1021) as f32 / 2048.0);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        gpu.store(&mut gradient, 0..numel, &bytes, DType::F32)?;
        Ok(Self { gpu, gradient, numel, repeat })
    }

    fn row(&self, kernel: &str, bytes: usize, times: Times) -> serde_json::Value {
        let gparams_per_s = self.numel as f64 / times.kernel / 1e9;
        let (gbps, copy_gbps) =
            (gparams_per_s * bytes as f64, 8.0 * self.numel as f64 / times.copy / 1e9);
        json!({
            "bench": "kernels", "kernel": kernel, "bytes_a_parameter": bytes,
            "gparams_per_s": gparams_per_s, "gbps": gbps, "copy_gbps": copy_gbps,
            "ratio_copy": gbps / copy_gbps,
        })
    }

    /// Steps of an optimizer.
    fn step(&self, optimizer: &Optimizer) -> Result<Times, Failure> {
        let shape = [(self.numel / COLUMNS) as u64, COLUMNS as u64];
        let mut master = self.gpu.allocate(DType::F32, self.numel)?;
        let mut state = initial_state(self.gpu, optimizer, &shape, self.numel)?;
        let update = Update::after(AppliedSteps::new(1), optimizer, 0.5);
        self.measure(|gradient| {
            let state = state.iter_mut().map(Into::into).collect();
            self.gpu.apply(&update, (&mut master).into(), state, Some(gradient), None, None)
        })
    }

    /// The median times of an operation on the gradient, and of copies of it.
    fn measure(
        &self,
        mut operation: impl FnMut(&B::Buffer) -> Result<(), Failure>,
    ) -> Result<Times, Failure> {
        let mut copied = self.gpu.allocate(DType::F32, self.numel)?;
        let seconds = |operation: &mut dyn FnMut() -> Result<(), Failure>| {
            let before = self.kernel_seconds()?;
            (0..LAUNCHES).try_for_each(|_| operation())?;
            Ok((self.kernel_seconds()? - before) / f64::from(LAUNCHES))
        };
        let (mut kernel, mut copy) = (Vec::new(), Vec::new());
        for _ in 0..self.repeat {
            copy.push(seconds(&mut || self.gpu.copy(&self.gradient, &mut copied))?);
            kernel.push(seconds(&mut || operation(&self.gradient))?);
        }
        Ok(Times { kernel: median(kernel), copy: median(copy) })
    }

    /// The time in kernels, after all that were launched.
    fn kernel_seconds(&self) -> Result<f64, Failure> {
        // Reading the sum waits for all earlier kernels.
        self.gpu.block_sums(&self.gradient, 0..COLUMNS)?;
        Ok(self.gpu.usage().map_or(0.0, |usage| usage.kernels.as_secs_f64()))
    }

    /// The rates in GB/s at which threads add gradients, and read parameters.
    fn transfers(&self, threads: usize, dtype: DType) -> Result<[f64; 2], Failure> {
        let numel = self.numel / threads;
        let values = vec![0; numel * dtype.size()];
        let buffers = (0..threads).map(|_| self.gpu.allocate(DType::F32, numel));
        let mut buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let rate = |seconds: Vec<f64>| (threads * values.len()) as f64 / median(seconds) / 1e9;
        let (mut uploads, mut downloads) = (Vec::new(), Vec::new());
        for _ in 0..self.repeat {
            uploads.push(in_parallel(buffers.iter_mut(), |buffer| {
                self.gpu.accumulate(buffer, 0..numel, &values, dtype)?;
                // Waits for the device.
                self.gpu.block_sums(buffer, 0..1).map(drop)
            })?);
        }
        let buffers: Vec<_> = buffers.into_iter().map(Arc::new).collect();
        for _ in 0..self.repeat {
            downloads.push(in_parallel(buffers.iter(), |buffer| {
                let mut parts =
                    (0..numel).step_by(PART).map(|start| start..numel.min(start + PART));
                parts.try_for_each(|part| self.gpu.read(buffer, part, dtype).map(drop))
            })?);
        }
        Ok([rate(uploads), rate(downloads)])
    }
}

/// The seconds in which a thread for each item does some work.
fn in_parallel<T: Send>(
    items: impl Iterator<Item = T>,
    work: impl Fn(T) -> Result<(), Failure> + Sync,
) -> Result<f64, Failure> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.map(|item| scope.spawn(|| work(item))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread does not panic"))
    })?;
    Ok(start.elapsed().as_secs_f64())
}
