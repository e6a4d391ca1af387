//! The state of a reader that follows a job: the version in its arrays, the last version that it
//! has shown, and whether a change fits its values. It calls nobody and holds no values.

use std::{
    collections::BTreeMap,
    sync::Mutex,
    thread::{available_parallelism, scope},
};

use crate::{
    apply::{Place, apply, undo},
    block::Malformed,
    gather::{Gathering, Known, SliceChange},
    hash,
};

/// The number of versions after which a reader hashes its arrays in full. This detects writes by
/// somebody else to elements that no step has changed since.
const READ_EVERY: u64 = 64;

/// The bytes of a version below which one thread is as fast as several.
const PARALLEL: usize = 256 << 10;

/// The maximum number of threads that apply a version. A host often has many readers.
const THREADS: usize = 8;

/// A followed slice: the reader's values, which are little-endian bytes, and their change.
#[derive(Debug)]
pub struct Part<'a> {
    /// The index of the slice.
    pub slice: u32,
    /// The dtype and the position of the values.
    pub place: Place,
    /// The values.
    pub values: &'a mut [u8],
    /// The change.
    pub change: &'a SliceChange,
}

/// The reason for a full copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Copied {
    /// The follower had no version yet.
    Joined,
    /// The servers do not know the changes since the reader's version.
    Behind,
    /// The job has returned to a checkpoint, or is another job of the same name.
    Rewound,
    /// A hash of the reader's values differs, because somebody else has written to them.
    Differed,
    /// An earlier full copy was interrupted.
    Interrupted,
}

impl Copied {
    /// Returns the name of the reason.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::Behind => "behind",
            Self::Rewound => "rewound",
            Self::Differed => "differed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// A reader of a job.
#[derive(Debug)]
pub struct Reader {
    /// The id and the line of the job.
    of: (u64, Option<u64>),
    /// The version in the reader's arrays; `None`: they need a full copy.
    held: Option<Held>,
    /// The last version that was shown. The next one must be newer.
    shown: Option<u64>,
    /// The full copies, by reason.
    copies: BTreeMap<Copied, u64>,
    /// The reason for the next full copy.
    reason: Copied,
}

/// The version in a reader's arrays.
#[derive(Debug)]
struct Held {
    version: u64,
    /// The hashes of all followed slices.
    hashes: BTreeMap<u32, u64>,
    /// The number of versions since the arrays were hashed in full.
    unread: u64,
}

impl Reader {
    /// Follows the job with this id on this line.
    pub fn new(of: (u64, Option<u64>)) -> Self {
        Self { of, held: None, shown: None, copies: BTreeMap::new(), reason: Copied::Joined }
    }

    /// Returns the version in the reader's arrays, or `None` if they need a full copy.
    pub fn version(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.version)
    }

    /// Returns the hashes of the slices in the reader's arrays, or `None` if they need a full copy.
    pub fn hashes(&self) -> Option<&BTreeMap<u32, u64>> {
        self.held.as_ref().map(|held| &held.hashes)
    }

    /// Returns the last version that was shown.
    pub fn shown(&self) -> Option<u64> {
        self.shown
    }

    /// Returns the number of full copies for each reason.
    pub fn copies(&self) -> &BTreeMap<Copied, u64> {
        &self.copies
    }

    /// Returns the reason for the next full copy.
    pub fn reason(&self) -> Copied {
        self.reason
    }

    /// Notes the id and the line with which the coordinator has described the job. If they are
    /// others, the reader needs a full copy, and version numbers begin anew. Returns `false` for a
    /// line that the job has left: a coordinator that was replaced may still describe it. The
    /// description must then not be used.
    pub fn described(&mut self, of: (u64, Option<u64>)) -> bool {
        if of.0 == self.of.0 && of.1 < self.of.1 {
            return false;
        }
        if std::mem::replace(&mut self.of, of) != of {
            self.shown = None;
            self.lose(Copied::Rewound);
        }
        true
    }

    /// Notes that the reader needs a full copy.
    pub fn lose(&mut self, reason: Copied) {
        if self.held.take().is_some() {
            self.reason = reason;
        }
    }

    /// Notes that a version was shown.
    pub fn show(&mut self, version: u64) {
        self.shown = Some(version);
    }

    /// Allows the last version to be shown again, because it could not be applied.
    pub fn show_again(&mut self) {
        self.shown = None;
    }

    /// Returns whether the newest version of the servers can be shown.
    pub fn is_newer(&self, newest: Option<u64>) -> bool {
        newest > self.shown
    }

    /// Notes that a full copy begins: until it ends, the arrays have values of several versions.
    pub fn begin_copy(&mut self) {
        (self.held, self.shown, self.reason) = (None, None, Copied::Interrupted);
    }

    /// Notes that the arrays have a full copy, whose slices have these hashes.
    pub fn end_copy(&mut self, version: u64, reason: Copied, hashes: BTreeMap<u32, u64>) {
        self.held = Some(Held { version, hashes, unread: 1 });
        self.shown = Some(version);
        *self.copies.entry(reason).or_default() += 1;
    }

    /// Gathers the changes since the version in the arrays. Returns `None` if no server has a
    /// version that can be shown.
    pub fn gather(&self, answers: Vec<Known>) -> Option<Gathering> {
        Gathering::new(self.version()?, self.shown, answers)
    }

    /// Applies the changes of slices to the reader's values. Returns the number of changed
    /// elements, or `None` if a slice does not get the hash that its server has sent: somebody has
    /// written to the values. In this case and after an error the values are as before.
    ///
    /// # Errors
    /// A slice whose change is malformed.
    pub fn apply(&self, parts: Vec<Part<'_>>) -> Result<Option<u64>, (u32, Malformed)> {
        let bytes: usize = parts.iter().map(|part| part.change.change.len()).sum();
        let threads = match bytes < PARALLEL {
            true => 1,
            false => available_parallelism().map_or(1, |threads| threads.get().min(THREADS)),
        };
        let mut applied = in_threads(threads, parts, |part| self.apply_to(part));
        let (mut changed, mut fits, mut failed) = (0, true, None);
        for (part, applied) in &applied {
            match applied {
                Ok(Some(number)) => changed += number,
                Ok(None) => fits = false,
                Err(error) => failed = Some((part.slice, *error)),
            }
        }
        if failed.is_some() || !fits {
            let all = applied.iter_mut();
            for (part, _) in all.filter(|(_, applied)| matches!(applied, Ok(Some(_)))) {
                undo(part.place.dtype, part.values, &part.change.change);
            }
        }
        failed.map_or(Ok(fits.then_some(changed)), Err)
    }

    /// Applies the change of one slice. Undoes it if it does not fit.
    fn apply_to(&self, part: &mut Part<'_>) -> Result<Option<u64>, Malformed> {
        let Part { slice, place, values, change } = part;
        let is_read = self.held.as_ref().is_some_and(|held| held.unread == 0);
        let hash = |values: &[u8]| Some(hash::of(place.dtype, place.first, values));
        if is_read && self.hash_of(*slice) != hash(values) {
            return Ok(None);
        }
        let effect = apply(*place, values, &change.change);
        match effect {
            Ok(effect) if self.fits(*slice, effect.difference, change) => Ok(Some(effect.changed)),
            effect => {
                undo(place.dtype, values, &change.change);
                effect.map(|_| None)
            }
        }
    }

    /// Returns whether the hash of a slice becomes that of the server when it grows by
    /// `difference`.
    pub fn fits(&self, slice: u32, difference: u64, change: &SliceChange) -> bool {
        self.hash_of(slice).is_some_and(|hash| hash.wrapping_add(difference) == change.hash)
    }

    fn hash_of(&self, slice: u32) -> Option<u64> {
        self.hashes()?.get(&slice).copied()
    }

    /// Notes that all changes up to a version were applied to the arrays.
    pub fn advance(&mut self, version: u64, slices: &BTreeMap<u32, SliceChange>) {
        let hashes = slices.iter().map(|(&slice, of)| (slice, of.hash)).collect();
        let unread = self.held.as_ref().map_or(0, |held| (held.unread + 1) % READ_EVERY);
        self.held = Some(Held { version, hashes, unread });
    }
}

/// Calls `work` for each part, in several threads. Returns the parts with the results.
fn in_threads<P: Send, R: Send>(
    threads: usize,
    parts: Vec<P>,
    work: impl Fn(&mut P) -> R + Sync,
) -> Vec<(P, R)> {
    let threads = threads.min(parts.len());
    let rest = Mutex::new(parts.into_iter());
    let next = || rest.lock().expect("no holder of the lock panics").next();
    let run = || {
        let parts = std::iter::from_fn(next);
        parts.map(|mut part| (work(&mut part), part)).map(|(result, part)| (part, result)).collect()
    };
    if threads <= 1 {
        return run();
    }
    scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut all: Vec<_> = run();
        others.into_iter().for_each(|other| match other.join() {
            Ok(of_thread) => all.extend(of_thread),
            Err(panic) => std::panic::resume_unwind(panic),
        });
        all
    })
}
