//! Accesses of a kernel to memory, fast: each instruction that accesses memory remembers the
//! allocation of its last access, and the bytes of it that it has accessed.
//!
//! The bytes of an instruction are remembered as one range from the lowest to the highest. A kernel
//! that leaves gaps between the elements it accesses counts as one that accesses the gaps as well.

use std::{ops::Range, sync::Arc};

use super::Memory;
use crate::{
    fault::{Fault, Kind},
    order::Stamp,
    ptx::Access,
};

/// The accesses of a launch.
#[derive(Debug)]
pub(crate) struct Windows<'a> {
    memory: &'a mut Memory,
    sites: Vec<Window>,
    touched: Vec<Touched>,
}

/// Bytes of an allocation that an instruction has accessed.
#[derive(Debug, PartialEq, Eq)]
struct Touched {
    base: u64,
    range: Range<u64>,
    is_write: bool,
}

/// The allocation that an instruction accesses.
#[derive(Debug)]
struct Window {
    base: u64,
    size: u64,
    data: *mut u8,
    /// The bytes that were accessed.
    low: u64,
    high: u64,
    is_write: bool,
}

impl Window {
    const NONE: Window =
        Window { base: 0, size: 0, data: std::ptr::null_mut(), low: 0, high: 0, is_write: false };
}

impl<'a> Windows<'a> {
    /// Accesses of a kernel with `sites` instructions that access memory.
    pub(crate) fn new(memory: &'a mut Memory, sites: usize) -> Self {
        let sites = (0..sites).map(|_| Window::NONE).collect();
        Self { memory, sites, touched: Vec::new() }
    }

    /// Accesses memory at the address of each thread.
    #[inline]
    pub(crate) fn access(
        &mut self,
        site: usize,
        access: Access,
        size: usize,
        each: impl Iterator<Item = (u64, usize)>,
        values: &mut [u64],
    ) -> Result<(), Fault> {
        let bytes = size as u64;
        for (address, lane) in each {
            let window = &mut self.sites[site];
            let mut offset = address.wrapping_sub(window.base);
            if offset >= window.size || window.size - offset < bytes {
                Self::open(window, self.memory, &mut self.touched, address, bytes, access)?;
                offset = address - window.base;
            }
            if address & (bytes - 1) != 0 {
                let what = format!("an access to {address:#x} is not aligned to {size} bytes");
                return Err(Fault { kind: Kind::Misaligned, what });
            }
            window.low = window.low.min(offset);
            window.high = window.high.max(offset + bytes);
            // SAFETY: the offset is within the allocation, which this launch borrows, and aligned.
            unsafe {
                let at = window.data.add(offset as usize);
                let value = &mut values[lane];
                match (access, size) {
                    (Access::Load, 2) => *value = at.cast::<u16>().read().into(),
                    (Access::Load, 4) => *value = at.cast::<u32>().read().into(),
                    (Access::Load, 8) => *value = at.cast::<u64>().read(),
                    (Access::Load, _) => *value = at.read().into(),
                    (Access::Store, 2) => at.cast::<u16>().write(*value as u16),
                    (Access::Store, 4) => at.cast::<u32>().write(*value as u32),
                    (Access::Store, 8) => at.cast::<u64>().write(*value),
                    (Access::Store, _) => at.write(*value as u8),
                }
            }
        }
        Ok(())
    }

    /// Has an instruction access another allocation.
    #[cold]
    fn open(
        window: &mut Window,
        memory: &mut Memory,
        touched: &mut Vec<Touched>,
        address: u64,
        size: u64,
        access: Access,
    ) -> Result<(), Fault> {
        Self::close(std::mem::replace(window, Window::NONE), touched);
        let (base, allocation) = memory.find(address, size)?;
        *window = Window {
            base,
            size: allocation.size,
            data: allocation.data.as_mut_ptr().cast(),
            low: u64::MAX,
            high: 0,
            is_write: access == Access::Store,
        };
        Ok(())
    }

    fn close(window: Window, touched: &mut Vec<Touched>) {
        let Window { base, low, high, is_write, .. } = window;
        let new = Touched { base, range: low..high, is_write };
        if low < high && !touched.contains(&new) {
            touched.push(new);
        }
    }

    /// Adds the accesses to the histories of the allocations. If another operation races with one
    /// of them, the memory has it in its races.
    pub(crate) fn finish(mut self, stamp: &Arc<Stamp>) {
        for window in self.sites {
            Self::close(window, &mut self.touched);
        }
        for Touched { base, range, is_write } in self.touched {
            self.memory.record(base, range, is_write, stamp);
        }
    }
}
