//! The device on which a worker computes: the CPU, or a GPU in a binary that is built with the
//! feature `cuda`.

use burn::tensor::backend::BackendTypes;

use super::error::{Error, Result};

/// The backend without autograd.
#[cfg(not(feature = "cuda"))]
pub type Plain = burn::backend::Flex;
/// The backend without autograd.
#[cfg(feature = "cuda")]
pub type Plain = burn::backend::Cuda;

/// A device of the backend.
pub type Device = <Plain as BackendTypes>::Device;

/// The device of a rank: the CPU.
///
/// # Errors
/// None.
#[cfg(not(feature = "cuda"))]
pub fn of_rank(_rank: u32) -> Result<Device> {
    Ok(Device::default())
}

/// The device of a rank.
///
/// # Errors
/// Those of [`gpu_of_rank`].
#[cfg(feature = "cuda")]
pub fn of_rank(rank: u32) -> Result<Device> {
    // The backend panics where CUDA is missing, so this is asked first.
    let gpu = gpu_of_rank(rank)?;
    use_one_stream();
    Ok(Device::new(gpu))
}

/// Makes all threads use one CUDA stream. With a stream for each thread, CubeCL 0.10 returns the
/// memory of a tensor to the thread that created it while kernels of other threads still read it.
/// On an H100, training with tensors that another thread had uploaded gave wrong results.
#[cfg(feature = "cuda")]
fn use_one_stream() {
    use std::sync::Once;

    use burn::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    static CONFIGURED: Once = Once::new();
    CONFIGURED.call_once(|| {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.streaming.max_streams = 1;
        // Unlike `set`, this assignment does not panic if the configuration has already been read.
        *CubeClRuntimeConfig::storage().lock() = Some(config.into());
    });
}

/// The number of the GPU of a rank. The ranks of a machine take its GPUs in turn.
///
/// # Errors
/// [`Error::NoGpu`] if the machine has no GPU, or no driver.
pub fn gpu_of_rank(rank: u32) -> Result<usize> {
    let gpus = zeroshard_kernels::gpus();
    let gpus = gpus.map_err(|failure| Error::NoGpu { cause: failure.to_string() })?;
    Ok(rank as usize % gpus)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_the_error_says_what_is_missing() {
        match of_rank(0) {
            Ok(device) => println!("not tested: this machine has a GPU ({device:?})"),
            Err(error) => assert!(error.to_string().contains("no CUDA device"), "{error}"),
        }
    }
}
