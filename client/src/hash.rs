//! Hashes of tensors' values. A client compares them to notice that a script has written to a
//! tensor.

use std::{
    panic::resume_unwind,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use twox_hash::XxHash3_64;

/// Bytes that one thread hashes at a time.
const BLOCK: usize = 1 << 20;
/// More threads do not read memory faster.
const MAX_THREADS: usize = 8;

/// Returns a hash of each array: XXH3 of the hashes of its blocks of 1 MiB. Several threads read
/// the arrays.
pub fn hashes(arrays: &[&[u8]]) -> Vec<u64> {
    let blocks: Vec<&[u8]> = arrays.iter().flat_map(|bytes| bytes.chunks(BLOCK)).collect();
    let mut of_blocks = hash_blocks(&blocks).into_iter();
    let of_array = |bytes: &&[u8]| {
        let blocks = of_blocks.by_ref().take(bytes.len().div_ceil(BLOCK));
        XxHash3_64::oneshot(&blocks.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
    };
    arrays.iter().map(of_array).collect()
}

/// The number of cores that this process may use, which takes a while to determine.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

/// The hash of each block. Threads take the next block in turn.
fn hash_blocks(blocks: &[&[u8]]) -> Vec<u64> {
    let next = AtomicUsize::new(0);
    let work = || {
        let taken = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let taken = taken.map_while(|index| Some((index, *blocks.get(index)?)));
        taken.map(|(index, block)| (index, XxHash3_64::oneshot(block))).collect::<Vec<_>>()
    };
    let bytes: usize = blocks.iter().map(|block| block.len()).sum();
    // A thread takes about as long to start as to hash half a block.
    let useful = (bytes / BLOCK / 2).min(MAX_THREADS);
    let others = if useful < 2 { 0 } else { useful.min(cores()) - 1 };
    let mut hashes = vec![0; blocks.len()];
    thread::scope(|scope| {
        let started: Vec<_> = (0..others)
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let found = started
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        for (index, hash) in work().into_iter().chain(found) {
            hashes[index] = hash;
        }
    });
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_array_has_the_hash_that_it_has_alone() {
        let bytes: Vec<u8> = (0..5 * BLOCK + 3).map(|i| ((i * i) >> 7) as u8).collect();
        let arrays = [&bytes[..], &[], &bytes[..BLOCK], &bytes[7..8], &bytes[..BLOCK + 1]];
        let alone: Vec<u64> = arrays.iter().flat_map(|array| hashes(&[array])).collect();
        assert_eq!(hashes(&arrays), alone);
    }

    #[test]
    fn every_byte_changes_the_hash() {
        let mut bytes = vec![0; 3 * BLOCK + 5];
        let before = hashes(&[&bytes]);
        for at in [0, BLOCK - 1, BLOCK, 2 * BLOCK + 77, 3 * BLOCK + 4] {
            bytes[at] = 1;
            assert_ne!(hashes(&[&bytes]), before, "byte {at}");
            bytes[at] = 0;
        }
        assert_ne!(hashes(&[&bytes[..3 * BLOCK]]), before);
    }
}
