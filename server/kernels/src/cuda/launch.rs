//! Launches of kernels, and their arguments in the layout that the kernels expect
//! (`kernels/common.cuh`).

use std::{ffi::c_void, mem::MaybeUninit, ops::Range};

use zeroshard_model::{
    dtype::DType,
    geometry::blocks::{BLOCK, TILE},
    optimizer::Code,
};

/// An address in the memory of the device.
pub(crate) type Address = u64;

/// The number of threads of a block.
pub(crate) const THREADS: usize = 128;
// A block of threads steps and encodes a tile of 8-bit state.
const _: () = assert!(THREADS == TILE);
/// The number of partial sums of a row: that of `kernels/adafactor.cu`.
const ROW_LANES: usize = 16;
/// The maximum number of blocks of a launch, whose threads take several elements each. Enough to
/// occupy the largest devices.
const MAX_BLOCKS: usize = 1 << 14;

/// A launch of a kernel.
#[derive(Debug)]
pub(crate) struct Launch {
    /// The name of the kernel.
    pub(crate) kernel: &'static str,
    /// The number of blocks of [`THREADS`] threads.
    pub(crate) blocks: usize,
    arguments: Vec<Argument>,
}

impl Launch {
    /// A launch in which each element is the work of one thread.
    pub(crate) fn over_elements(kernel: &'static str, elements: usize) -> Self {
        let blocks = elements.div_ceil(THREADS).min(MAX_BLOCKS);
        Self { kernel, blocks, arguments: Vec::new() }
    }

    /// A launch in which each block of a sum over `elements` is the work of a block of threads.
    pub(crate) fn over_sums(kernel: &'static str, elements: usize) -> Self {
        Self { kernel, blocks: elements.div_ceil(BLOCK), arguments: Vec::new() }
    }

    /// A launch in which each row of a matrix is the work of [`ROW_LANES`] threads.
    pub(crate) fn over_rows(kernel: &'static str, rows: usize) -> Self {
        Self { kernel, blocks: rows.div_ceil(THREADS / ROW_LANES), arguments: Vec::new() }
    }

    /// The launch that converts consecutive elements of one dtype to another.
    pub(super) fn conversion(
        (to, to_dtype): (Address, u32),
        numel: usize,
        (from, from_dtype): (Address, u32),
    ) -> Self {
        let launch = Self::over_elements("store", numel).with(to).with(to_dtype).with(numel);
        launch.with(from).with(from_dtype)
    }

    /// The launch that copies bytes.
    pub(super) fn bytes(to: Address, length: usize, from: Address) -> Self {
        Self::over_elements("copy_bytes", length).with(to).with(length).with(from)
    }

    /// The launch that encodes values of a dtype as whole tiles of 8-bit state; `to` are the
    /// addresses of the first code and the first exponent.
    pub(super) fn encoding(
        code: Code,
        to: [Address; 2],
        numel: usize,
        (from, from_dtype): (Address, u32),
    ) -> Self {
        let launch = Self::over_elements("encode_tiles", numel).with(code_number(code));
        launch.with(to[0]).with(to[1]).with(numel).with(from).with(from_dtype)
    }

    /// The launch that decodes elements of 8-bit state; `from` are the addresses of the codes and
    /// exponents of the whole buffer.
    pub(super) fn decoding(
        code: Code,
        (to, to_dtype): (Address, u32),
        run: &Range<usize>,
        from: [Address; 2],
    ) -> Self {
        let launch = Self::over_elements("decode_tiles", run.len()).with(code_number(code));
        let launch = launch.with(to).with(to_dtype).with(run.start).with(run.len());
        launch.with(from[0]).with(from[1])
    }

    /// Adds an argument, which has the layout of the kernel's parameter.
    pub(crate) fn with<T: Copy>(mut self, argument: T) -> Self {
        self.arguments.push(Argument::new(argument));
        self
    }

    /// The addresses of the arguments, for the driver.
    pub(crate) fn arguments(&self) -> Vec<*const c_void> {
        self.arguments.iter().map(|argument| argument.0.as_ptr().cast()).collect()
    }
}

/// The bytes of an argument, aligned for every type of the kernels.
#[derive(Debug)]
struct Argument(Vec<MaybeUninit<u64>>);

impl Argument {
    fn new<T: Copy>(value: T) -> Self {
        const { assert!(align_of::<T>() <= align_of::<u64>()) };
        let mut words = vec![MaybeUninit::zeroed(); size_of::<T>().div_ceil(size_of::<u64>())];
        // SAFETY: the words have room for the value, and its alignment.
        unsafe { words.as_mut_ptr().cast::<T>().write(value) };
        Self(words)
    }
}

/// An array that a step reads and writes. The addresses are equal unless a reader holds the earlier
/// values.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Array {
    pub(crate) from: Address,
    pub(crate) to: Address,
}

/// Where a step stores the parameters in the dtype of their tensor.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Published {
    pub(crate) to: Address,
    /// 0: nowhere; otherwise a [`dtype_number`].
    pub(crate) dtype: u32,
}

/// The number of a code in the kernels.
fn code_number(code: Code) -> u32 {
    match code {
        Code::Signed => 0,
        Code::Positive => 1,
    }
}

/// The number of a dtype in the kernels.
pub(crate) fn dtype_number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}
