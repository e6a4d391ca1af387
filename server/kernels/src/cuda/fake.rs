//! The fake driver, which lies beside the tests, and is loaded as the driver.

use std::{
    ffi::{CString, c_char},
    sync::OnceLock,
};

use libloading::{Library, Symbol};

/// The fake driver. It has the loader's name of the driver: once it is open, cudarc finds it.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = std::env::current_exe().unwrap().with_file_name("libfake_cuda.so");
        // SAFETY: the library has no initialisers.
        unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    })
}

/// What a device has done.
#[derive(Debug, Default, Clone, Copy)]
#[repr(C)]
pub(super) struct Figures {
    pub(super) calls: u64,
    pub(super) operations: u64,
    pub(super) instructions: u64,
    pub(super) nanoseconds: u64,
}

/// A fake device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fake {
    /// Its number.
    pub(super) device: usize,
}

impl Fake {
    /// A device of its own, whose operations run in the order of a seed.
    pub(super) fn new(seed: u64, capacity: u64) -> Self {
        type Add = extern "C" fn(u64, u64) -> usize;
        // SAFETY: the function has this type.
        let add: Symbol<'_, Add> = unsafe { library().get("fake_cuda_add_device") }.unwrap();
        Self { device: add(seed, capacity) }
    }

    /// Has a call fail that comes after others, or the operation that it enqueues.
    pub(super) fn fail(self, function: &str, after: u64, code: u32, is_late: bool) {
        type Fail = extern "C" fn(usize, *const c_char, u64, u32, bool);
        // SAFETY: the function has this type.
        let fail: Symbol<'_, Fail> = unsafe { library().get("fake_cuda_fail") }.unwrap();
        let function = CString::new(function).unwrap();
        fail(self.device, function.as_ptr(), after, code, is_late);
    }

    fn text(self, function: &str) -> Vec<String> {
        type Text = extern "C" fn(usize, *mut u8, usize) -> usize;
        // SAFETY: the function has this type.
        let get: Symbol<'_, Text> = unsafe { library().get(function) }.unwrap();
        let mut bytes = vec![0; 1 << 16];
        let size = get(self.device, bytes.as_mut_ptr(), bytes.len());
        bytes.truncate(size);
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    /// What the program did wrong since the last time.
    pub(super) fn take_faults(self) -> Vec<String> {
        self.text("fake_cuda_take_faults")
    }

    /// What exists on the device.
    pub(super) fn live(self) -> Vec<String> {
        self.text("fake_cuda_live")
    }

    pub(super) fn figures(self) -> Figures {
        type Get = extern "C" fn(usize, *mut Figures);
        // SAFETY: the function has this type.
        let get: Symbol<'_, Get> = unsafe { library().get("fake_cuda_figures") }.unwrap();
        let mut figures = Figures::default();
        get(self.device, &mut figures);
        figures
    }
}
