//! Memory of the device, pinned memory of the host, and copies.

use std::ffi::{c_uint, c_void};

use crate::{
    codes::{Code, INVALID_VALUE, OUT_OF_MEMORY},
    device::{Device, Work},
    driver::{call, release, store},
    memory::pinned::{Direction, Pending},
};

/// Reserves memory. Pending frees are carried out first if there is too little.
fn reserve(device: &mut Device, size: usize) -> Result<u64, Code> {
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    match device.memory.reserve(size as u64) {
        Some(base) => Ok(base),
        None => {
            device.finish_all()?;
            device.memory.reserve(size as u64).ok_or(OUT_OF_MEMORY)
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, size: usize) -> Code {
    call("cuMemAlloc_v2", |device| {
        let base = reserve(device, size)?;
        let stamp = device.host_stamp("cuMemAlloc");
        device.memory.allocate(base, &stamp);
        // SAFETY: see the module above.
        unsafe { store(pointer, base) }
    })
}

/// Unlike some drivers, this one does not wait for operations that use the memory.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(pointer: u64) -> Code {
    release("cuMemFree_v2", |device| {
        let stamp = device.host_stamp("cuMemFree");
        let freed = device.memory.free(pointer, &stamp);
        device.check(freed)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocAsync(
    pointer: *mut u64,
    size: usize,
    stream: u64,
) -> Code {
    call("cuMemAllocAsync", |device| {
        let base = reserve(device, size)?;
        device.enqueue(stream, Work::Allocate(base))?;
        // SAFETY: see the module above.
        unsafe { store(pointer, base) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeAsync(pointer: u64, stream: u64) -> Code {
    release("cuMemFreeAsync", |device| device.enqueue_or_run(stream, Work::Free(pointer)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostAlloc(
    pointer: *mut *mut c_void,
    size: usize,
    _flags: c_uint,
) -> Code {
    call("cuMemHostAlloc", |device| {
        let start = device.pinned.allocate(size).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: see the module above.
        unsafe { store(pointer, start.cast()) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> Code {
    release("cuMemFreeHost", |device| {
        let freed = device.pinned.free(pointer as usize);
        device.check(freed)
    })
}

/// Begins a copy from or to pinned memory.
fn begin(
    device: &mut Device,
    host: *const c_void,
    size: usize,
    direction: Direction,
) -> Result<Pending, Code> {
    let id = device.figures.calls;
    let stamp = device.host_stamp("the host");
    match device.pinned.begin(id, host as usize, size, direction, &stamp) {
        Ok((pending, race)) => {
            race.iter().for_each(|race| device.report(race));
            Ok(pending)
        }
        Err(fault) => {
            device.report(&fault);
            Err(INVALID_VALUE)
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    size: usize,
    stream: u64,
) -> Code {
    call("cuMemcpyHtoDAsync_v2", |device| {
        let from = begin(device, from, size, Direction::Upload)?;
        device.enqueue(stream, Work::Upload { to, from, size })
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    size: usize,
    stream: u64,
) -> Code {
    call("cuMemcpyDtoHAsync_v2", |device| {
        let to = begin(device, to, size, Direction::Download)?;
        device.enqueue(stream, Work::Download { to, from, size })
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    size: usize,
    stream: u64,
) -> Code {
    call("cuMemcpyDtoDAsync_v2", |device| device.enqueue(stream, Work::Copy { to, from, size }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64) -> Code {
    call("cuMemsetD8Async", |device| {
        device.enqueue(stream, Work::Set { to, pattern: vec![value], count })
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD32Async(
    to: u64,
    value: c_uint,
    count: usize,
    stream: u64,
) -> Code {
    call("cuMemsetD32Async", |device| {
        let pattern = value.to_le_bytes().to_vec();
        device.enqueue(stream, Work::Set { to, pattern, count })
    })
}
