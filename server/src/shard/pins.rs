//! The versions of a job that readers have pinned.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, RwLock, Weak},
};

use zeroshard_kernels::Backend;
use zeroshard_shard::{
    budget::{Budget, Space},
    slice::Slice,
    state_selector::StateSelector,
    tier::Array,
};

/// A part of a slice at one version.
pub(super) struct Kept<B: Backend> {
    array: Array<B>,
    /// Its part of the budget for pinned versions.
    _space: Space,
}

/// A version of slices that steps do not overwrite.
pub(crate) struct Pin<B: Backend> {
    pub(super) version: u64,
    /// Parts of each slice.
    pub(super) slices: HashMap<(u32, StateSelector), Arc<Kept<B>>>,
    /// Whether the optimizer state and all averages are pinned as well.
    pub(super) state: bool,
    /// The state tensors of the averages that are pinned, by name.
    pub(super) averages: Vec<String>,
}

impl<B: Backend> Pin<B> {
    /// A part of a slice, if it is pinned.
    pub(super) fn slice(&self, index: u32, part: StateSelector) -> Option<&Array<B>> {
        self.slices.get(&(index, part)).map(|kept| &kept.array)
    }

    /// The parts of a slice that the pin keeps, on whichever server the slice is.
    pub(super) fn parts(&self, slice: &Slice<B>) -> Vec<StateSelector> {
        let is_kept = |name: &str| self.state || self.averages.iter().any(|kept| kept == name);
        let averages = slice.average_parts().filter(|(name, _)| is_kept(name));
        let states = slice.state_parts().filter(|_| self.state).chain(averages);
        let states = states.map(|(_, part)| part);
        std::iter::once(StateSelector::Parameters).chain(states).collect()
    }

    /// What the pin keeps, for messages.
    pub(super) fn kept(&self) -> String {
        match (self.state, &self.averages[..]) {
            (true, _) => "the parameters and state".to_owned(),
            (false, []) => "the parameters".to_owned(),
            (false, averages) => format!("the parameters and {}", averages.join(", ")),
        }
    }
}

/// A version, a slice and a part of it.
type Key = (u64, u32, StateSelector);

/// The pins of a job. Pins of the same version share its memory.
pub(crate) struct Pins<B: Backend> {
    by_number: RwLock<HashMap<u64, Arc<Pin<B>>>>,
    /// What pins keep.
    kept: Mutex<HashMap<Key, Weak<Kept<B>>>>,
}

impl<B: Backend> Default for Pins<B> {
    fn default() -> Self {
        Self { by_number: RwLock::default(), kept: Mutex::default() }
    }
}

impl<B: Backend> Pins<B> {
    /// The pin with this number, unless it has ended.
    pub(super) fn get(&self, number: u64) -> Option<Arc<Pin<B>>> {
        self.by_number.read().expect("no holder of the lock panics").get(&number).cloned()
    }

    /// Keeps a part of a slice, which has this number of bytes, for a pin. Takes them from the
    /// budget unless another pin has the same part. Returns `None` if the budget has no room.
    pub(super) fn keep(
        &self,
        key: Key,
        array: Array<B>,
        (budget, bytes): (&Arc<Budget>, u64),
    ) -> Option<Arc<Kept<B>>> {
        let mut all = self.kept.lock().expect("no holder of the lock panics");
        if let Some(kept) = all.get(&key).and_then(Weak::upgrade) {
            return Some(kept);
        }
        let kept = Arc::new(Kept { array, _space: budget.take(bytes)? });
        all.insert(key, Arc::downgrade(&kept));
        Some(kept)
    }

    /// Adds a pin.
    pub(super) fn insert(&self, number: u64, pin: Pin<B>) {
        let pin = Arc::new(pin);
        self.by_number.write().expect("no holder of the lock panics").insert(number, pin);
    }

    /// Ends a pin.
    pub(super) fn remove(&self, number: u64) {
        drop(self.by_number.write().expect("no holder of the lock panics").remove(&number));
        let mut kept = self.kept.lock().expect("no holder of the lock panics");
        kept.retain(|_, of| of.strong_count() > 0);
    }
}
