//! The devices of a server, as its operator chose them.

use zeroshard_kernels::{Backend, Cpu, Failure, Result, gpu};

use crate::config::DeviceChoice;

/// The devices of a server.
pub(crate) enum Devices<G> {
    /// Host memory and the processors.
    Cpu(Cpu),
    /// GPUs.
    Gpus(Vec<G>),
}

/// Opens the devices. `auto` is the first GPU if the machine has a usable one, and otherwise the
/// CPU; the log says which.
///
/// # Errors
/// [`Failure`] of a GPU that was chosen by its number, or that exists and cannot be opened.
pub(crate) fn open(choice: &DeviceChoice) -> Result<Devices<impl Backend>> {
    match choice {
        DeviceChoice::Cpu => Ok(Devices::Cpu(Cpu::new())),
        DeviceChoice::Cuda(numbers) => {
            numbers.iter().map(|&number| gpu(number)).collect::<Result<_>>().map(Devices::Gpus)
        }
        DeviceChoice::Auto => match gpu(0) {
            Ok(gpu) => {
                tracing::info!(device = "cuda:0", "slices are in the memory of the GPU");
                Ok(Devices::Gpus(vec![gpu]))
            }
            Err(Failure::Unavailable { reason }) => {
                tracing::info!(device = "cpu", reason, "no CUDA device was found");
                Ok(Devices::Cpu(Cpu::new()))
            }
            Err(other) => Err(other),
        },
    }
}
