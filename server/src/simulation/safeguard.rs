//! Parts of the servers that tests take out, to prove that the simulation finds what they prevent.

use std::cell::Cell;

use zeroshard_shard::job;

/// A part that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Safeguard {
    /// A part of a job on a shard server.
    State(job::Safeguard),
    /// A checkpoint has the data of all ranks.
    UserData,
    /// A coordinator that was replaced decides nothing any more.
    Terms,
    /// A reader gets only versions that can be read.
    ReadableVersion,
    /// A reader gets the changes of every step between two versions.
    EveryStep,
    /// A reader compares the hashes of its values.
    ReaderHashes,
    /// A reader compares what a mirror sends with the hashes of the servers.
    MirrorHashes,
    /// A reader copies all values after its job has returned to a checkpoint.
    ReaderLines,
}

thread_local! {
    static MISSING: Cell<Option<Safeguard>> = const { Cell::new(None) };
}

/// Returns whether the running test has taken out this part.
pub(crate) fn is_missing(safeguard: Safeguard) -> bool {
    MISSING.get() == Some(safeguard)
}

/// Calls `run` without a part of the servers.
pub(super) fn without<T>(safeguard: Safeguard, run: impl FnOnce() -> T) -> T {
    MISSING.set(Some(safeguard));
    let result = run();
    MISSING.set(None);
    result
}
