//! What tests ask of the fake driver beyond the interface of CUDA.

use std::ffi::{CStr, c_char};

use crate::{
    device::{Figures, Injection},
    driver::{add_device, with_device},
};

/// Adds a device with a seed and a number of bytes. Returns its number.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_add_device(seed: u64, capacity: u64) -> usize {
    add_device(seed, capacity)
}

/// Chooses the order of a device's operations by another seed from here on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_seed(device: usize, seed: u64) {
    with_device(device, |device| device.reseed(seed));
}

/// Has the call of a function fail that comes after `after` others. An empty name means any
/// function. If `is_late`, the operation fails that the call enqueues, when it runs.
///
/// # Safety
/// The name is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_fail(
    device: usize,
    function: *const c_char,
    after: u64,
    code: u32,
    is_late: bool,
) {
    // SAFETY: as the caller says.
    let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
    with_device(device, |device| device.inject(Injection { function, after, code, is_late }));
}

/// Writes the faults that were found on a device, a line each, and forgets them. Returns the number
/// of bytes; if it is more than `size`, nothing is written or forgotten.
///
/// # Safety
/// `text` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_take_faults(device: usize, text: *mut u8, size: usize) -> usize {
    with_device(device, |device| {
        let lines = device.faults.join("\n");
        // SAFETY: as the caller says.
        if unsafe { write(&lines, text, size) } {
            device.faults.clear();
        }
        lines.len()
    })
    .unwrap_or(0)
}

/// Writes what exists on a device, a line each. Returns the number of bytes; if it is more than
/// `size`, nothing is written.
///
/// # Safety
/// `text` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_live(device: usize, text: *mut u8, size: usize) -> usize {
    with_device(device, |device| {
        let lines = device.live().join("\n");
        // SAFETY: as the caller says.
        unsafe { write(&lines, text, size) };
        lines.len()
    })
    .unwrap_or(0)
}

/// What a device has done.
///
/// # Safety
/// `figures` has memory for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_figures(device: usize, figures: *mut Figures) {
    if let Some(found) = with_device(device, |device| device.figures) {
        // SAFETY: as the caller says.
        unsafe { figures.write(found) };
    }
}

/// Writes a text if it fits. Returns whether it does.
///
/// # Safety
/// `text` has `size` bytes.
unsafe fn write(lines: &str, text: *mut u8, size: usize) -> bool {
    let fits = lines.len() <= size;
    if fits {
        // SAFETY: as the caller says.
        unsafe { std::ptr::copy_nonoverlapping(lines.as_ptr(), text, lines.len()) };
    }
    fits
}
