//! The contract of every backend, bit for bit. [`run`] compares a backend with scalar code that is
//! written only for readability: one element at a time, in the order that the contract fixes.

use std::sync::Arc;

use bytes::Bytes;
use zeroshard_model::dtype::DType;

use super::cpu::Cpu;
use super::loops::Level;
use super::{Backend, Failure};

mod averages;
mod codes;
mod conversions;
mod reference;
mod steps;
mod sums;

/// Tests a backend against the whole contract.
pub(crate) fn run<B: Backend>(backend: &B) {
    memory(backend);
    conversions::run(backend);
    codes::run(backend);
    sums::run(backend);
    steps::run(backend);
    averages::run(backend);
}

#[test]
fn the_cpu_conforms_at_every_instruction_set() {
    for level in Level::all() {
        println!("{level:?}");
        run(&Cpu::at(level));
    }
}

#[test]
fn reading_a_buffers_own_dtype_copies_nothing_and_keeps_it_alive() {
    let cpu = Cpu::new();
    let buffer = Arc::new(cpu.allocate(DType::Bf16, 1_000).unwrap());
    let all = cpu.read(&buffer, 0..1_000, DType::Bf16).unwrap();
    let part = cpu.read(&buffer, 10..20, DType::Bf16).unwrap();
    assert_eq!(part.as_ptr(), all[20..].as_ptr());
    assert_eq!(Arc::strong_count(&buffer), 3);
    drop((all, part));
    assert_eq!(Arc::strong_count(&buffer), 1);
}

/// New arrays are zero and have the requested size and dtype; arrays that are too large are
/// refused.
fn memory<B: Backend>(backend: &B) {
    for dtype in DType::ALL {
        for numel in [0, 1, 1_003, 600_001] {
            let buffer = backend.allocate(dtype, numel).unwrap();
            assert_eq!((backend.numel(&buffer), backend.dtype(&buffer)), (numel, dtype));
            let bytes = backend.read(&Arc::new(buffer), 0..numel, dtype).unwrap();
            assert_eq!(bytes.len(), numel * dtype.size());
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
        for numel in [usize::MAX, usize::MAX / 8] {
            let refused = backend.allocate(dtype, numel).err();
            let found = matches!(refused, Some(Failure::OutOfMemory { .. }));
            assert!(found, "{numel} elements of {dtype}: {refused:?}");
        }
    }
}

/// A pseudo-random u32 for each `i`.
pub(crate) fn hash(i: usize) -> u32 {
    let x = (i as u32 ^ 0x5EED).wrapping_mul(0x9E37_79B1);
    let x = (x ^ (x >> 15)).wrapping_mul(0x85EB_CA77);
    x ^ (x >> 13)
}

/// Numbers in -1..1, with an occasional zero, subnormal, small or large number.
fn numbers(seed: usize, numel: usize) -> Vec<f32> {
    let number = |i| {
        let h = hash(seed * 1_000_003 + i);
        let normal = (h >> 8) as f32 / 8_388_608.0 - 1.0;
        match h % 16 {
            0 => 0.0,
            1 => f32::from_bits(h & 0x807F_FFFF),
            2 => normal * 1e-20,
            3 => normal * 1e9,
            _ => normal,
        }
    };
    (0..numel).map(number).collect()
}

/// A buffer with these values cast to `dtype`.
fn buffer_of<B: Backend>(backend: &B, values: &[f32], dtype: DType) -> B::Buffer {
    let mut buffer = backend.allocate(dtype, values.len()).unwrap();
    backend.store(&mut buffer, 0..values.len(), &to_bytes(values, DType::F32), DType::F32).unwrap();
    buffer
}

/// The contents of a buffer in its own dtype, and the buffer itself.
fn contents<B: Backend>(backend: &B, buffer: B::Buffer) -> (Bytes, B::Buffer) {
    let shared = Arc::new(buffer);
    let view = backend.read(&shared, 0..backend.numel(&shared), backend.dtype(&shared)).unwrap();
    let bytes = Bytes::copy_from_slice(&view);
    drop(view);
    let buffer = Arc::into_inner(shared).expect("the view was dropped");
    (bytes, buffer)
}

/// Converts values to little-endian bytes with the `half` crate.
fn to_bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    let encode = |&value: &f32| match dtype {
        DType::F32 => value.to_le_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(encode).collect()
}

/// Converts little-endian bytes to values with the `half` crate.
fn from_bytes(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let decode = |raw: &[u8]| match *raw {
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        [a, b] if dtype == DType::Bf16 => half::bf16::from_le_bytes([a, b]).to_f32(),
        [a, b] => half::f16::from_le_bytes([a, b]).to_f32(),
        _ => unreachable!("elements have two or four bytes"),
    };
    bytes.chunks_exact(dtype.size()).map(decode).collect()
}

/// Panics unless the values have the same bits, or are both NaN.
fn assert_same(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let same = actual.to_bits() == expected.to_bits() || (actual.is_nan() && expected.is_nan());
        assert!(same, "{what}: element {i} is {actual:e}, not {expected:e}");
    }
}
