//! Kernels that a C compiler has compiled for the host. They are fast, for long runs of programs,
//! but their accesses are not checked one by one: a launch counts as one that writes all bytes of
//! the allocations whose addresses it gets. Devices interpret PTX unless `FAKE_CUDA_KERNELS` names
//! a library of [`compile`].

use std::{
    ffi::c_void,
    fmt::Write,
    fs, io,
    path::Path,
    process::Command,
    sync::{Arc, OnceLock},
};

use libloading::Library;

use crate::{fault::Fault, memory::Memory, order::Stamp, run::Launch};

/// The number of addresses in a parameter of a kernel, at most.
const MOST_ADDRESSES: usize = 2;

/// A block of a kernel, which takes the addresses of the arguments, its number, and the number of
/// blocks.
type Block = unsafe extern "C" fn(*const *const c_void, u32, u32);

/// Compiles the kernels in the files `*.cu` of a directory to a library, which has a function
/// `launch_KERNEL` for each of them, which [`run`] calls.
///
/// # Errors
/// A file that cannot be read or written, or source that the compiler refuses.
///
/// # Panics
/// A kernel without parameters in brackets.
pub fn compile(kernels: &Path, library: &Path) -> io::Result<()> {
    let source = library.with_extension("c");
    fs::write(&source, with_launchers(kernels)?)?;
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]);
    // No fused multiply-adds.
    compiler.args(["-O2", "-ffp-contract=off", "-shared", "-fPIC"]);
    compiler.arg("-I").arg(kernels).arg(&source).arg("-o").arg(library).arg("-lm");
    match compiler.status()? {
        status if status.success() => Ok(()),
        status => Err(io::Error::other(format!("cc {}: {status}", source.display()))),
    }
}

/// The source of all kernels, with a function for each that takes its arguments by their addresses.
fn with_launchers(kernels: &Path) -> io::Result<String> {
    let mut source = "_Thread_local unsigned block_index, block_count;\n".to_owned();
    for file in fs::read_dir(kernels)? {
        let file = file?.path();
        if file.extension().is_none_or(|of| of != "cu") {
            continue;
        }
        writeln!(source, "#include {:?}", file.file_name().expect("a file of the directory"))
            .expect("a text can be written");
        for kernel in fs::read_to_string(file)?.split("\nKERNEL ").skip(1) {
            let (name, rest) = kernel.split_once('(').expect("a kernel has parameters");
            let parameters = rest.split_once(')').expect("parameters end").0.split(',');
            let argument = |(index, parameter): (usize, &str)| {
                let (kind, _) = parameter.trim().rsplit_once([' ', '*']).expect("a type");
                let pointer = if parameter.contains('*') { "*" } else { "" };
                let kind = kind.trim_end_matches('*');
                format!("*({kind} {pointer}*)arguments[{index}]")
            };
            let arguments: Vec<String> = parameters.enumerate().map(argument).collect();
            let arguments = arguments.join(", ");
            writeln!(
                source,
                "void launch_{name}(void **arguments, unsigned block, unsigned blocks) {{\n    \
                 block_index = block;\n    block_count = blocks;\n    {name}({arguments});\n}}"
            )
            .expect("a text can be written");
        }
    }
    Ok(source)
}

/// Runs all blocks of a kernel, one after the other.
///
/// # Panics
/// If the library, which [`compile`] has made, has no such kernel.
///
/// # Safety
/// `arguments` are the addresses of the arguments of the kernel, whose memory nothing else accesses
/// meanwhile.
pub unsafe fn run(library: &Library, kernel: &str, arguments: &[*const c_void], blocks: u32) {
    // SAFETY: `compile` has made functions of this type for all kernels.
    let function = unsafe { library.get::<Block>(format!("launch_{kernel}")) };
    let function = function.expect("the kernel is compiled");
    for block in 0..blocks {
        // SAFETY: the caller guarantees it.
        unsafe { function(arguments.as_ptr(), block, blocks) };
    }
}

/// The library that the program asks for.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let open = || {
        let path = std::env::var_os("FAKE_CUDA_KERNELS")?;
        // SAFETY: the library has no initialisers.
        Some(unsafe { Library::new(path) }.expect("FAKE_CUDA_KERNELS is a library of kernels"))
    };
    LIBRARY.get_or_init(open).as_ref()
}

impl Launch {
    /// Runs all blocks of the compiled kernel.
    ///
    /// # Errors
    /// An argument that is an address without memory.
    pub(crate) fn run_compiled(
        &self,
        library: &Library,
        memory: &mut Memory,
        stamp: &Arc<Stamp>,
    ) -> Result<(), Fault> {
        let mut words = vec![0_u64; self.parameters.len().div_ceil(size_of::<u64>())];
        for (index, word) in words.iter_mut().enumerate() {
            let start = index * size_of::<u64>();
            let bytes =
                &self.parameters[start..self.parameters.len().min(start + size_of::<u64>())];
            let mut value = [0; size_of::<u64>()];
            value[..bytes.len()].copy_from_slice(bytes);
            let value = u64::from_le_bytes(value);
            // The scalars of an optimizer are a larger structure. A number in it, with bytes of
            // padding that have no value, may look like an address.
            let is_scalar = |&(offset, size): &(usize, usize)| {
                (offset..offset + size).contains(&start) && size > MOST_ADDRESSES * size_of::<u64>()
            };
            *word = match self.kernel.parameters.iter().any(is_scalar) {
                true => value,
                false => memory.on_host(value, stamp)?,
            };
        }
        let start = words.as_ptr().cast::<u8>();
        // SAFETY: the parameters are within the words.
        let argument = |(offset, _): &(usize, usize)| unsafe { start.add(*offset) }.cast();
        let arguments: Vec<*const c_void> = self.kernel.parameters.iter().map(argument).collect();
        // SAFETY: the arguments are those of the kernel, and their memory is borrowed.
        unsafe { run(library, &self.kernel.name, &arguments, self.blocks) };
        Ok(())
    }
}
