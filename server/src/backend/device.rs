//! The device of a server, as its operator chose it.

use super::{
    Cpu, Result,
    cuda::{Cuda, driver::Gpu},
    failure::Failure,
};
use crate::config::DeviceChoice;

/// The device of a server.
pub(crate) enum Device {
    /// Host memory and the processors.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Cuda<Gpu>),
}

impl Device {
    /// Opens the device. `auto` is the first GPU if the machine has a usable one, and otherwise the
    /// CPU; the log says which.
    ///
    /// # Errors
    /// [`Failure`] of a GPU that was chosen by its number, or that exists and cannot be opened.
    pub(crate) fn open(choice: DeviceChoice) -> Result<Self> {
        let gpu = |number| Cuda::new(Gpu::open(number, Default::default())?);
        match choice {
            DeviceChoice::Cpu => Ok(Self::Cpu(Cpu::new())),
            DeviceChoice::Cuda(number) => gpu(number).map(Self::Cuda),
            DeviceChoice::Auto => match gpu(0) {
                Ok(gpu) => {
                    tracing::info!(device = "cuda:0", "slices are in the memory of the GPU");
                    Ok(Self::Cuda(gpu))
                }
                Err(Failure::Unavailable { reason }) => {
                    tracing::info!(device = "cpu", reason, "no CUDA device was found");
                    Ok(Self::Cpu(Cpu::new()))
                }
                Err(other) => Err(other),
            },
        }
    }
}
