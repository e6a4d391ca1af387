//! Errors of devices.

/// An operation of a device that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// The device has too little memory. It goes on.
    #[error("device {device} is out of memory: {operation} of {bytes} bytes failed")]
    OutOfMemory { device: usize, operation: &'static str, bytes: usize },
    /// The device has failed, and every later operation on it fails as well.
    #[error("device {device} is lost: {operation} failed with {name} (code {code})")]
    Lost { device: usize, operation: &'static str, code: u32, name: String },
    /// The operation failed, and changed nothing.
    #[error("device {device}: {operation} failed with {name} (code {code})")]
    Refused { device: usize, operation: &'static str, code: u32, name: String },
    /// This machine has no usable driver.
    #[error("no CUDA device: {reason}")]
    Unavailable { reason: String },
}

/// A result of a device.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Whether an error of the driver means that the context cannot be used any more: CUDA documents
/// these errors as leaving the process in an inconsistent state.
fn is_lost(code: u32) -> bool {
    // Device unavailable; uncorrectable ECC, NVLink; illegal address, timeout, assert, hardware
    // stack, illegal instruction, misaligned address, address space, program counter, launch; the
    // context is destroyed; unknown.
    matches!(code, 46 | 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 999)
}

impl Failure {
    /// The failure of an operation with an error of the driver.
    pub(super) fn of_code(
        device: usize,
        operation: &'static str,
        bytes: usize,
        code: u32,
        name: String,
    ) -> Self {
        match code {
            2 => Failure::OutOfMemory { device, operation, bytes },
            code if is_lost(code) => Failure::Lost { device, operation, code, name },
            code => Failure::Refused { device, operation, code, name },
        }
    }
}
