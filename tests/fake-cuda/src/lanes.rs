//! The registers of a warp.

/// The number of a register of a thread.
pub(crate) type Register = u16;

/// The threads of a warp.
pub(crate) const WARP: usize = 32;

/// The registers of the threads of a warp: for each register, its value in every thread.
#[derive(Debug)]
pub(crate) struct Lanes {
    registers: Vec<[u64; WARP]>,
}

impl Lanes {
    pub(crate) fn new(registers: usize) -> Self {
        Self { registers: vec![[0; WARP]; registers] }
    }

    /// Sets a register in every thread.
    pub(crate) fn fill(&mut self, register: Register, value: impl Fn(usize) -> u64) {
        self.registers[usize::from(register)] = std::array::from_fn(value);
    }

    /// The values of a register in all threads.
    pub(crate) fn of(&self, register: Register) -> &[u64; WARP] {
        &self.registers[usize::from(register)]
    }

    /// The values of a register in all threads, for writing.
    pub(crate) fn of_mut(&mut self, register: Register) -> &mut [u64; WARP] {
        &mut self.registers[usize::from(register)]
    }

    /// The threads of `mask` in which a predicate has a value.
    pub(crate) fn with(&self, predicate: Register, expected: bool, mask: u32) -> u32 {
        let values = self.of(predicate);
        let mut holds = 0;
        for (lane, value) in values.iter().enumerate() {
            holds |= u32::from(*value != 0) << lane;
        }
        mask & if expected { holds } else { !holds }
    }

    /// Computes a register from others in the threads of `mask`.
    #[inline(always)]
    pub(crate) fn compute(
        &mut self,
        to: Register,
        [a, b, c]: [Register; 3],
        mask: u32,
        function: impl Fn(u64, u64, u64) -> u64,
    ) {
        let [a, b, c] = [a, b, c].map(|from| *self.of(from));
        let to = self.of_mut(to);
        if mask == u32::MAX {
            for lane in 0..WARP {
                to[lane] = function(a[lane], b[lane], c[lane]);
            }
        } else {
            for lane in 0..WARP {
                let value = function(a[lane], b[lane], c[lane]);
                to[lane] = if mask >> lane & 1 == 1 { value } else { to[lane] };
            }
        }
    }
}
