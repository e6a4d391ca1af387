//! Shard servers whose device is a GPU, of this machine or of the fake driver (`tests/fake-cuda`).

use std::{
    env, fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use fake_cuda::compiled;

/// If this variable is set, the shard servers of all tests run on a GPU, except those with flags
/// for the tiers of the CPU: `real`, the first one of this machine, or `fake`, one of the fake
/// driver with kernels that are compiled for the host.
const VARIABLE: &str = "ZEROSHARD_TEST_GPU";

/// A directory in which the loader finds the fake driver under the names of the driver and of NCCL.
/// The library lies beside the tests that depend on it.
fn directory() -> PathBuf {
    let exe = env::current_exe().expect("a running program has a path");
    let deps = exe.parent().expect("a file is in a directory");
    let library = deps.join("libfake_cuda.so");
    assert!(library.exists(), "{} is missing: the test must depend on it", library.display());
    let directory = deps.join("fake-driver");
    fs::create_dir_all(&directory).expect("the directory of the tests is writable");
    for name in ["libcuda.so", "libnccl.so"] {
        match symlink(Path::new("..").join("libfake_cuda.so"), directory.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => panic!("{error}"),
            _ => {}
        }
    }
    directory
}

/// The kernels, compiled for the host.
fn kernels() -> &'static Path {
    static KERNELS: OnceLock<PathBuf> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let sources =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/kernels/src/cuda/kernels");
        let (directory, name) = (directory(), "kernels.so");
        let compiled = tempfile::tempdir_in(&directory).expect("the directory is writable");
        compiled::compile(&sources, &compiled.path().join(name))
            .expect("the kernels can be compiled");
        // Another process may have the library of an earlier run open, which stays as it is.
        let library = directory.join(name);
        fs::rename(compiled.path().join(name), &library).expect("both are in one directory");
        library
    })
}

/// Has a program use the fake driver, which aborts it when it uses a device wrongly, and the fake
/// NCCL.
pub fn with_fake_driver(command: &mut Command) {
    command.env("LD_LIBRARY_PATH", directory()).env("FAKE_CUDA_ABORT", "1");
    // Memory that is freed on the device is returned to the system. By default the threshold rises
    // with the sizes that are freed, and tests of a server's memory would see what was freed.
    command.env("MALLOC_MMAP_THRESHOLD_", "1048576");
}

/// Runs a shard server with these flags on a GPU, if [`VARIABLE`] asks for it.
///
/// # Panics
/// If the variable has another value.
pub(crate) fn choose_device(command: &mut Command, flags: &[&str]) {
    let for_cpu = ["--memory", "--host-memory", "--device"];
    let is_for_cpu = flags.iter().any(|flag| for_cpu.contains(flag));
    let Some(kind) = env::var_os(VARIABLE).filter(|_| !is_for_cpu) else {
        return;
    };
    match kind.to_str() {
        Some("real") => {}
        Some("fake") => {
            with_fake_driver(command);
            command.env("FAKE_CUDA_KERNELS", kernels());
        }
        _ => panic!("{VARIABLE} is {}; it must be real or fake", kind.display()),
    }
    command.args(["--device", "cuda:0"]);
}
