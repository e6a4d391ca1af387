//! A warp: threads that carry out the same operations together where they agree.
//!
//! Each thread has its next operation. The warp runs the threads whose next operation is the
//! earliest in the kernel, so that threads that went different ways meet again.

use super::shared::Shared;
use crate::{
    fault::{Fault, Kind},
    lanes::{Lanes, WARP},
    memory::windows::Windows,
    ptx::{Access, Action, Kernel, Space},
};

/// A warp of a block.
#[derive(Debug)]
pub(crate) struct Warp<'a> {
    kernel: &'a Kernel,
    parameters: &'a [u8],
    pub(crate) lanes: Lanes,
    /// The number of the warp's threads, of which the last warp of a block may have fewer.
    threads: usize,
    /// The next operation of each thread.
    next: [usize; WARP],
    /// The threads that have not ended.
    alive: u32,
    /// The threads that wait at a barrier.
    waiting: u32,
    /// The number of operations, each counted for every thread.
    pub(crate) instructions: u64,
}

impl<'a> Warp<'a> {
    pub(crate) fn new(kernel: &'a Kernel, parameters: &'a [u8], threads: usize) -> Self {
        let lanes = Lanes::new(kernel.registers);
        let (next, alive, waiting, instructions) = ([0; WARP], 0, 0, 0);
        Self { kernel, parameters, lanes, threads, next, alive, waiting, instructions }
    }

    /// Begins a block.
    pub(crate) fn start(&mut self) {
        self.next = [0; WARP];
        self.alive = u32::MAX >> (WARP - self.threads);
        self.waiting = 0;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.alive == 0
    }

    /// The threads that wait at a barrier go on.
    pub(crate) fn pass_barrier(&mut self) {
        self.waiting = 0;
    }

    /// Runs all threads until they wait at a barrier or have ended.
    pub(crate) fn run_to_barrier(
        &mut self,
        windows: &mut Windows<'_>,
        shared: &mut Shared,
    ) -> Result<(), Fault> {
        loop {
            let ready = self.alive & !self.waiting;
            if ready == 0 {
                return Ok(());
            }
            let ready = lanes_of(ready);
            let at = ready.clone().map(|lane| self.next[lane]).min().unwrap_or(0);
            let mut mask = 0;
            let mut meeting = usize::MAX;
            for lane in ready {
                match self.next[lane] {
                    next if next == at => mask |= 1 << lane,
                    next => meeting = meeting.min(next),
                }
            }
            self.run_together(at, mask, meeting, windows, shared)?;
        }
    }

    /// Runs the threads of `mask` from an operation on, until they part, meet others at `meeting`,
    /// wait, or end.
    fn run_together(
        &mut self,
        mut at: usize,
        mask: u32,
        meeting: usize,
        windows: &mut Windows<'_>,
        shared: &mut Shared,
    ) -> Result<(), Fault> {
        let threads = u64::from(mask.count_ones());
        let kernel = self.kernel;
        while at < meeting {
            let operation = &kernel.operations[at];
            self.instructions += threads;
            at += 1;
            let active = match operation.guard {
                None => mask,
                Some((predicate, expected)) => self.lanes.with(predicate, expected, mask),
            };
            match operation.action {
                Action::Compute { alu, to, from } => alu.run(&mut self.lanes, to, from, active),
                Action::Parameter { to, offset, size } => {
                    let value = little_endian(&self.parameters[offset..offset + size]);
                    self.lanes.compute(to, [to; 3], active, |_, _, _| value);
                }
                Action::Access { access, space, size, register, at, site } => {
                    let addresses = *self.lanes.of(at.base);
                    let values = self.lanes.of_mut(register);
                    let each = lanes_of(active);
                    let each =
                        each.map(|lane| (addresses[lane].wrapping_add_signed(at.offset), lane));
                    match space {
                        Space::Global => windows.access(site, access, size, each, values)?,
                        Space::Shared => {
                            for (address, lane) in each {
                                share(access, address, size, &mut values[lane], shared)?;
                            }
                        }
                    }
                }
                Action::Branch(to) if active == mask => at = to,
                Action::Branch(to) => {
                    if active != 0 {
                        self.set_next(active, to);
                        self.set_next(mask & !active, at);
                        return Ok(());
                    }
                }
                Action::Barrier => {
                    self.waiting |= active;
                    self.set_next(mask, at);
                    return Ok(());
                }
                Action::Exit => {
                    self.alive &= !active;
                    self.set_next(mask, at);
                    if active != 0 {
                        return Ok(());
                    }
                }
            }
        }
        self.set_next(mask, at);
        Ok(())
    }

    fn set_next(&mut self, mask: u32, at: usize) {
        lanes_of(mask).for_each(|lane| self.next[lane] = at);
    }
}

/// Accesses shared memory.
fn share(
    access: Access,
    address: u64,
    size: usize,
    value: &mut u64,
    shared: &mut Shared,
) -> Result<(), Fault> {
    if !address.is_multiple_of(size as u64) {
        let what = format!("an access to shared memory at {address:#x} is not aligned to {size}");
        return Err(Fault { kind: Kind::Misaligned, what });
    }
    let bytes = shared.bytes(address, size)?;
    match access {
        Access::Load => *value = little_endian(bytes),
        Access::Store => bytes.copy_from_slice(&value.to_le_bytes()[..size]),
    }
    Ok(())
}

/// At most eight bytes as a number.
fn little_endian(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(value)
}

/// The threads of a mask.
fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.checked_sub(1)?;
        Some(lane)
    })
}
