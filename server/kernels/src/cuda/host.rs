//! The kernels, compiled for the host by a C compiler, and a device that runs them.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Mutex, OnceLock},
};

use fake_cuda::compiled;
use libloading::Library;

use super::{
    Cuda, Device,
    launch::{Address, Launch},
};
use crate::{Failure, Result, Usage, conformance, failure::DeviceName};

/// The host as a device. It has its memory in words, so that all of it is aligned.
#[derive(Default)]
pub(super) struct Host {
    memory: Mutex<HashMap<Address, Vec<u64>>>,
}

impl Host {
    /// Memory of the host for these bytes, at an address that is aligned for every type.
    fn words(bytes: usize) -> Vec<u64> {
        vec![0; bytes.div_ceil(size_of::<u64>())]
    }
}

impl Device for Host {
    fn number(&self) -> usize {
        0
    }

    fn is_lost(&self) -> bool {
        false
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

    fn launch(&self, launches: &[Launch]) -> Result<()> {
        for launch in launches {
            let (arguments, blocks) = (launch.arguments(), launch.blocks as u32);
            // SAFETY: the arguments are those of the kernel.
            unsafe { compiled::run(library(), launch.kernel, &arguments, blocks) };
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        unreachable!("only servers ask")
    }

    fn upload(
        &self,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()> {
        let mut words = Self::words(bytes);
        fill(&mut bytemuck::cast_slice_mut(&mut words)[..bytes]);
        launches(words.as_ptr() as Address)
    }

    fn download(
        &self,
        bytes: &mut [u8],
        launches: &mut dyn FnMut(Address) -> Result<()>,
    ) -> Result<()> {
        let mut words = Self::words(bytes.len());
        launches(words.as_mut_ptr() as Address)?;
        bytes.copy_from_slice(&bytemuck::cast_slice(&words)[..bytes.len()]);
        Ok(())
    }
}

/// The compiled kernels.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
        let directory = tempfile::tempdir().unwrap();
        let library = directory.path().join("kernels.so");
        compiled::compile(&kernels, &library).unwrap();
        // SAFETY: the library has no initialisers.
        unsafe { Library::new(&library) }.unwrap()
    })
}

#[test]
fn the_kernels_for_gpus_give_the_bits_of_the_cpu() {
    let cuda = Cuda::new(Host::default());
    conformance::run(&cuda);
    let device = cuda.device.clone();
    drop(cuda);
    assert!(device.memory.lock().unwrap().is_empty(), "all memory is freed");
}
