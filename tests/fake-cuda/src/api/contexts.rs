//! Devices and contexts. A context is the primary context of a device; its handle is the number of
//! the device plus 1.

use std::ffi::{c_char, c_int, c_uint};

use crate::{
    codes::{self, Code, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, SUCCESS},
    driver::{self, store, with_device},
};

/// CUDA 12.8.
const VERSION: c_int = 12_080;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and others, with the values of an H100.
const ATTRIBUTES: [(c_uint, c_int); 6] =
    [(1, 1024), (10, 32), (16, 132), (75, 9), (76, 0), (115, 1)];

fn result(done: Result<(), Code>) -> Code {
    done.err().unwrap_or(SUCCESS)
}

fn checked(device: c_int) -> Result<usize, Code> {
    let number = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
    if number < driver::device_count() { Ok(number) } else { Err(INVALID_DEVICE) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(_flags: c_uint) -> Code {
    if driver::device_count() == 0 { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: see the module.
    result(unsafe { store(version, VERSION) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: see the module.
    result(unsafe { store(count, driver::device_count() as c_int) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    // SAFETY: see the module.
    result(checked(ordinal).and_then(|_| unsafe { store(device, ordinal) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    size: c_int,
    device: c_int,
) -> Code {
    let text = match checked(device) {
        Ok(number) => format!("Fake {number}\0"),
        Err(code) => return code,
    };
    if name.is_null() || (size as usize) < text.len() {
        return INVALID_VALUE;
    }
    // SAFETY: the text is as long as the memory at most.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Code {
    let found = ATTRIBUTES.iter().find(|(of, _)| *of == attribute).map_or(0, |(_, value)| *value);
    // SAFETY: see the module.
    result(checked(device).and_then(|_| unsafe { store(value, found) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Code {
    let total = checked(device)
        .map(|number| with_device(number, |device| device.memory.free_and_total().1).unwrap_or(0));
    // SAFETY: see the module.
    result(total.and_then(|total| unsafe { store(bytes, total as usize) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    driver::call("cuMemGetInfo_v2", |device| {
        let (unused, all) = device.memory.free_and_total();
        // SAFETY: see the module.
        unsafe {
            store(free, unused as usize)?;
            store(total, all as usize)
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut usize,
    device: c_int,
) -> Code {
    let retained = checked(device).and_then(|number| {
        let entered = with_device(number, |device| {
            device.enter("cuDevicePrimaryCtxRetain").map(|()| device.retain())
        });
        entered.unwrap_or(Err(INVALID_DEVICE))?;
        // SAFETY: see the module.
        unsafe { store(context, number + 1) }
    });
    result(retained)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    result(checked(device).map(|number| {
        with_device(number, |device| device.release());
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetCurrent(context: usize) -> Code {
    driver::set_current(context.checked_sub(1));
    // A lost device reports its error here too.
    if context == 0 { SUCCESS } else { driver::call("cuCtxSetCurrent", |_| Ok(())) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Code {
    // SAFETY: see the module.
    result(unsafe { store(context, driver::current().map_or(0, |number| number + 1)) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSynchronize() -> Code {
    driver::call("cuCtxSynchronize", |device| device.synchronize())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(code: Code, name: *mut *const c_char) -> Code {
    match codes::name(code) {
        // SAFETY: see the module.
        Some(text) => result(unsafe { store(name, text.as_ptr().cast()) }),
        None => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: see the module.
    unsafe { cuGetErrorName(code, text) }
}
