//! Buffers between the host and a device, each of pinned memory and of device memory of the same
//! size. A ring of them lets copies overlap with kernels, without allocations.

use std::sync::{Condvar, Mutex, PoisonError};

use super::handles::{Event, Pinned, Static};
use crate::Result;

/// A staging buffer.
pub(super) struct Buffer {
    pub(super) pinned: Pinned,
    pub(super) memory: Static,
    /// Recorded when the copy is complete.
    pub(super) copied: Event,
    /// Recorded when the kernels are complete that use the device memory.
    pub(super) used: Event,
}

// SAFETY: objects of the driver may be used by any thread; a buffer is used by one at a time.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(device: usize, bytes: usize) -> Result<Self> {
        Ok(Self {
            pinned: Pinned::new(device, bytes)?,
            memory: Static::new(device, bytes)?,
            copied: Event::new(device)?,
            used: Event::new(device)?,
        })
    }
}

/// Staging buffers in the order of their last use.
pub(super) struct Ring {
    free: Mutex<std::collections::VecDeque<Buffer>>,
    returned: Condvar,
}

impl Ring {
    pub(super) fn new(device: usize, buffers: usize, bytes: usize) -> Result<Self> {
        let free = (0..buffers).map(|_| Buffer::new(device, bytes)).collect::<Result<_>>()?;
        Ok(Self { free: Mutex::new(free), returned: Condvar::new() })
    }

    /// Takes the buffer that was used longest ago. Waits for another thread to return one: each
    /// returns it after a bounded number of calls of the driver.
    pub(super) fn take(&self) -> Buffer {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match free.pop_front() {
                Some(buffer) => return buffer,
                None => free = self.returned.wait(free).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub(super) fn put(&self, buffer: Buffer) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push_back(buffer);
        self.returned.notify_one();
    }
}
