//! Errors of devices.

use std::fmt;

use zeroshard_model::Error;

/// The name of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The processors of the machine, and its memory.
    Cpu,
    /// The GPU with this number.
    Cuda(usize),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// An operation of a device that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The device has too little memory. It goes on.
    #[error("{device} cannot {operation} ({bytes} bytes): out of memory")]
    OutOfMemory {
        /// The device.
        device: DeviceName,
        /// What it was to do.
        operation: &'static str,
        /// The bytes that it needs.
        bytes: usize,
    },
    /// The device has failed, and every later operation on it fails as well.
    #[error("{device} is lost: it cannot {operation}: {name} (code {code})")]
    Lost {
        /// The device.
        device: DeviceName,
        /// What it was to do.
        operation: &'static str,
        /// The error of the driver.
        code: u32,
        /// The name of the error.
        name: String,
    },
    /// The operation failed, and changed nothing.
    #[error("{device} cannot {operation}: {name} (code {code})")]
    Refused {
        /// The device.
        device: DeviceName,
        /// What it was to do.
        operation: &'static str,
        /// The error of the driver.
        code: u32,
        /// The name of the error.
        name: String,
    },
    /// This machine has no usable driver.
    #[error("no CUDA device: {reason}")]
    Unavailable {
        /// The missing part.
        reason: String,
    },
}

/// A result of a device.
pub type Result<T> = std::result::Result<T, Failure>;

/// Returns whether an error of the driver means that the context cannot be used any more: CUDA
/// documents these errors as leaving the process in an inconsistent state.
fn is_lost(code: u32) -> bool {
    // Device unavailable; uncorrectable ECC, NVLink; illegal address, timeout, assert, hardware
    // stack, illegal instruction, misaligned address, address space, program counter, launch; the
    // context is destroyed; unknown.
    matches!(code, 46 | 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 999)
}

impl Failure {
    /// A device has too little memory for `bytes` more.
    pub fn out_of_memory(device: DeviceName, bytes: usize) -> Self {
        Self::OutOfMemory { device, operation: "allocate memory", bytes }
    }

    /// The failure of an operation of a GPU with an error of the driver.
    pub(super) fn of_code(
        device: usize,
        operation: &'static str,
        bytes: usize,
        code: u32,
        name: String,
    ) -> Self {
        let device = DeviceName::Cuda(device);
        match code {
            2 => Failure::OutOfMemory { device, operation, bytes },
            code if is_lost(code) => Failure::Lost { device, operation, code, name },
            code => Failure::Refused { device, operation, code, name },
        }
    }

    /// The error of a server. `what`: the purpose of memory that is missing.
    pub fn of(self, what: impl Into<String>) -> Error {
        match self {
            Self::OutOfMemory { bytes, .. } => {
                Error::OutOfMemory { what: what.into(), bytes: bytes as u64 }
            }
            Self::Lost { .. } | Self::Refused { .. } | Self::Unavailable { .. } => {
                Error::Device { slice: None, cause: self.to_string() }
            }
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.of("an operation")
    }
}
