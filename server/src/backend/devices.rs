//! The devices of a server, as its operator chose them.

use super::{
    Cpu, Result,
    cuda::{Cuda, driver::Gpu},
    failure::Failure,
};
use crate::config::DeviceChoice;

/// The devices of a server.
pub(crate) enum Devices {
    /// Host memory and the processors.
    Cpu(Cpu),
    /// GPUs.
    Cuda(Vec<Cuda<Gpu>>),
}

impl Devices {
    /// Opens the devices. `auto` is the first GPU if the machine has a usable one, and otherwise
    /// the CPU; the log says which.
    ///
    /// # Errors
    /// [`Failure`] of a GPU that was chosen by its number, or that exists and cannot be opened.
    pub(crate) fn open(choice: &DeviceChoice) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::Cpu(Cpu::new())),
            DeviceChoice::Cuda(numbers) => numbers
                .iter()
                .map(|&number| Cuda::open(number))
                .collect::<Result<_>>()
                .map(Self::Cuda),
            DeviceChoice::Auto => match Cuda::open(0) {
                Ok(gpu) => {
                    tracing::info!(device = "cuda:0", "slices are in the memory of the GPU");
                    Ok(Self::Cuda(vec![gpu]))
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
