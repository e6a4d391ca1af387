//! Whether this machine has a driver with the functions that the server calls. cudarc panics when
//! the library or a function is missing, so this is asked first.

use cudarc::driver::{result, sys};

use crate::{Failure, Result};

/// All functions of the driver that are called.
const FUNCTIONS: [&str; 33] = [
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

/// Initialises the driver. Returns the number of devices.
///
/// # Errors
/// [`Failure::Unavailable`] if there is no driver, no device, or an old driver.
pub(crate) fn device_count() -> Result<usize> {
    let unavailable = |reason: String| Failure::Unavailable { reason };
    // SAFETY: the library is the driver, whose initialisers run.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable(
            "libcuda.so was not found; install the driver of NVIDIA".to_owned(),
        ));
    }
    // SAFETY: as above.
    let library = unsafe { sys::culib() };
    for name in FUNCTIONS {
        // SAFETY: the symbol is only looked up.
        if unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err() {
            let reason = format!("the driver has no function {name}; it must be 12.4 or later");
            return Err(unavailable(reason));
        }
    }
    let failed = |error: result::DriverError| {
        unavailable(format!("the driver failed with {} (code {})", name(error.0), error.0 as u32))
    };
    result::init().map_err(failed)?;
    Ok(result::device::get_count().map_err(failed)? as usize)
}

/// The name of an error of the driver.
pub(super) fn name(code: sys::CUresult) -> String {
    let error = result::DriverError(code);
    error
        .error_name()
        .map_or_else(|_| "unknown".to_owned(), |name| name.to_string_lossy().into_owned())
}
