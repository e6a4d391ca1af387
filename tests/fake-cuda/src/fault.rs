//! What a program did wrong.

use std::fmt;

/// A fault of the program that uses the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// A sentence that names the operations and the memory.
    pub(crate) what: String,
}

/// The kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Two operations access the same memory, one of them writes it, and nothing orders them.
    Race,
    UseAfterFree,
    /// A use of memory before its allocation in the order of the streams.
    UseBeforeAllocation,
    OutOfBounds,
    /// The address does not belong to the device.
    NotAllocated,
    Misaligned,
    /// An asynchronous copy from or to host memory that is not pinned.
    NotPinned,
    /// Pinned memory was written while a copy from or to it was pending.
    PinnedChanged,
    /// Pinned memory was freed while a copy from or to it was pending.
    PinnedFreed,
    DoubleFree,
    /// A handle that does not exist, or does not exist any more.
    BadHandle,
    /// An object that was not destroyed before its context was.
    Leak,
}

impl Kind {
    /// The name of the kind, which tests look for.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Race => "race",
            Kind::UseAfterFree => "use after free",
            Kind::UseBeforeAllocation => "use before allocation",
            Kind::OutOfBounds => "out of bounds",
            Kind::NotAllocated => "not allocated",
            Kind::Misaligned => "misaligned",
            Kind::NotPinned => "not pinned",
            Kind::PinnedChanged => "pinned memory changed",
            Kind::PinnedFreed => "pinned memory freed",
            Kind::DoubleFree => "double free",
            Kind::BadHandle => "bad handle",
            Kind::Leak => "leak",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.what)
    }
}
