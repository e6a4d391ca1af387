//! The slices of a job on the devices of a server.

use zeroshard_kernels::Cpu;
use zeroshard_model::{Manifest, TensorSpec};

use super::*;
use crate::{
    instrumented::Instrumented,
    tier::{Limits, Tier, tests::traffic},
};

/// A tensor of each of these sizes, with plain SGD: two arrays.
fn job(sizes: &[u64]) -> JobSpec {
    let tensors = sizes.iter().enumerate();
    let tensors = tensors.map(|(index, size)| TensorSpec::new(format!("t{index}"), [*size]));
    JobSpec::new("job", Manifest::new(tensors.collect()).unwrap(), vec!["sgd".parse().unwrap()])
}

fn devices<const N: usize>(backends: [Instrumented; N]) -> Vec<Device<Instrumented>> {
    backends.map(|backend| Device::new(Arc::new(backend), None)).into()
}

/// The number of the device of each home.
fn numbers<B: Backend>(devices: &[Device<B>], homes: &[Home<'_, B>]) -> Vec<usize> {
    let is_at = |home: &Home<'_, B>| devices.iter().position(|of| std::ptr::eq(of, home.device));
    homes.iter().map(|home| is_at(home).expect("one of the devices")).collect()
}

#[test]
fn slices_are_balanced_over_devices_by_bytes_and_later_jobs_take_the_emptier_one() {
    let devices = devices([Instrumented::new(), Instrumented::new()]);
    let first = job(&[100, 10, 20, 30]);
    let (homes, spaces) = place(&devices, &first, &[0, 1, 2, 3]).unwrap();
    assert_eq!(numbers(&devices, &homes), [0, 1, 1, 1]);
    assert_eq!(devices.iter().map(|of| of.slices.used()).collect::<Vec<_>>(), [800, 480]);
    let (homes, _more) = place(&devices, &job(&[1]), &[0]).unwrap();
    assert_eq!(numbers(&devices, &homes), [1]);
    drop(spaces);
    let (homes, _) = place(&devices, &job(&[1]), &[0]).unwrap();
    assert_eq!(numbers(&devices, &homes), [0]);
}

#[test]
fn a_lost_device_gets_no_slices_unless_all_are_lost() {
    let lost = || {
        let mut backend = Instrumented::new();
        backend.is_lost = true;
        backend
    };
    let of_two = devices([lost(), Instrumented::new()]);
    let (homes, _) = place(&of_two, &job(&[1, 1]), &[0, 1]).unwrap();
    assert_eq!(numbers(&of_two, &homes), [1, 1]);
    // Allocations on it fail with an error that names it.
    let of_one = devices([lost()]);
    let (homes, _) = place(&of_one, &job(&[1]), &[0]).unwrap();
    assert_eq!(numbers(&of_one, &homes), [0]);
}

#[test]
fn a_job_with_offload_is_refused_by_a_gpu_without_other_memory_and_is_like_any_other_on_a_cpu() {
    let offload = JobSpec { offload: true, ..job(&[4]) };
    let on_cpu = devices([Instrumented::new()]);
    assert!(place(&on_cpu, &offload, &[0]).unwrap().0[0].places.are_all_in_memory());
    let mut gpu = Instrumented::new();
    gpu.device = DeviceName::Cuda(3);
    let on_gpu = devices([gpu]);
    let refused = place(&on_gpu, &offload, &[0]).err().unwrap().to_string();
    assert!(refused.contains("job \"job\" has offload") && refused.contains("cuda:3"), "{refused}");
    assert!(place(&on_gpu, &job(&[4]), &[0]).is_ok());
}

#[test]
fn devices_have_budgets_of_their_own_and_share_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Some((directory.path().to_owned(), 3 * 4096));
    let limits = Limits {
        memory: 8_192,
        host: Some(0),
        option: "--host-memory",
        disk,
        fastest_of_state: Tier::Memory,
    };
    let backends = [Arc::new(Cpu::new()), Arc::new(Cpu::new())];
    let tiers = Tiers::new(&backends, &limits, [traffic(), traffic()]).unwrap();
    let devices = backends.into_iter().zip(tiers);
    let devices: Vec<_> = devices.map(|(on, tiers)| Device::new(on, Some(tiers))).collect();
    let used = || devices.iter().map(|of| of.tiers.as_ref().unwrap().used()).collect::<Vec<_>>();
    // Each slice has two arrays of a page, which fill the memory of a device.
    let page = job(&[1024, 1024]);
    let (homes, first) = place(&devices, &page, &[0, 1]).unwrap();
    assert_eq!(numbers(&devices, &homes), [0, 1]);
    assert_eq!(used(), [[8_192, 0, 0], [8_192, 0, 0]]);
    let (homes, second) = place(&devices, &page, &[0]).unwrap();
    assert!(!homes[0].places.are_all_in_memory());
    assert_eq!(used(), [[8_192, 0, 8_192], [8_192, 0, 8_192]]);
    let refused = place(&devices, &page, &[0]).err();
    assert!(matches!(refused, Some(Error::OutOfMemory { .. })), "{refused:?}");
    drop((first, second));
    assert_eq!(used(), [[0; 3]; 2]);
    assert_eq!(devices.iter().map(|of| of.slices.used()).sum::<u64>(), 0);
}
