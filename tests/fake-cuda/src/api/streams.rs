//! Streams and events.

use std::ffi::c_uint;

use crate::{
    codes::{Code, NOT_READY},
    driver::{call, release, store},
};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> Code {
    // SAFETY: see the module above.
    call("cuStreamCreate", |device| unsafe { store(stream, device.create_stream()) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(stream: u64) -> Code {
    release("cuStreamDestroy_v2", |device| device.destroy_stream(stream))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(stream: u64) -> Code {
    call("cuStreamSynchronize", |device| device.synchronize_stream(stream))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamQuery(stream: u64) -> Code {
    call("cuStreamQuery", |device| match device.query_stream(stream)? {
        true => Ok(()),
        false => Err(NOT_READY),
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> Code {
    call("cuStreamWaitEvent", |device| device.wait(stream, event))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(event: *mut u64, flags: c_uint) -> Code {
    const DISABLE_TIMING: c_uint = 2;
    let has_time = flags & DISABLE_TIMING == 0;
    // SAFETY: see the module above.
    call("cuEventCreate", |device| unsafe { store(event, device.create_event(has_time)) })
}

/// Stores the milliseconds between two events that have happened.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    start: u64,
    end: u64,
) -> Code {
    call("cuEventElapsedTime", |device| {
        let elapsed = device.elapsed(start, end)?;
        // SAFETY: see the module above.
        unsafe { store(milliseconds, elapsed) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(event: u64) -> Code {
    release("cuEventDestroy_v2", |device| device.destroy_event(event))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(event: u64, stream: u64) -> Code {
    call("cuEventRecord", |device| device.record(event, stream))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventSynchronize(event: u64) -> Code {
    call("cuEventSynchronize", |device| device.synchronize_event(event))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(event: u64) -> Code {
    call("cuEventQuery", |device| match device.query_event(event)? {
        true => Ok(()),
        false => Err(NOT_READY),
    })
}
