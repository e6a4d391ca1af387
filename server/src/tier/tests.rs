//! Tiers for tests, and the budgets.

use std::{path::Path, sync::atomic::AtomicU64};

use zeroshard_proto::{Manifest, TensorSpec};

pub(crate) use super::scratch::tests::Fault;
use super::{
    scratch::tests::{Faulty, traffic},
    *,
};
use crate::backend::Cpu;

/// Tiers without memory, and with room for everything on a disk that fails after `left` further
/// operations, and with `working` bytes of working buffers.
pub(crate) fn failing<B: Backend>(
    backend: &B,
    fault: Fault,
    left: &Arc<AtomicU64>,
    working: usize,
) -> (Arc<Tiers<B>>, Traffic) {
    let (disk, traffic) = (Box::new(Faulty::new(fault, left.clone())), traffic());
    let scratch = Scratch::on(disk, Path::new("/scratch"), traffic.clone());
    (Tiers::on(backend, 0, Some((scratch, u64::MAX)), working).unwrap(), traffic)
}

/// Tiers whose disk does not fail.
pub(crate) fn tiers<B: Backend>(backend: &B, working: usize) -> (Arc<Tiers<B>>, Traffic) {
    failing(backend, Fault::Read, &Arc::new(AtomicU64::new(u64::MAX)), working)
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
        Tiers::new(&Cpu::new(), Limits { memory: 20_000, disk }, traffic()).unwrap()
    };
    let tiers = [tiers(None), tiers(Some(32_768))];
    let text = |tiers: &Tiers<Cpu>, numel| match tiers.place(&job(numel), &[0]) {
        Err(error @ Error::OutOfMemory { .. }) => error.to_string(),
        other => panic!("{:?}", other.map(|placed| placed.on_disk)),
    };
    assert_eq!(
        text(&tiers[0], 2_000),
        "out of memory: cannot allocate 32000 bytes for the slices of job \"large\" on this \
         server: --host-memory has 20000 of 20000 free, and there is no --disk"
    );
    let first = tiers[1].place(&job(2_000), &[0]).unwrap();
    assert_eq!(tiers[1].used(), [16_000, 16_384]);
    assert_eq!(
        text(&tiers[1], 2_000),
        "out of memory: cannot allocate 32000 bytes for the slices of job \"large\" on this \
         server: --host-memory has 4000 of 20000 free, and --disk-bytes has 16384 of 32768 free"
    );
    drop(first);
    assert_eq!(tiers[1].used(), [0, 0]);
    tiers[1].place(&job(2_000), &[0]).unwrap();
}
