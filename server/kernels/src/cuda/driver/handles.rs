//! Objects of the driver, destroyed when they are dropped. The context of their device is current
//! in the thread that uses or drops them.

use std::ffi::{c_uint, c_void};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use super::{super::launch::Address, library::name};
use crate::{Failure, Result};

/// The result of a call on a device.
pub(super) fn checked<T>(
    device: usize,
    operation: &'static str,
    bytes: usize,
    done: std::result::Result<T, DriverError>,
) -> Result<T> {
    done.map_err(|DriverError(code)| {
        Failure::of_code(device, operation, bytes, code as u32, name(code))
    })
}

/// Logs that an object could not be destroyed. Nothing else can be done: a lost device has none.
fn destroyed(what: &'static str, done: std::result::Result<(), DriverError>) {
    if let Err(DriverError(code)) = done {
        tracing::debug!(what, error = name(code), "the driver could not destroy an object");
    }
}

/// The primary context of a device.
pub(super) struct Context {
    pub(super) device: usize,
    handle: sys::CUcontext,
    cu_device: sys::CUdevice,
    /// The bytes of the device's memory.
    pub(super) capacity: usize,
}

impl Context {
    pub(super) fn new(device: usize) -> Result<Self> {
        let found = result::device::get(device as i32);
        let cu_device = checked(device, "open the device", 0, found)?;
        // SAFETY: the driver has returned this device.
        let total = unsafe { result::device::total_mem(cu_device) };
        let capacity = checked(device, "read the size of the memory", 0, total)?;
        // SAFETY: as above.
        let retained = unsafe { result::primary_ctx::retain(cu_device) };
        let handle = checked(device, "create the context", 0, retained)?;
        Ok(Self { device, handle, cu_device, capacity })
    }

    /// Makes the context current in this thread.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context exists until it is dropped.
        let done = unsafe { result::ctx::set_current(self.handle) };
        checked(self.device, "bind the context", 0, done)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once.
        destroyed("context", unsafe { result::primary_ctx::release(self.cu_device) });
    }
}

/// A stream that does not wait for others.
pub(super) struct Stream(pub(super) sys::CUstream);

impl Stream {
    pub(super) fn new(device: usize) -> Result<Self> {
        let kind = result::stream::StreamKind::NonBlocking;
        Ok(Self(checked(device, "create a stream", 0, result::stream::create(kind))?))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is not used afterwards.
        destroyed("stream", unsafe { result::stream::destroy(self.0) });
    }
}

/// An event.
pub(super) struct Event(pub(super) sys::CUevent);

impl Event {
    /// An event without a time.
    pub(super) fn new(device: usize) -> Result<Self> {
        Self::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event with a time.
    pub(super) fn timed(device: usize) -> Result<Self> {
        Self::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(device: usize, flags: sys::CUevent_flags) -> Result<Self> {
        Ok(Self(checked(device, "create an event", 0, result::event::create(flags))?))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is not used afterwards.
        destroyed("event", unsafe { result::event::destroy(self.0) });
    }
}

/// Pinned memory of the host, which the host can read fast.
pub(super) struct Pinned(pub(super) *mut c_void);

impl Pinned {
    pub(super) fn new(device: usize, bytes: usize) -> Result<Self> {
        const CACHED: c_uint = 0;
        // SAFETY: the memory is freed once.
        let allocated = unsafe { result::malloc_host(bytes, CACHED) };
        Ok(Self(checked(device, "allocate pinned memory", bytes, allocated)?))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: no copy from or to the memory is pending.
        destroyed("pinned memory", unsafe { result::free_host(self.0) });
    }
}

/// Memory of the device that outlives all operations.
pub(super) struct Static(pub(super) Address);

impl Static {
    pub(super) fn new(device: usize, bytes: usize) -> Result<Self> {
        // SAFETY: the memory is freed once.
        let allocated = unsafe { result::malloc_sync(bytes) };
        Ok(Self(checked(device, "allocate a staging buffer", bytes, allocated)?))
    }
}

impl Drop for Static {
    fn drop(&mut self) {
        // SAFETY: no operation that uses the memory is pending.
        destroyed("memory", unsafe { result::free_sync(self.0) });
    }
}

/// The loaded kernels.
pub(super) struct Module(pub(super) sys::CUmodule);

impl Module {
    pub(super) fn new(device: usize, ptx: &std::ffi::CStr) -> Result<Self> {
        // SAFETY: the text ends with 0.
        let loaded = unsafe { result::module::load_data(ptx.as_ptr().cast()) };
        Ok(Self(checked(device, "load the kernels", ptx.count_bytes(), loaded)?))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: no kernel of the module is running.
        destroyed("module", unsafe { result::module::unload(self.0) });
    }
}
