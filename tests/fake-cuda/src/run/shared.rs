//! The shared memory of a block.

use crate::{
    fault::{Fault, Kind},
    random::Random,
};

/// The arrays in shared memory. Blocks find in it what the block before has left.
#[derive(Debug)]
pub(crate) struct Shared {
    arrays: Vec<(u64, Vec<u8>)>,
}

impl Shared {
    /// Arrays with any content.
    pub(crate) fn new(arrays: &[(u64, usize)], random: &mut Random) -> Self {
        let array = |&(address, size): &(u64, usize)| {
            (address, (0..size).map(|_| random.next() as u8).collect())
        };
        Self { arrays: arrays.iter().map(array).collect() }
    }

    /// The bytes at an address.
    pub(crate) fn bytes(&mut self, address: u64, size: usize) -> Result<&mut [u8], Fault> {
        for (start, array) in &mut self.arrays {
            let offset = address.wrapping_sub(*start) as usize;
            if offset <= array.len() && array.len() - offset >= size {
                return Ok(&mut array[offset..offset + size]);
            }
        }
        let what = format!("an access to shared memory at {address:#x} is outside all arrays");
        Err(Fault { kind: Kind::OutOfBounds, what })
    }
}
