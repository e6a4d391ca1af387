//! Modules, functions and launches.

use std::ffi::{CStr, c_char, c_uint, c_void};

use crate::{
    codes::{Code, INVALID_PTX, INVALID_VALUE, NOT_FOUND},
    device::Work,
    driver::{call, release, store},
    run::Launch,
};

/// Loads the text of a module.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_void) -> Code {
    call("cuModuleLoadData", |device| {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the image is PTX, which ends with 0.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
        let text = text.to_str().map_err(|_| INVALID_PTX)?;
        let loaded = device.load_module(text).map_err(|reason| {
            #[allow(clippy::print_stderr)]
            {
                eprintln!("fake CUDA driver: {reason}");
            }
            INVALID_PTX
        })?;
        // SAFETY: see the module above.
        unsafe { store(module, loaded) }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleUnload(module: u64) -> Code {
    release("cuModuleUnload", |device| device.unload_module(module))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetFunction(
    function: *mut u64,
    module: u64,
    name: *const c_char,
) -> Code {
    call("cuModuleGetFunction", |device| {
        // SAFETY: the name is a C string.
        let name = unsafe { CStr::from_ptr(name) };
        let name = name.to_str().map_err(|_| NOT_FOUND)?;
        let found = device.function(module, name)?.ok_or(NOT_FOUND)?;
        // SAFETY: see the module above.
        unsafe { store(function, found) }
    })
}

/// Launches a kernel in one dimension, with its arguments by their addresses.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    blocks_x: c_uint,
    blocks_y: c_uint,
    blocks_z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: u64,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    call("cuLaunchKernel", |device| {
        let kernel = device.kernel(function)?;
        let one = [blocks_y, blocks_z, threads_y, threads_z];
        if one != [1; 4] || shared_bytes != 0 || !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut parameters = vec![0; kernel.parameter_bytes()];
        for (index, (offset, size)) in kernel.parameters.iter().enumerate() {
            // SAFETY: the program passes the address of each parameter, which has this size.
            unsafe {
                let argument = *arguments.add(index);
                let to = parameters.as_mut_ptr().add(*offset);
                std::ptr::copy_nonoverlapping(argument.cast::<u8>(), to, *size);
            }
        }
        let launch = Launch { kernel, blocks: blocks_x, threads: threads_x, parameters };
        if !launch.is_possible() {
            return Err(INVALID_VALUE);
        }
        device.enqueue(stream, Work::Launch(launch))
    })
}
