//! Lasting holds: a process on this host maps a version of a slice until it has the next one.
//!
//! The two arrays of a slice take turns, so these holds need no memory if each process has the new
//! version before the next gradient arrives. A process that is late makes the slice allocate
//! another array.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

/// The most versions of one slice that processes may hold: the current one, and two earlier ones.
/// Processes copy further versions.
const MAX_VERSIONS: usize = 3;

/// The lasting holds of a job, by slice.
#[derive(Debug, Default)]
pub(super) struct Lasting(Mutex<HashMap<u32, Vec<Version>>>);

/// A version of a slice that is held.
#[derive(Debug)]
struct Version {
    /// The place of its array.
    at: usize,
    /// The number of its holds, at least 1.
    holds: usize,
}

/// A lasting hold, until it is dropped.
#[derive(Debug)]
pub(super) struct LastingHold {
    of: Arc<Lasting>,
    slice: u32,
    at: usize,
}

impl Lasting {
    /// Holds the version of a slice whose array is `at` this place; `None` if too many others are
    /// held.
    pub(super) fn hold(self: &Arc<Self>, slice: u32, at: usize) -> Option<LastingHold> {
        let mut slices = self.slices();
        let versions = slices.entry(slice).or_default();
        match versions.iter().position(|version| version.at == at) {
            Some(found) => versions[found].holds += 1,
            None if versions.len() == MAX_VERSIONS => return None,
            None => versions.push(Version { at, holds: 1 }),
        }
        Some(LastingHold { of: self.clone(), slice, at })
    }

    fn slices(&self) -> MutexGuard<'_, HashMap<u32, Vec<Version>>> {
        self.0.lock().expect("no holder of the lock panics")
    }
}

impl Drop for LastingHold {
    fn drop(&mut self) {
        let mut slices = self.of.slices();
        let Some(versions) = slices.get_mut(&self.slice) else { return };
        versions.retain_mut(|version| {
            version.holds -= usize::from(version.at == self.at);
            version.holds > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_has_as_many_held_versions_as_the_limit_and_each_has_any_number_of_holds() {
        let lasting = Arc::new(Lasting::default());
        let hold = |slice, at| lasting.hold(slice, at);
        let mut holds: Vec<_> = (0..MAX_VERSIONS).map(|at| hold(7, at).unwrap()).collect();
        assert!(hold(7, MAX_VERSIONS).is_none());
        assert!(hold(8, MAX_VERSIONS).is_some(), "another slice");
        holds.push(hold(7, 0).unwrap());
        holds.remove(0);
        assert!(hold(7, MAX_VERSIONS).is_none(), "the first version has another hold");
        holds.pop();
        assert!(hold(7, MAX_VERSIONS).is_some());
    }
}
