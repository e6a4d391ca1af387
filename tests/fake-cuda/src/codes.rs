//! Error codes of the driver (`CUresult`).

/// A result of the driver.
pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_PTX: Code = 218;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const MISALIGNED_ADDRESS: Code = 716;

/// The names of the codes, as C strings.
const NAMES: [(Code, &str); 20] = [
    (SUCCESS, "CUDA_SUCCESS\0"),
    (INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE\0"),
    (OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY\0"),
    (NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED\0"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE\0"),
    (NO_DEVICE, "CUDA_ERROR_NO_DEVICE\0"),
    (INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE\0"),
    (INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT\0"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE\0"),
    (INVALID_PTX, "CUDA_ERROR_INVALID_PTX\0"),
    (INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE\0"),
    (NOT_FOUND, "CUDA_ERROR_NOT_FOUND\0"),
    (NOT_READY, "CUDA_ERROR_NOT_READY\0"),
    (ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS\0"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES\0"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT\0"),
    (MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS\0"),
    (719, "CUDA_ERROR_LAUNCH_FAILED\0"),
    (801, "CUDA_ERROR_NOT_SUPPORTED\0"),
    (999, "CUDA_ERROR_UNKNOWN\0"),
];

/// The name of a code.
pub(crate) fn name(code: Code) -> Option<&'static str> {
    NAMES.iter().find(|(of, _)| *of == code).map(|(_, name)| *name)
}

/// Returns whether every later call fails with this error as well, because the context cannot be
/// used any more.
pub(crate) fn is_sticky(code: Code) -> bool {
    matches!(code, 46 | 214 | 220 | 700 | 702 | 716 | 719 | 999)
}
