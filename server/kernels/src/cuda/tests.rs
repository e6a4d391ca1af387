//! The backend on the fake driver: its bits, its fences, and its errors.

use std::sync::Arc;

use zeroshard_model::{DType, optimizer::AppliedSteps};

use super::{
    Cuda, Device,
    driver::{Fence, Gpu, Staging},
    fake::Fake,
    host::Host,
};
use crate::{
    Backend, Failure, Output, Result, Update, conformance, failure::DeviceName, optim::golden,
};

const CAPACITY: u64 = 1 << 30;
/// Small buffers, so that values are split and buffers are used again.
const STAGING: Staging = Staging { buffers: 2, bytes: 10_004 };

fn open(fake: Fake, staging: Staging) -> Result<Cuda<Gpu>> {
    Gpu::open(fake.device, staging).map(Cuda::new)
}

/// Asserts that a program did nothing wrong, and has freed everything.
fn assert_clean(fake: Fake, what: &str) {
    assert_eq!(fake.take_faults(), Vec::<String>::new(), "{what}");
    assert_eq!(fake.live(), Vec::<String>::new(), "{what}");
}

#[test]
fn interpreted_ptx_gives_the_bits_of_the_cpu() {
    let fake = Fake::new(1, CAPACITY);
    let cuda = open(fake, Staging { buffers: 3, bytes: 1 << 20 }).unwrap();
    conformance::run(&cuda);
    let figures = fake.figures();
    drop(cuda);
    assert_clean(fake, "conformance");
    let million = 1e3 * figures.instructions as f64 / figures.nanoseconds as f64;
    println!("{figures:?}: {million:.0} million instructions a second");
}

#[test]
fn interpreted_ptx_equals_the_golden_vectors() {
    let fake = Fake::new(2, CAPACITY);
    let cuda = open(fake, STAGING).unwrap();
    golden::assert_equal(&cuda);
    drop(cuda);
    assert_clean(fake, "golden vectors");
}

/// A process without the fake driver, which runs only this test.
#[test]
fn without_a_driver_no_device_is_found() {
    const ALONE: &str = "ZEROSHARD_TEST_WITHOUT_DRIVER";
    if std::env::var_os(ALONE).is_some() {
        let opened = Gpu::open(0, STAGING).err();
        let has_driver = std::path::Path::new("/proc/driver/nvidia").exists();
        assert!(has_driver || matches!(opened, Some(Failure::Unavailable { .. })), "{opened:?}");
        return;
    }
    let name = "cuda::tests::without_a_driver_no_device_is_found";
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    let done = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
    let output = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && output.contains("1 passed"), "{output}");
}

#[test]
fn a_device_that_does_not_exist_is_refused() {
    Fake::new(0, CAPACITY);
    let opened = Gpu::open(1 << 20, STAGING).err();
    assert!(matches!(opened, Some(Failure::Refused { code: 101, .. })), "{opened:?}");
}

/// A few steps of one slice: gradients are added in parts, the norm is read, the step is applied
/// while a reader holds the old parameters, and the parameters are read. Returns the parameters and
/// the norms.
fn train<D: Device>(cuda: &Cuda<D>) -> Result<Vec<u8>> {
    const NUMEL: usize = 5_003;
    let optimizer = "lamb".parse().unwrap();
    let all = || 0..NUMEL;
    let value = |seed: usize| move |i: usize| ((i * 7 + seed * 13) % 101) as f32 / 50.0 - 1.0;
    let bytes = |seed| (0..NUMEL).map(value(seed)).flat_map(f32::to_le_bytes).collect::<Vec<_>>();
    let [mut master, mut first, mut second, gradient] =
        [(); 4].map(|()| cuda.allocate(DType::F32, NUMEL));
    cuda.store(master.as_mut().map_err(|error| error.clone())?, all(), &bytes(0), DType::F32)?;
    let mut published = cuda.allocate(DType::Bf16, NUMEL)?;
    let mut gradient = gradient?;
    let (mut applied, mut squares) = (AppliedSteps::default(), Vec::new());
    for step in 1..3 {
        assert!(cuda.store(&mut gradient, all(), &bytes(step), DType::F32)?);
        cuda.accumulate(&mut gradient, all(), &bytes(step + 9), DType::F32)?;
        cuda.canonicalise(&mut gradient, all())?;
        squares.extend(cuda.block_sums(&gradient, 0..NUMEL)?);
        let update = Update::after(applied, &optimizer, 0.5);
        applied = update.applied();
        let earlier = Arc::new(master?);
        let mut next = cuda.allocate(DType::F32, NUMEL)?;
        let output = Output { buffer: &mut next, earlier: Some(earlier.clone()) };
        let state = [&mut first, &mut second];
        let state = state.map(|of| of.as_mut().map_err(|e| e.clone()).map(Into::into));
        let state = state.into_iter().collect::<Result<_>>()?;
        cuda.apply(&update, output, state, Some(&gradient), Some(&mut published), None)?;
        cuda.read(&earlier, all(), DType::F32)?;
        master = Ok(next);
    }
    let mut result = cuda.read(&Arc::new(master?), all(), DType::F32)?.to_vec();
    result.extend(cuda.read(&Arc::new(published), all(), DType::Bf16)?);
    result.extend(squares.into_iter().flat_map(f64::to_le_bytes));
    Ok(result)
}

/// The results of training on the device of a test, and its faults.
fn trained(seed: u64, without: Option<Fence>) -> (Result<Vec<u8>>, Vec<String>) {
    let fake = Fake::new(seed, CAPACITY);
    let mut gpu = Gpu::open(fake.device, STAGING).unwrap();
    gpu.without = without;
    let cuda = Cuda::new(gpu);
    let result = train(&cuda);
    drop(cuda);
    (result, fake.take_faults())
}

#[test]
fn a_thousand_schedules_give_the_same_bits() {
    let (expected, faults) = trained(0, None);
    assert_eq!(faults, Vec::<String>::new());
    let expected = expected.unwrap();
    for seed in 1..1_000 {
        let (result, faults) = trained(seed, None);
        assert_eq!(faults, Vec::<String>::new(), "seed {seed}");
        assert!(result.as_ref() == Ok(&expected), "seed {seed}");
    }
}

/// More threads than staging buffers.
#[test]
fn threads_share_a_device() {
    let expected = trained(0, None).0.unwrap();
    for seed in 0..20 {
        let fake = Fake::new(seed, CAPACITY);
        let cuda = open(fake, STAGING).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| train(&cuda).unwrap())).collect();
            for thread in threads {
                assert!(thread.join().unwrap() == expected, "seed {seed}");
            }
        });
        drop(cuda);
        assert_clean(fake, "threads");
    }
}

/// `tests/run gpu` runs it, in a process without the fake driver.
#[test]
#[ignore = "needs a GPU"]
fn a_gpu_gives_the_bits_of_the_cpu() {
    for staging in [STAGING, Staging::default()] {
        let cuda = Cuda::new(Gpu::open(0, staging).unwrap());
        conformance::run(&cuda);
        golden::assert_equal(&cuda);
        assert_eq!(train(&cuda).unwrap(), trained_on_the_host());
    }
}

/// The results of the same training with the compiled kernels.
fn trained_on_the_host() -> Vec<u8> {
    train(&Cuda::new(Host::default())).unwrap()
}

#[test]
fn the_host_and_the_fake_driver_agree() {
    assert!(trained(0, None).0.unwrap() == trained_on_the_host());
}

#[test]
fn every_fence_that_is_left_out_is_found() {
    use Fence::{Arrived, Consumed, Filled, Produced, Sent};
    for fence in [Filled, Consumed, Sent, Produced, Arrived] {
        let mut found = 0;
        for seed in 0..20 {
            let (_, faults) = trained(seed, Some(fence));
            let is_race = |of: &String| of.contains(": race: ") || of.contains(" changed: ");
            assert!(faults.iter().all(is_race), "{fence:?}: {faults:?}");
            found += usize::from(!faults.is_empty());
        }
        assert_eq!(found, 20, "schedules in which the missing {fence:?} was found");
    }
}

/// Opens a device, trains on it and closes it. Returns the number of driver calls.
fn call_count() -> u64 {
    let fake = Fake::new(0, CAPACITY);
    train(&open(fake, STAGING).unwrap()).unwrap();
    fake.figures().calls
}

#[test]
fn every_call_that_fails_is_a_typed_error_and_nothing_leaks() {
    const OUT_OF_MEMORY: u32 = 2;
    const INVALID_VALUE: u32 = 1;
    let calls = call_count();
    // Out of memory, a refusal, a launch failure, an uncorrectable ECC error, a lost device.
    for code in [OUT_OF_MEMORY, INVALID_VALUE, 719, 214, 46] {
        let (mut failed, mut unnoticed) = (0, 0);
        for after in 0..calls {
            let fake = Fake::new(after, CAPACITY);
            fake.fail("", after, code, false);
            let result = open(fake, STAGING).and_then(|cuda| train(&cuda));
            let what = format!("call {after} of {calls} with {code}: {result:?}");
            match result {
                Ok(_) => unnoticed += 1,
                Err(Failure::OutOfMemory { device, .. }) => {
                    assert_eq!(
                        (device, code),
                        (DeviceName::Cuda(fake.device), OUT_OF_MEMORY),
                        "{what}"
                    );
                    failed += 1;
                }
                Err(Failure::Refused { device, code: of, .. }) => {
                    assert_eq!(
                        (device, of),
                        (DeviceName::Cuda(fake.device), INVALID_VALUE),
                        "{what}"
                    );
                    assert_eq!(of, code, "{what}");
                    failed += 1;
                }
                Err(Failure::Lost { device, code: of, .. }) => {
                    assert_eq!((device, of), (DeviceName::Cuda(fake.device), code), "{what}");
                    assert!(code > INVALID_VALUE && code != OUT_OF_MEMORY, "{what}");
                    failed += 1;
                }
                Err(Failure::Unavailable { .. }) => panic!("{what}"),
            }
            assert_clean(fake, &what);
        }
        // Only calls that free something may fail without an error.
        assert!(failed > 3 * unnoticed, "{code}: {failed} failed, {unnoticed} did not");
    }
}

#[test]
fn a_kernel_that_fails_late_loses_the_device_and_nothing_leaks() {
    for after in 0..20 {
        let fake = Fake::new(after, CAPACITY);
        fake.fail("cuLaunchKernel", after, 719, true);
        let cuda = open(fake, STAGING).unwrap();
        let result = train(&cuda);
        assert!(matches!(result, Err(Failure::Lost { code: 719, .. })), "{result:?}");
        assert!(cuda.is_lost());
        drop(cuda);
        assert_clean(fake, "after a late failure");
    }
}

#[test]
fn a_device_goes_on_after_an_allocation_that_is_too_large() {
    let fake = Fake::new(0, 1 << 20);
    let cuda = open(fake, STAGING).unwrap();
    let expected = train(&cuda).unwrap();
    let refused = cuda.allocate(DType::F32, 1 << 20).err();
    assert!(matches!(refused, Some(Failure::OutOfMemory { bytes: 4_194_304, .. })), "{refused:?}");
    assert_eq!(train(&cuda).unwrap(), expected);
    drop(cuda);
    assert_clean(fake, "after an allocation that was too large");
}

#[test]
fn usage_has_the_memory_the_copies_and_the_time_in_kernels_of_a_device() {
    let fake = Fake::new(3, CAPACITY);
    let cuda = open(fake, STAGING).unwrap();
    let before = cuda.usage().unwrap();
    let training = train(&cuda).unwrap();
    // Parameters and two gradients in each of two steps, of 5,003 f32 each.
    let uploaded = 5 * 5_003 * 4;
    let held = cuda.allocate(DType::F32, 1 << 20).unwrap();
    let after = cuda.usage().unwrap();
    assert_eq!(cuda.device(), DeviceName::Cuda(fake.device));
    assert_eq!(after.uploaded, uploaded);
    // The result, and the old parameters in each step.
    let read = training.len() as u64 + 2 * 5_003 * 4;
    assert!((read..read + 100).contains(&after.downloaded), "{after:?}");
    let [(used_before, total), (used, _)] = [&before, &after].map(|of| of.memory.unwrap());
    assert_eq!(total, CAPACITY);
    assert!(used >= used_before + (4 << 20), "{before:?} {after:?}");
    let expected = fake.figures().nanoseconds as f64;
    let found = after.kernels.as_nanos() as f64;
    assert!((found / expected - 1.0).abs() < 0.01, "{found} of {expected}");
    drop(held);
    fake.fail("", 0, 719, false);
    assert!(train(&cuda).is_err() && cuda.is_lost());
    assert_eq!(cuda.usage().unwrap().memory, None);
    drop(cuda);
    assert_clean(fake, "usage");
}

#[test]
fn devices_do_not_share_their_errors() {
    let [lost, other] = [0, 1].map(|seed| Fake::new(seed, CAPACITY));
    let [first, second] = [lost, other].map(|fake| open(fake, STAGING).unwrap());
    lost.fail("", 10, 719, false);
    assert!(train(&first).is_err());
    train(&second).unwrap();
    drop((first, second));
    assert_clean(lost, "lost");
    assert_clean(other, "other");
}
