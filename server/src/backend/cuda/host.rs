//! The kernels, compiled for the host by a C compiler, and a device that runs them.

use std::{
    collections::HashMap,
    ffi::c_void,
    fmt::Write,
    path::Path,
    process::Command,
    sync::{Mutex, OnceLock},
};

use libloading::Library;

use super::{
    Cuda, Device,
    launch::{Address, Launch},
};
use crate::backend::{Failure, Result, conformance, failure::DeviceName};

/// A block of a kernel, which takes the addresses of the arguments, its number, and the number of
/// blocks.
type Kernel = unsafe extern "C" fn(*const *const c_void, u32, u32);

/// The host as a device. It has its memory in words, so that all of it is aligned.
#[derive(Default)]
pub(super) struct Host {
    memory: Mutex<HashMap<Address, Vec<u64>>>,
}

impl Host {
    /// Bytes in the memory of the host, at an address that is aligned for every type.
    fn words(bytes: &[u8]) -> Vec<u64> {
        let mut words = vec![0; bytes.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        words
    }
}

impl Device for Host {
    fn number(&self) -> usize {
        0
    }

    /// An odd number, so that values of boxes are split.
    fn stage_bytes(&self) -> usize {
        10_004
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        let words = bytes.div_ceil(size_of::<u64>()).max(1);
        let mut memory = Vec::new();
        let reserved = memory.try_reserve_exact(words);
        reserved.map_err(|_| Failure::out_of_memory(DeviceName::Cuda(0), bytes))?;
        memory.resize(words, 0);
        let address = memory.as_ptr() as Address;
        self.memory.lock().unwrap().insert(address, memory);
        Ok(address)
    }

    fn free(&self, address: Address) {
        assert!(self.memory.lock().unwrap().remove(&address).is_some(), "it is allocated");
    }

    fn launch(&self, launch: &Launch) -> Result<()> {
        let arguments = launch.arguments();
        // SAFETY: `library` has made functions of this type for all kernels.
        let kernel = unsafe { library().get::<Kernel>(format!("launch_{}", launch.kernel)) };
        let kernel = kernel.expect("the kernel exists");
        let blocks = launch.blocks as u32;
        for block in 0..blocks {
            // SAFETY: the arguments are those of the kernel.
            unsafe { kernel(arguments.as_ptr(), block, blocks) };
        }
        Ok(())
    }

    fn upload(&self, bytes: &[u8], launches: &mut dyn FnMut(Address) -> Result<()>) -> Result<()> {
        launches(Self::words(bytes).as_ptr() as Address)
    }

    fn download(
        &self,
        bytes: &mut [u8],
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()> {
        let mut words = Self::words(&vec![0; bytes.len()]);
        launches(words.as_mut_ptr() as Address)?;
        bytes.copy_from_slice(&bytemuck::cast_slice(&words)[..bytes.len()]);
        Ok(())
    }
}

/// The compiled kernels.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda/kernels");
        let directory = tempfile::tempdir().unwrap();
        let [source, output] = ["kernels.c", "kernels.so"].map(|name| directory.path().join(name));
        std::fs::write(&source, with_launchers(&kernels)).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]);
        // No fused multiply-adds.
        compiler.args(["-O2", "-ffp-contract=off", "-shared", "-fPIC"]);
        compiler.arg("-I").arg(&kernels).arg(&source).arg("-o").arg(&output).arg("-lm");
        assert!(compiler.status().expect("a C compiler").success());
        // SAFETY: the library has no initialisers.
        unsafe { Library::new(&output) }.unwrap()
    })
}

/// The source of all kernels, with a function `launch_...` for each that takes its arguments by
/// their addresses.
fn with_launchers(kernels: &Path) -> String {
    let mut source =
        "#include \"all.cu\"\n_Thread_local unsigned block_index, block_count;\n".to_owned();
    let files = std::fs::read_dir(kernels).unwrap().map(|file| file.unwrap().path());
    for file in files.filter(|file| file.extension().is_some_and(|of| of == "cu")) {
        let text = std::fs::read_to_string(file).unwrap();
        for kernel in text.split("\nKERNEL ").skip(1) {
            let (name, rest) = kernel.split_once('(').unwrap();
            let parameters = rest.split_once(')').unwrap().0.split(',');
            let argument = |(index, parameter): (usize, &str)| {
                let (kind, name) = parameter.trim().rsplit_once([' ', '*']).unwrap();
                let pointer = if parameter.contains('*') { "*" } else { "" };
                let kind = kind.trim_end_matches('*');
                assert!(!name.is_empty());
                format!("*({kind} {pointer}*)arguments[{index}]")
            };
            let arguments: Vec<String> = parameters.enumerate().map(argument).collect();
            writeln!(
                source,
                "void launch_{name}(void **arguments, unsigned block, unsigned blocks) {{\n    \
                 block_index = block;\n    block_count = blocks;\n    {name}({});\n}}",
                arguments.join(", ")
            )
            .unwrap();
        }
    }
    source
}

#[test]
fn the_kernels_for_gpus_give_the_bits_of_the_cpu() {
    let cuda = Cuda::new(Host::default()).unwrap();
    conformance::run(&cuda);
    let device = cuda.device.clone();
    drop(cuda);
    assert!(device.memory.lock().unwrap().is_empty(), "all memory is freed");
}
