//! Pinned memory of the host, and the copies from and to it that are pending.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::BTreeMap,
    ops::Range,
    sync::Arc,
};

use crate::{
    fault::{Fault, Kind},
    order::{History, Stamp},
};

/// The content of memory to which a copy is pending. A program that reads it too early, reads this.
const PENDING: u8 = 0xA5;
const ALIGNMENT: usize = 4096;

/// The pinned memory of a device's context.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    areas: BTreeMap<usize, Area>,
    count: usize,
}

#[derive(Debug)]
struct Area {
    number: usize,
    memory: Pages,
    pending: Vec<(u64, Range<usize>, Direction)>,
    history: History,
    /// The content after the copies so far. Where it differs, the program has written.
    known: Vec<u8>,
}

/// Memory that the program accesses as well.
#[derive(Debug)]
struct Pages {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the memory is accessed with the device locked, or by the program, as with every driver.
unsafe impl Send for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// The direction of a copy, seen from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Upload,
    Download,
}

/// A pending copy from or to pinned memory.
#[derive(Debug)]
pub(crate) struct Pending {
    id: u64,
    area: usize,
    range: Range<usize>,
    direction: Direction,
    /// The checksum of the memory, which must not change. `None` if another copy may change it.
    content: Option<u64>,
}

impl Pinned {
    /// Allocates memory.
    pub(crate) fn allocate(&mut self, size: usize) -> Option<*mut u8> {
        let layout = Layout::from_size_align(size.max(1), ALIGNMENT).ok()?;
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return None;
        }
        let number = self.count;
        self.count += 1;
        let memory = Pages { start, layout };
        let (pending, history, known) = (Vec::new(), History::default(), vec![0; size]);
        let area = Area { number, memory, pending, history, known };
        self.areas.insert(start as usize, area);
        Some(start)
    }

    /// Frees memory. Memory with pending copies stays mapped.
    pub(crate) fn free(&mut self, start: usize) -> Result<(), Fault> {
        let Some(area) = self.areas.remove(&start) else {
            let what = format!("host memory at {start:#x} is not allocated");
            return Err(Fault { kind: Kind::DoubleFree, what });
        };
        if area.pending.is_empty() {
            return Ok(());
        }
        let what = format!(
            "pinned memory {} is freed while {} copies from or to it are pending",
            area.number,
            area.pending.len()
        );
        std::mem::forget(area.memory);
        Err(Fault { kind: Kind::PinnedFreed, what })
    }

    fn find(&mut self, address: usize, size: usize) -> Option<(usize, &mut Area)> {
        let (start, area) = self.areas.range_mut(..=address).next_back()?;
        let end = start + area.memory.layout.size();
        (address.checked_add(size)? <= end).then_some((*start, area))
    }

    /// Begins a copy. `host` is the program, which may have written the memory. Returns the race
    /// with an earlier copy, if there is one.
    pub(crate) fn begin(
        &mut self,
        id: u64,
        address: usize,
        size: usize,
        direction: Direction,
        host: &Arc<Stamp>,
    ) -> Result<(Pending, Option<Fault>), Fault> {
        let Some((start, area)) = self.find(address, size) else {
            let what = format!(
                "an asynchronous {direction:?} of {size} bytes at {address:#x}, which are not in \
                 pinned memory"
            );
            return Err(Fault { kind: Kind::NotPinned, what });
        };
        let range = address - start..address - start + size;
        let overlaps =
            |of: &&(u64, Range<usize>, Direction)| of.1.start < range.end && range.start < of.1.end;
        let mut others = area.pending.iter().filter(overlaps);
        let is_fixed = match direction {
            Direction::Upload => others.all(|other| other.2 == Direction::Upload),
            Direction::Download => others.next().is_none(),
        };
        if is_fixed && direction == Direction::Download {
            area.bytes(&range).fill(PENDING);
        }
        let content = is_fixed.then(|| checksum(area.bytes(&range)));
        area.pending.push((id, range.clone(), direction));
        let mut race = None;
        if direction == Direction::Upload {
            let now = area.bytes(&range).to_vec();
            if area.known[range.clone()] != now {
                area.known[range.clone()].copy_from_slice(&now);
                let name = format!("pinned memory {}", area.number);
                race = area.history.add(range.start as u64..range.end as u64, true, host, &name);
            }
        }
        Ok((Pending { id, area: start, range, direction, content }, race))
    }

    /// Ends a copy. `device` is the memory of the device. Returns the faults of the program.
    pub(crate) fn end(
        &mut self,
        pending: &Pending,
        stamp: &Arc<Stamp>,
        device: &mut [u8],
    ) -> Vec<Fault> {
        let Some(area) = self.areas.get_mut(&pending.area) else { return Vec::new() };
        area.pending.retain(|(id, ..)| *id != pending.id);
        let name = format!("pinned memory {}", area.number);
        let range = pending.range.start as u64..pending.range.end as u64;
        let is_write = pending.direction == Direction::Download;
        let mut faults: Vec<Fault> =
            area.history.add(range, is_write, stamp, &name).into_iter().collect();
        let bytes = area.bytes(&pending.range);
        if pending.content.is_some_and(|content| content != checksum(bytes)) {
            let what = format!("{name} was written while {} was pending", stamp.name);
            faults.push(Fault { kind: Kind::PinnedChanged, what });
        }
        match pending.direction {
            Direction::Upload => device.copy_from_slice(bytes),
            Direction::Download => {
                bytes.copy_from_slice(device);
                area.known[pending.range.clone()].copy_from_slice(device);
            }
        }
        faults
    }

    /// Gives all copies up.
    pub(crate) fn forget_pending(&mut self) {
        self.areas.values_mut().for_each(|area| area.pending.clear());
    }

    /// The memory that is not freed.
    pub(crate) fn live(&self) -> Vec<String> {
        let name = |area: &Area| {
            format!("pinned memory {} of {} bytes", area.number, area.memory.layout.size())
        };
        self.areas.values().map(name).collect()
    }
}

impl Area {
    fn bytes(&mut self, range: &Range<usize>) -> &mut [u8] {
        // SAFETY: the range is within the memory. The program must not access it now; if it does,
        // a test fails anyway.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start.add(range.start), range.len()) }
    }
}

/// A checksum that changes with every word and its place.
fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut sum = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |word: u64| sum = (sum ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    words.iter().for_each(|word| add(u64::from_le_bytes(*word)));
    rest.iter().for_each(|byte| add(u64::from(*byte)));
    sum
}
