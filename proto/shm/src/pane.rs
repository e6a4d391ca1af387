//! Memory of this process in which segments of another one appear, without a copy.

// The kernel maps memory at addresses that this file has reserved.
#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ffi::c_void,
    fmt, io,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use crate::{PAGE, Segment, View, pagemap::private_pages};

/// Panes of at least this size begin at a multiple of it, so that the kernel moves whole tables
/// of pages.
const TABLE: usize = 2 << 20;
/// The most pieces of all panes. The kernel limits the mappings of a process to 65,530 by
/// default, and a piece has three.
const MAX_PIECES: usize = 10_000;

static PIECES: AtomicUsize = AtomicUsize::new(0);
static LAST: AtomicU64 = AtomicU64::new(0);

/// Memory at a fixed address that belongs to this process, or shows pages of segments.
///
/// The program may write to it at any time. The kernel then copies the page, and the segment does
/// not change. The caller of [`Pane::show`] guarantees that the other process does not write the
/// pages before the pane shows other ones, or [owns](Pane::own) its bytes.
///
/// A pane keeps the mapping that it showed before, with its page tables. If it shows two parts of a
/// segment in turn, it causes no page faults.
pub struct Pane {
    /// The whole reservation.
    reserved: Range<usize>,
    /// The address of the pane, and the distance to two sides of the same size behind it.
    start: usize,
    stride: usize,
    len: usize,
    /// By first byte. INVARIANT: they do not overlap.
    pieces: Mutex<BTreeMap<usize, Piece>>,
    /// The number that all of it had when it became memory of this process, and a hash of what was
    /// shown then.
    before: Mutex<Option<(u64, u64)>>,
}

/// A part of the pane that shows, or has shown, a part of a segment.
struct Piece {
    len: usize,
    /// What it shows; `None`: it is memory of this process.
    shown: Option<Shown>,
    /// What the sides behind the pane show at its place.
    kept: [Option<Source>; 2],
}

struct Shown {
    source: Source,
    /// Increases with each change of any pane.
    number: u64,
    /// `None`: the other process may write the pages, and nobody reads them.
    keeper: Option<Keeper>,
}

/// Pages of a segment.
#[derive(Clone)]
struct Source {
    view: Arc<View>,
    at: u64,
}

/// Keeps another process from writing pages. The pane drops it when it no longer shows them.
pub type Keeper = Box<dyn Send>;

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.view, &other.view) && self.at == other.at
    }
}

impl Pane {
    /// Reserves addresses for `len` bytes, which are zero, and belong to this process.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::Unsupported`] if it cannot show pages, or if it does
    /// not tell which ones the program has written.
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        match is_supported() {
            true => Self::reserve(len),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn reserve(len: usize) -> io::Result<Arc<Self>> {
        let unit = if len >= TABLE { TABLE } else { PAGE };
        let stride = len.max(1).checked_next_multiple_of(unit).ok_or(io::ErrorKind::OutOfMemory)?;
        let total = stride.checked_mul(3).and_then(|sides| sides.checked_add(unit));
        let total = total.ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses addresses that nobody uses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::empty(), flags)? };
        let at = at as usize;
        let start = at.next_multiple_of(unit);
        let pane = Self {
            reserved: at..at + total,
            start,
            stride,
            len,
            pieces: Mutex::default(),
            before: Mutex::default(),
        };
        pane.map_own(start, stride)?;
        Ok(Arc::new(pane))
    }

    /// The address of the first byte, a multiple of the size of a page.
    pub fn address(&self) -> usize {
        self.start
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Shows the bytes of `view` from `at` on in `range`, until they are replaced or owned, and
    /// takes the keeper. What the program has written there is lost. Returns `false`, and changes
    /// no byte, if they do not consist of whole pages (the last page of the pane may be
    /// incomplete), or if there are too many pieces.
    ///
    /// # Errors
    /// Those of the system. What the program has written may be lost, and the keeper is not taken.
    pub fn show(
        &self,
        range: Range<usize>,
        view: &Arc<View>,
        at: u64,
        keeper: &mut Option<Keeper>,
    ) -> io::Result<bool> {
        let is_page = |at: usize| at.is_multiple_of(PAGE);
        let ends_at_page = is_page(range.end) || range.end == self.len;
        let len = range.len().next_multiple_of(PAGE);
        let is_within = range.end <= self.len && view.bytes(at, len as u64).is_some();
        if range.is_empty() || !is_page(range.start) || !ends_at_page || !is_within {
            return Ok(false);
        }
        if !usize::try_from(at).is_ok_and(is_page) {
            return Ok(false);
        }
        let mut pieces = self.pieces();
        if pieces.get(&range.start).is_none_or(|piece| piece.len != len) {
            self.own_of(&mut pieces, &range)?;
            if PIECES.load(Ordering::Relaxed) >= MAX_PIECES {
                return Ok(false);
            }
            PIECES.fetch_add(1, Ordering::Relaxed);
            pieces.insert(range.start, Piece { len, shown: None, kept: [None, None] });
        }
        let piece = pieces.get_mut(&range.start).expect("it was inserted");
        *self.before() = None;
        let source = Source { view: view.clone(), at };
        self.bring(range.start, piece, &source)?;
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let replaced = piece.shown.replace(Shown { source, number, keeper: keeper.take() });
        drop(pieces);
        drop(replaced);
        Ok(true)
    }

    /// Makes the bytes of `range` memory of this process, which nobody else changes.
    ///
    /// # Errors
    /// Those of the system. The bytes are the same.
    pub fn own(&self, range: Range<usize>) -> io::Result<()> {
        self.own_of(&mut self.pieces(), &range)
    }

    /// Makes all bytes memory of this process. If they were [unchanged](Self::unchanged_since), the
    /// pane [remembers](Self::remembered) the number, and their `hash`.
    ///
    /// # Errors
    /// Those of [`Self::own`].
    pub fn own_all(&self, hash: impl FnOnce(&[u8]) -> u64) -> io::Result<()> {
        if let Some(number) = self.unchanged_since()? {
            *self.before() = Some((number, hash(self.bytes(0..self.len))));
        }
        self.own(0..self.len)
    }

    /// The number that [`Self::unchanged_since`] returned before the pane became memory of this
    /// process, and the hash of what was shown; `None` if it was changed then, or shows something.
    pub fn remembered(&self) -> Option<(u64, u64)> {
        *self.before()
    }

    fn before(&self) -> MutexGuard<'_, Option<(u64, u64)>> {
        self.before.lock().expect("no holder of the lock panics")
    }

    /// Drops all keepers, so that the other process may write the pages. Nobody must read the pane
    /// before the next call of [`Self::show`].
    pub fn release(&self) {
        let mut pieces = self.pieces();
        let shown = pieces.values_mut().filter_map(|piece| piece.shown.as_mut());
        let ended: Vec<_> = shown.map(|shown| shown.keeper.take()).collect();
        drop(pieces);
        drop(ended);
    }

    /// Returns whether all bytes are shown, and kept.
    pub fn is_shown(&self) -> bool {
        self.all_shown(&self.pieces()).is_some()
    }

    /// What the pieces show, with their first bytes; `None` if a part of the pane is not shown, or
    /// not kept.
    fn all_shown<'a>(&self, pieces: &'a BTreeMap<usize, Piece>) -> Option<Vec<(usize, &'a Shown)>> {
        let mut next = 0;
        let mut all = Vec::with_capacity(pieces.len());
        for (&start, piece) in pieces {
            let shown = piece.shown.as_ref().filter(|shown| shown.keeper.is_some())?;
            if start != next {
                return None;
            }
            next = start + piece.len;
            all.push((start, shown));
        }
        Some(all).filter(|_| next >= self.len)
    }

    /// The number of the last change, if all bytes are shown, and the program has written nothing
    /// else than what they show.
    ///
    /// # Errors
    /// Those of the system.
    pub fn unchanged_since(&self) -> io::Result<Option<u64>> {
        let pieces = self.pieces();
        let Some(all) = self.all_shown(&pieces) else { return Ok(None) };
        let mut number = 0;
        for (start, shown) in all {
            number = number.max(shown.number);
            for pages in private_pages(self.start + start, pieces[&start].len)? {
                let end = pages.end.min(self.len - start);
                let at = shown.source.at + pages.start as u64;
                let theirs = shown.source.view.bytes(at, (end - pages.start) as u64);
                if theirs != Some(self.bytes(start + pages.start..start + end)) {
                    return Ok(None);
                }
            }
        }
        Ok(Some(number))
    }

    /// Makes a piece show `source`, and keeps the mapping that it showed before.
    fn bring(&self, start: usize, piece: &mut Piece, source: &Source) -> io::Result<()> {
        let (home, len) = (self.start + start, piece.len);
        let sides = [home + self.stride, home + 2 * self.stride];
        let Some(shown) = &piece.shown else {
            return map(home, len, source);
        };
        if shown.source == *source {
            return forget_private(home, len);
        }
        let found = piece.kept.iter().position(|kept| kept.as_ref() == Some(source));
        let other = match found {
            Some(found) => 1 - found,
            None => piece.kept.iter().position(Option::is_none).unwrap_or(0),
        };
        let before = shown.source.clone();
        move_pages(home, sides[other], len)?;
        piece.kept[other] = Some(before);
        // Pages that the program has written would hide later values of the segment.
        forget_private(sides[other], len)?;
        match found {
            Some(found) => {
                move_pages(sides[found], home, len)?;
                piece.kept[found] = None;
            }
            None => {
                map(home, len, source)?;
                // The system can free a segment that nobody maps.
                let last = 1 - other;
                if piece.kept[last].take_if(|kept| !Arc::ptr_eq(&kept.view, &source.view)).is_some()
                {
                    self.map_none(sides[last], len)?;
                }
            }
        }
        Ok(())
    }

    fn own_of(
        &self,
        pieces: &mut MutexGuard<'_, BTreeMap<usize, Piece>>,
        range: &Range<usize>,
    ) -> io::Result<()> {
        let overlaps = |start: usize, len: usize| start < range.end && range.start < start + len;
        let found = pieces.iter().filter(|&(&start, piece)| overlaps(start, piece.len));
        for start in found.map(|(&start, _)| start).collect::<Vec<_>>() {
            let piece = pieces.get_mut(&start).expect("it was found");
            let (home, len) = (self.start + start, piece.len);
            let sides = [home + self.stride, home + 2 * self.stride];
            if piece.shown.as_ref().is_some_and(|shown| shown.keeper.is_none()) {
                self.map_own(home, len)?;
            } else if piece.shown.is_some() {
                self.map_own(sides[0], len)?;
                piece.kept[0] = None;
                // SAFETY: nobody else uses the side, and both have `len` bytes. A thread of the
                // program that writes meanwhile races with this call, as it would with a pull.
                unsafe {
                    std::ptr::copy_nonoverlapping(home as *const u8, sides[0] as *mut u8, len);
                }
                move_pages(sides[0], home, len)?;
            }
            pieces.remove(&start);
            PIECES.fetch_sub(1, Ordering::Relaxed);
            // If this fails, the mappings keep memory of a segment until the pane ends.
            let _ = sides.map(|side| self.map_none(side, len));
        }
        Ok(())
    }

    /// Maps zeros, which belong to this process.
    fn map_own(&self, at: usize, len: usize) -> io::Result<()> {
        self.map_anonymous(at, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Only reserves the addresses.
    fn map_none(&self, at: usize, len: usize) -> io::Result<()> {
        self.map_anonymous(at, len, ProtFlags::empty())
    }

    fn map_anonymous(&self, at: usize, len: usize, access: ProtFlags) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        assert!(self.reserved.start <= at && at + len <= self.reserved.end, "reserved addresses");
        // SAFETY: the addresses are reserved for this pane.
        unsafe { mmap_anonymous(at as *mut c_void, len, access, flags)? };
        Ok(())
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: the pane is mapped, and the range within it. A thread of the program may write
        // meanwhile; every bit pattern is a valid byte.
        unsafe { std::slice::from_raw_parts((self.start + range.start) as *const u8, range.len()) }
    }

    fn pieces(&self) -> MutexGuard<'_, BTreeMap<usize, Piece>> {
        self.pieces.lock().expect("no holder of the lock panics")
    }
}

impl Drop for Pane {
    fn drop(&mut self) {
        let pieces = self.pieces.get_mut().expect("no holder of the lock panics");
        PIECES.fetch_sub(pieces.len(), Ordering::Relaxed);
        let Range { start, end } = self.reserved;
        // SAFETY: nobody uses the addresses any more. Only then the keepers are dropped.
        let _ = unsafe { munmap(start as *mut c_void, end - start) };
    }
}

impl fmt::Debug for Pane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pane").field("address", &self.start).field("len", &self.len).finish()
    }
}

/// Maps pages of a segment at an address of a pane. The program can write there; the segment does
/// not change. A process that forks without [`Pane::own`] has no such memory in its child, which
/// would see changes of the segment.
fn map(at: usize, len: usize, source: &Source) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    let at = at as *mut c_void;
    // SAFETY: the addresses are reserved for a pane.
    unsafe {
        mmap(at, len, access, flags, source.view.file(), source.at)?;
        madvise(at, len, Advice::LinuxDontFork)?;
        // Before Linux 5.14 the pages are mapped at their first use.
        let _ = madvise(at, len, Advice::LinuxPopulateRead);
    }
    Ok(())
}

/// Drops what the program has written to pages of a segment.
fn forget_private(at: usize, len: usize) -> io::Result<()> {
    for pages in private_pages(at, len)? {
        let at = (at + pages.start) as *mut c_void;
        // SAFETY: the pages are of a pane, and their content is to be replaced.
        unsafe { madvise(at, pages.len(), Advice::LinuxDontNeed)? };
    }
    Ok(())
}

/// Moves pages, with their tables, to other addresses of the same pane. The old ones show the
/// same pages of the segment, without tables.
fn move_pages(from: usize, to: usize, len: usize) -> io::Result<()> {
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    // SAFETY: both ranges are reserved for a pane, and they do not overlap.
    unsafe { mremap_fixed(from as *mut c_void, len, len, flags, to as *mut c_void)? };
    Ok(())
}

/// Returns whether the system can do all of this. It needs Linux 5.13.
fn is_supported() -> bool {
    static IS_SUPPORTED: OnceLock<bool> = OnceLock::new();
    *IS_SUPPORTED.get_or_init(|| try_all().unwrap_or(false))
}

fn try_all() -> io::Result<bool> {
    let segment = Segment::create("zeroshard test", 2 * PAGE)?;
    // SAFETY: nobody else has the segment.
    unsafe { segment.bytes_mut(PAGE..2 * PAGE) }.fill(1);
    let view = Arc::new(View::new(segment.read_only()?, 2 * PAGE)?);
    let pane = Pane::reserve(PAGE)?;
    let first = || pane.bytes(0..1)[0];
    for _ in 0..2 {
        for (at, expected) in [(0, 0), (PAGE, 1)] {
            let keeper = &mut Some(Box::new(()) as Keeper);
            let is_shown = pane.show(0..PAGE, &view, at as u64, keeper)?;
            if !is_shown || first() != expected || pane.unchanged_since()?.is_none() {
                return Ok(false);
            }
            // SAFETY: the page is mapped, and nobody else uses it.
            unsafe { (pane.start as *mut u8).write(7) };
            if pane.unchanged_since()?.is_some() || segment.bytes(at..at + 1)[0] != expected {
                return Ok(false);
            }
        }
    }
    pane.own(0..PAGE)?;
    Ok(first() == 7)
}

#[cfg(test)]
#[path = "pane_tests.rs"]
mod tests;
