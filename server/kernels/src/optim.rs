//! Optimizer state between steps. The backend implements the steps ([`Backend::apply`]).

use zeroshard_model::{
    dtype::DType,
    geometry::blocks::BLOCK,
    optimizer::{Optimizer, StateShape},
};

use crate::{Backend, Result};

/// The state of `numel` parameters of a tensor of `shape` before the first step: one f32 buffer for
/// each of [`Optimizer::state`], in that order.
///
/// # Errors
/// [`crate::Failure::OutOfMemory`] if the device cannot hold all buffers; those that were
/// allocated are freed.
pub fn initial_state<B: Backend>(
    backend: &B,
    optimizer: &Optimizer,
    shape: &[u64],
    numel: usize,
) -> Result<Vec<B::Buffer>> {
    let value = optimizer.initial_state();
    let make = |shape: StateShape| {
        let mut buffer = backend.allocate(DType::F32, shape.numel(numel))?;
        if value != 0.0 {
            fill(backend, &mut buffer, value)?;
        }
        Ok(buffer)
    };
    optimizer.state_shapes(shape).into_iter().map(make).collect()
}

/// Sets all elements to one value.
pub fn fill<B: Backend>(backend: &B, buffer: &mut B::Buffer, value: f32) -> Result<()> {
    let numel = backend.numel(buffer);
    let block = value.to_le_bytes().repeat(numel.min(BLOCK));
    for offset in (0..numel).step_by(BLOCK) {
        let end = numel.min(offset + BLOCK);
        backend.store(
            buffer,
            offset..end,
            &block[..(end - offset) * DType::F32.size()],
            DType::F32,
        )?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod golden;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use zeroshard_model::optimizer::Adagrad;

    use super::*;
    use crate::Cpu;

    #[test]
    fn state_starts_at_zero_except_the_sum_of_adagrad() {
        let cpu = Cpu::new();
        let adagrad = Adagrad { initial_accumulator_value: 0.5, ..Adagrad::default() };
        for (optimizer, expected) in
            [("adamw".parse().unwrap(), 0.0f32), (Optimizer::Adagrad(adagrad), 0.5)]
        {
            let numel = BLOCK + 3;
            let state = initial_state(&cpu, &optimizer, &[numel as u64], numel).unwrap();
            assert_eq!(state.len(), optimizer.state().len());
            for buffer in state {
                let bytes = cpu.read(&Arc::new(buffer), 0..numel, DType::F32).unwrap();
                assert_eq!(bytes, expected.to_le_bytes().repeat(numel));
            }
        }
    }
}
