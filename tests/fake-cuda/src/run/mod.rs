//! The interpreter: runs the blocks of a launch, warp by warp.
//!
//! Warps of a block run one after the other, in any order, each of them until its threads have come
//! to a barrier or to their end. Without a barrier that a kernel needs, a warp therefore reads what
//! the others have not written yet.

pub(crate) mod shared;
pub(crate) mod warp;

#[cfg(test)]
mod tests;

use crate::{
    fault::Fault,
    lanes::WARP,
    memory::windows::Windows,
    ptx::{Kernel, Special},
    random::Random,
};
use shared::Shared;
use warp::Warp;

/// The largest number of threads of a block.
const MAX_THREADS: u32 = 1024;

/// A launch: a kernel and its arguments.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) kernel: std::sync::Arc<Kernel>,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    /// The bytes of the parameters.
    pub(crate) parameters: Vec<u8>,
}

impl Launch {
    /// Returns whether the device can run as many threads.
    pub(crate) fn is_possible(&self) -> bool {
        self.blocks > 0 && (1..=MAX_THREADS).contains(&self.threads)
    }

    /// Runs all blocks, in any order. Returns the number of instructions of threads.
    ///
    /// # Errors
    /// The first access that is not allowed.
    pub(crate) fn run(&self, windows: &mut Windows<'_>, random: &mut Random) -> Result<u64, Fault> {
        let kernel = &*self.kernel;
        let mut shared = Shared::new(&kernel.shared, random);
        let warps = (self.threads as usize).div_ceil(WARP);
        let mut warps: Vec<Warp<'_>> = (0..warps)
            .map(|warp| {
                let first = warp * WARP;
                let threads = (self.threads as usize - first).min(WARP);
                let mut warp = Warp::new(kernel, &self.parameters, threads);
                for (register, value) in &kernel.constants {
                    warp.lanes.fill(*register, |_| *value);
                }
                for (register, special) in &kernel.specials {
                    match special {
                        Special::Thread => warp.lanes.fill(*register, |lane| (first + lane) as u64),
                        Special::Threads => warp.lanes.fill(*register, |_| self.threads.into()),
                        Special::Blocks => warp.lanes.fill(*register, |_| self.blocks.into()),
                        Special::Block => {}
                    }
                }
                warp
            })
            .collect();
        let mut order: Vec<usize> = (0..warps.len()).collect();
        // Blocks start at any of them, and run forwards or backwards.
        let first = random.below(self.blocks.into());
        let is_reversed = random.below(2) == 1;
        for block in 0..u64::from(self.blocks) {
            let block = (first + block) % u64::from(self.blocks);
            let block = if is_reversed { u64::from(self.blocks) - 1 - block } else { block };
            for warp in &mut warps {
                warp.start();
                for (register, special) in &kernel.specials {
                    if *special == Special::Block {
                        warp.lanes.fill(*register, |_| block);
                    }
                }
            }
            while warps.iter().any(|warp| !warp.has_ended()) {
                random.shuffle(&mut order);
                for &warp in &order {
                    warps[warp].run_to_barrier(windows, &mut shared)?;
                }
                warps.iter_mut().for_each(Warp::pass_barrier);
            }
        }
        Ok(warps.iter().map(|warp| warp.instructions).sum())
    }
}
