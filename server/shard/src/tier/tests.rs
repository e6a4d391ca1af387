//! Tiers for tests, and the budgets.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use zeroshard_model::{Manifest, TensorSpec};

pub(crate) use super::scratch::tests::{Fault, traffic};
use super::{
    host::HostMemory,
    scratch::{Disk, tests::Faulty},
    *,
};
use zeroshard_kernels::Cpu;

/// Tiers without memory, and with room for everything on a disk that fails after `left` further
/// operations, and with `working` bytes of working buffers.
pub(crate) fn failing<B: Backend>(
    backend: &Arc<B>,
    fault: Fault,
    left: &Arc<AtomicU64>,
    working: usize,
) -> (Arc<Tiers<B>>, Traffic) {
    let (disk, traffic) = (Box::new(Faulty::new(fault, left.clone())), traffic());
    let disk = Scratch::on(disk, "the scratch file in /scratch".to_owned(), traffic.clone());
    (on_scratch(backend, disk, working), traffic)
}

/// Tiers without memory, and with room for everything on `disk`.
fn on_scratch<B: Backend>(backend: &Arc<B>, disk: Arc<Scratch>, working: usize) -> Arc<Tiers<B>> {
    let limits = Limits { disk: Some((PathBuf::new(), u64::MAX)), ..limits(0) };
    let host = Scratch::in_host_memory(traffic());
    on(backend, &limits, (host, Some(disk)), working)
}

/// The tiers of one device.
fn on<B: Backend>(
    backend: &Arc<B>,
    limits: &Limits,
    scratch: (Arc<Scratch>, Option<Arc<Scratch>>),
    working: usize,
) -> Arc<Tiers<B>> {
    Tiers::on(std::slice::from_ref(backend), limits, &scratch, working).unwrap().remove(0)
}

fn limits(memory: u64) -> Limits {
    Limits {
        memory,
        host: None,
        option: "--host-memory",
        disk: None,
        fastest_of_state: Tier::Memory,
    }
}

/// Tiers whose disk does not fail.
pub(crate) fn tiers<B: Backend>(backend: &Arc<B>, working: usize) -> (Arc<Tiers<B>>, Traffic) {
    failing(backend, Fault::Read, &Arc::new(AtomicU64::new(u64::MAX)), working)
}

/// Host memory in which there is room for `left` further arrays.
struct Scarce {
    memory: HostMemory,
    left: Arc<AtomicU64>,
}

impl Disk for Scarce {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        self.memory.read_at(bytes, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.memory.write_at(bytes, at)
    }

    fn reserve(&self, at: u64, length: u64) -> io::Result<()> {
        let take = |left: u64| left.checked_sub(1);
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.memory.reserve(at, length)
    }

    fn release(&self, at: u64, length: u64) {
        self.memory.release(at, length);
    }
}

/// Tiers of a server with a GPU that has room in host memory only, and memory for `left` further
/// arrays there.
pub(crate) fn scarce<B: Backend>(backend: &Arc<B>, left: &Arc<AtomicU64>) -> Arc<Tiers<B>> {
    let limits = Limits { host: Some(u64::MAX), ..limits(0) };
    let disk = Box::new(Scarce { memory: HostMemory::default(), left: left.clone() });
    let host = Scratch::on(disk, "host memory (--host-memory)".to_owned(), traffic());
    on(backend, &limits, (host, None), 1 << 20)
}

fn of_cpu(limits: &Limits) -> Arc<Tiers<Cpu>> {
    Tiers::new(&[Arc::new(Cpu::new())], limits, [traffic(), traffic()]).unwrap().remove(0)
}

fn job(numel: u64) -> JobSpec {
    let manifest = Manifest::new(vec![TensorSpec::new("w", [numel])]).unwrap();
    JobSpec::new("large", manifest, vec!["adamw".parse().unwrap()])
}

#[test]
fn jobs_that_do_not_fit_are_refused_with_the_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let tiers = |disk: Option<u64>| {
        let disk = disk.map(|bytes| (directory.path().to_owned(), bytes));
        let limits = Limits { disk, ..limits(20_000) };
        of_cpu(&limits)
    };
    let tiers = [tiers(None), tiers(Some(32_768))];
    let text = |tiers: &Tiers<Cpu>, numel| match tiers.place(&job(numel), &[0]) {
        Err(error @ Error::OutOfMemory { .. }) => error.to_string(),
        other => panic!("{:?}", other.map(|placed| placed.places)),
    };
    assert_eq!(
        text(&tiers[0], 2_000),
        "out of memory: cannot allocate 32000 bytes for the slices of job \"large\" on this \
         server: --host-memory has 20000 of 20000 free, and there is no --disk"
    );
    let first = tiers[1].place(&job(2_000), &[0]).unwrap();
    assert_eq!(tiers[1].used(), [0, 16_000, 16_384]);
    assert_eq!(
        text(&tiers[1], 2_000),
        "out of memory: cannot allocate 32000 bytes for the slices of job \"large\" on this \
         server: --host-memory has 4000 of 20000 free, and --disk-bytes has 16384 of 32768 free"
    );
    drop(first);
    assert_eq!(tiers[1].used(), [0, 0, 0]);
    tiers[1].place(&job(2_000), &[0]).unwrap();
}

#[test]
fn a_gpu_has_three_tiers_and_a_refusal_names_the_budgets_of_all() {
    let directory = tempfile::tempdir().unwrap();
    let tiers = |fastest_of_state| {
        let disk = Some((directory.path().to_owned(), 8_192));
        let limits = Limits { host: Some(16_384), disk, fastest_of_state, ..limits(20_000) };
        of_cpu(&limits)
    };
    let with_state = tiers(Tier::Memory);
    let first = with_state.place(&job(2_000), &[0]).unwrap();
    assert_eq!(with_state.used(), [16_000, 16_384, 0]);
    let Err(error) = with_state.place(&job(2_000), &[0]) else { panic!("it does not fit") };
    assert_eq!(
        error.to_string(),
        "out of memory: cannot allocate 32000 bytes for the slices of job \"large\" on this \
         server: --device-memory has 4000 of 20000 free, --host-memory has 0 of 16384 free, and \
         --disk-bytes has 8192 of 8192 free"
    );
    drop(first);
    // One of the state tensors would fit in the memory of the GPU.
    let small = job(1_000);
    let _small = with_state.place(&small, &[0]).unwrap();
    assert_eq!(with_state.used(), [16_000, 0, 0]);
    let without_state = tiers(Tier::Host);
    let small = without_state.place(&small, &[0]).unwrap();
    assert_eq!(without_state.used(), [8_000, 8_192, 0]);
    drop(small);
    // The master weights and the sum fit in the memory of the GPU, which is of no use to the state.
    let Err(error) = without_state.place(&job(2_500), &[0]) else { panic!("it does not fit") };
    assert_eq!(
        error.to_string(),
        "out of memory: cannot allocate 40000 bytes for the slices of job \"large\" on this \
         server, of which 20000 bytes cannot be in the memory of the GPU (--state-tier host, \
         or offload of the job): \
         --device-memory has 20000 of 20000 free, --host-memory has 16384 of 16384 free, and \
         --disk-bytes has 8192 of 8192 free"
    );
}
