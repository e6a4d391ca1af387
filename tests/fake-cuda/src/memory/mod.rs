//! The memory of a device. Its addresses are not those of the host: a program that uses one as a
//! pointer faults. No address is used twice, so that uses of freed memory are found.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use crate::{
    fault::{Fault, Kind},
    order::{History, Stamp},
};

pub(crate) mod pinned;
pub(crate) mod windows;

/// The highest four bits of all addresses, which no pointer of the host has.
const PREFIX: u64 = 0xD << 60;
/// The bits of an address within a device.
const OFFSET_BITS: u32 = 44;
/// The alignment of allocations, and the least distance between them.
const ALIGNMENT: u64 = 256;
/// The content of new memory: NaN as f32 and as f64.
const FRESH: u64 = 0xffc0_dead_ffc0_dead;

/// The memory of a device.
#[derive(Debug)]
pub(crate) struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
    used: u64,
    capacity: u64,
    /// Accesses that nothing orders.
    pub(crate) races: Vec<Fault>,
}

#[derive(Debug)]
struct Allocation {
    number: usize,
    size: u64,
    /// Words, so that the data is aligned. Empty when it is freed.
    data: Vec<u64>,
    state: State,
    history: History,
}

#[derive(Debug)]
enum State {
    /// Its stream has not come to the allocation.
    Pending,
    Live,
    Freed(Arc<Stamp>),
}

impl Allocation {
    fn name(&self) -> String {
        format!("allocation {} of {} bytes", self.number, self.size)
    }
}

impl Memory {
    pub(crate) fn new(device: usize, capacity: u64) -> Self {
        let next = PREFIX | (device as u64) << OFFSET_BITS | 1 << 20;
        Self { allocations: BTreeMap::new(), next, used: 0, capacity, races: Vec::new() }
    }

    /// Reserves memory, which a later operation makes usable. `None`: out of memory.
    pub(crate) fn reserve(&mut self, size: u64) -> Option<u64> {
        if size > self.capacity.saturating_sub(self.used) {
            return None;
        }
        self.used += size;
        let number = self.allocations.len();
        let data = vec![FRESH; size.div_ceil(8) as usize];
        let (state, history) = (State::Pending, History::default());
        let allocation = Allocation { number, size, data, state, history };
        let base = self.next;
        self.allocations.insert(base, allocation);
        self.next = (base + size).next_multiple_of(ALIGNMENT) + ALIGNMENT;
        Some(base)
    }

    /// Makes reserved memory usable after an operation.
    pub(crate) fn allocate(&mut self, base: u64, stamp: &Arc<Stamp>) {
        if let Some(allocation) = self.allocations.get_mut(&base) {
            allocation.state = State::Live;
            let name = allocation.name();
            allocation.history.add(0..allocation.size, true, stamp, &name);
        }
    }

    /// Frees memory.
    pub(crate) fn free(&mut self, base: u64, stamp: &Arc<Stamp>) -> Result<(), Fault> {
        let Some(allocation) = self.allocations.get_mut(&base) else {
            let what = format!("{} frees {base:#x}, which was not allocated", stamp.name);
            return Err(Fault { kind: Kind::NotAllocated, what });
        };
        let name = allocation.name();
        if let State::Freed(earlier) = &allocation.state {
            let what = format!("{} frees {name}, which {} has freed", stamp.name, earlier.name);
            return Err(Fault { kind: Kind::DoubleFree, what });
        }
        self.races.extend(allocation.history.add(0..allocation.size, true, stamp, &name));
        allocation.state = State::Freed(stamp.clone());
        allocation.data = Vec::new();
        allocation.history = History::default();
        self.used -= allocation.size;
        Ok(())
    }

    /// The allocation of an address, which has this number of bytes there.
    fn find(&mut self, address: u64, size: u64) -> Result<(u64, &mut Allocation), Fault> {
        let fault = |kind, what| Err(Fault { kind, what });
        let Some((base, allocation)) = self.allocations.range_mut(..=address).next_back() else {
            let what = format!("an access to {address:#x}, which is not an address of the device");
            return fault(Kind::NotAllocated, what);
        };
        let (base, offset) = (*base, address - base);
        let name = allocation.name();
        if offset > allocation.size || allocation.size - offset < size {
            if offset >= allocation.size.next_multiple_of(ALIGNMENT) + ALIGNMENT {
                let what =
                    format!("an access to {address:#x}, which is not an address of the device");
                return fault(Kind::NotAllocated, what);
            }
            let end = offset + size;
            let what = format!("an access to bytes {offset}..{end} of {name}");
            return fault(Kind::OutOfBounds, what);
        }
        match &allocation.state {
            State::Live => Ok((base, allocation)),
            State::Pending => {
                let what = format!("an access to {name} before its stream has allocated it");
                fault(Kind::UseBeforeAllocation, what)
            }
            State::Freed(by) => {
                let what = format!("an access to {name}, which {} has freed", by.name);
                fault(Kind::UseAfterFree, what)
            }
        }
    }

    /// Bytes that an operation accesses.
    pub(crate) fn touch(
        &mut self,
        address: u64,
        size: u64,
        is_write: bool,
        stamp: &Arc<Stamp>,
    ) -> Result<&mut [u8], Fault> {
        let (base, allocation) = self.find(address, size)?;
        let offset = (address - base) as usize;
        let (start, size) = (allocation.data.as_mut_ptr().cast::<u8>(), size as usize);
        // SAFETY: `find` has checked the bounds, and the borrow of the allocations ends with that
        // of the result.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.add(offset), size) };
        self.record(base, offset as u64..(offset + size) as u64, is_write, stamp);
        Ok(bytes)
    }

    /// Adds an access to the history of an allocation.
    pub(crate) fn record(
        &mut self,
        base: u64,
        range: Range<u64>,
        is_write: bool,
        stamp: &Arc<Stamp>,
    ) {
        if let Some(allocation) = self.allocations.get_mut(&base).filter(|_| !range.is_empty()) {
            let name = allocation.name();
            self.races.extend(allocation.history.add(range, is_write, stamp, &name));
        }
    }

    /// The address on the host of an argument of a kernel, which may write to all of the
    /// allocation. Other arguments are returned as they are.
    pub(crate) fn on_host(&mut self, argument: u64, stamp: &Arc<Stamp>) -> Result<u64, Fault> {
        if argument >> 60 != PREFIX >> 60 {
            return Ok(argument);
        }
        let (base, allocation) = self.find(argument, 0)?;
        let (start, size) = (allocation.data.as_mut_ptr() as u64, allocation.size);
        self.record(base, 0..size, true, stamp);
        Ok(start + (argument - base))
    }

    /// The memory that is free, and all of it.
    pub(crate) fn free_and_total(&self) -> (u64, u64) {
        (self.capacity - self.used, self.capacity)
    }

    /// The allocations that are not freed.
    pub(crate) fn live(&self) -> Vec<String> {
        let live = self.allocations.values();
        let live = live.filter(|allocation| !matches!(allocation.state, State::Freed(_)));
        live.map(Allocation::name).collect()
    }
}
