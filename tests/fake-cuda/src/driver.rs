//! The devices of this process, and the current one of each thread.
//!
//! `FAKE_CUDA_DEVICES` is the number of devices when the driver is initialised (1),
//! `FAKE_CUDA_SEED` the seed of their schedules (0), and `FAKE_CUDA_CAPACITY` their bytes of memory
//! (16 GiB). Tests in one process add devices of their own.
//!
//! Three variables are for programs that tests start. With `FAKE_CUDA_FAIL=FUNCTION:AFTER:CODE`,
//! the first AFTER calls of FUNCTION on each device succeed, and the next one fails with CODE; with
//! `FUNCTION:AFTER:CODE:NUMBER` only on the device with this number. If `FAKE_CUDA_ABORT` is set,
//! the process is aborted when it uses a device wrongly. With `FAKE_CUDA_KERNELS=FILE`, devices run
//! the compiled kernels of a library ([`crate::compiled`]) instead of interpreting PTX.

use std::{
    cell::Cell,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    codes::{Code, INVALID_CONTEXT, SUCCESS},
    device::{Device, Injection},
};

const DEFAULT_CAPACITY: u64 = 16 << 30;

type Devices = Vec<Arc<Mutex<Device>>>;

static DEVICES: Mutex<Option<Devices>> = Mutex::new(None);

thread_local! {
    /// The device whose context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// The failure that `FAKE_CUDA_FAIL` asks for on a device.
fn injection(device: usize) -> Option<Injection> {
    let text = std::env::var("FAKE_CUDA_FAIL").ok()?;
    let mut parts = text.split(':');
    let function = parts.next()?.to_owned();
    let [after, code] = [parts.next()?.parse().ok()?, parts.next()?.parse().ok()?];
    if parts.next().is_some_and(|number| number != device.to_string()) {
        return None;
    }
    Some(Injection { function, after, code: code as Code, is_late: false })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Accesses the devices, which exist from the first access on.
fn with_devices<T>(access: impl FnOnce(&mut Devices) -> T) -> T {
    let mut devices = locked(&DEVICES);
    let devices = devices.get_or_insert_with(|| {
        let seed = setting("FAKE_CUDA_SEED", 0);
        let capacity = setting("FAKE_CUDA_CAPACITY", DEFAULT_CAPACITY);
        let new = |number: usize| {
            let mut device = Device::new(number, seed.wrapping_add(number as u64), capacity);
            injection(number).into_iter().for_each(|injection| device.inject(injection));
            device
        };
        (0..setting("FAKE_CUDA_DEVICES", 1) as usize)
            .map(|number| Arc::new(Mutex::new(new(number))))
            .collect()
    });
    access(devices)
}

pub(crate) fn device_count() -> usize {
    with_devices(|devices| devices.len())
}

/// Adds a device. Returns its number.
pub(crate) fn add_device(seed: u64, capacity: u64) -> usize {
    with_devices(|devices| {
        let number = devices.len();
        devices.push(Arc::new(Mutex::new(Device::new(number, seed, capacity))));
        number
    })
}

/// Accesses a device, if it exists.
pub(crate) fn with_device<T>(number: usize, access: impl FnOnce(&mut Device) -> T) -> Option<T> {
    let device = with_devices(|devices| devices.get(number).cloned())?;
    let mut device = locked(&device);
    Some(access(&mut device))
}

/// The device whose context is current in this thread.
pub(crate) fn current() -> Option<usize> {
    CURRENT.get()
}

pub(crate) fn set_current(device: Option<usize>) {
    CURRENT.set(device);
}

/// A call on the current device that can fail.
pub(crate) fn call(function: &str, run: impl FnOnce(&mut Device) -> Result<(), Code>) -> Code {
    let Some(number) = current() else { return INVALID_CONTEXT };
    let done = with_device(number, |device| device.enter(function).and_then(|()| run(device)));
    code_of(done)
}

/// A call on the current device that frees something. It does so even if it fails.
pub(crate) fn release(function: &str, run: impl FnOnce(&mut Device) -> Result<(), Code>) -> Code {
    let Some(number) = current() else { return INVALID_CONTEXT };
    let done = with_device(number, |device| {
        let entered = device.enter(function);
        run(device).and(entered)
    });
    code_of(done)
}

fn code_of(done: Option<Result<(), Code>>) -> Code {
    match done {
        None => INVALID_CONTEXT,
        Some(done) => done.err().unwrap_or(SUCCESS),
    }
}

/// Stores a result where the program has asked for it.
///
/// # Safety
/// `to` is null or points to memory for it.
pub(crate) unsafe fn store<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(crate::codes::INVALID_VALUE);
    }
    // SAFETY: as the caller says.
    unsafe { to.write(value) };
    Ok(())
}
