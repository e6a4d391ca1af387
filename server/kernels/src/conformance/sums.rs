//! Compares the sum of squares with the contract's order, written out.

use zeroshard_model::{dtype::DType, geometry::blocks::BLOCK};

use super::{buffer_of, numbers, reference};
use crate::Backend;

pub(super) fn run<B: Backend>(backend: &B) {
    for numel in [0, 1, 127, 128, 129, 1_003, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77] {
        let values = numbers(6, numel);
        let buffer = buffer_of(backend, &values, DType::F32);
        let sums = backend.block_sums(&buffer, 0..numel).unwrap();
        let blocks = (0..numel).step_by(BLOCK).map(|start| start..numel.min(start + BLOCK));
        let one_by_one: Vec<f64> =
            blocks.flat_map(|block| backend.block_sums(&buffer, block).unwrap()).collect();
        assert_eq!(one_by_one, sums, "{numel} elements, block by block");
        let sum = sums.into_iter().fold(0.0, |sum, block| sum + block);
        let expected = reference::sum_of_squares(&values);
        assert_eq!(sum.to_bits(), expected.to_bits(), "{numel} elements: {sum}, not {expected}");
    }
    let largest = vec![f32::MAX; 1_003];
    let sums = backend.block_sums(&buffer_of(backend, &largest, DType::F32), 0..1_003).unwrap();
    assert!(sums[0].is_finite());
    for special in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        for at in [0, 128, BLOCK, BLOCK + 129] {
            let mut values = numbers(7, BLOCK + 130);
            values[at] = special;
            let buffer = buffer_of(backend, &values, DType::F32);
            let sums = backend.block_sums(&buffer, 0..values.len()).unwrap();
            assert!(!sums[at / BLOCK].is_finite(), "{special} at {at}");
            assert!(sums[1 - at / BLOCK].is_finite(), "{special} at {at}");
        }
    }
}
