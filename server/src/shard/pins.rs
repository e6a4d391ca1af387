//! The versions of a job that readers have pinned.

use std::{
    collections::HashMap,
    sync::{Arc, RwLock},
};

use zeroshard_kernels::Backend;
use zeroshard_shard::{budget::Space, slice::Slice, state_selector::StateSelector, tier::Array};

/// A version of slices that steps do not overwrite.
pub(crate) struct Pin<B: Backend> {
    pub(super) version: u64,
    /// Parts of each slice, and their part of the budget for pinned versions.
    pub(super) slices: HashMap<(u32, StateSelector), (Array<B>, Space)>,
    /// Whether the optimizer state and all averages are pinned as well.
    pub(super) state: bool,
    /// The state tensors of the averages that are pinned, by name.
    pub(super) averages: Vec<String>,
}

impl<B: Backend> Pin<B> {
    /// A part of a slice, if it is pinned.
    pub(super) fn slice(&self, index: u32, part: StateSelector) -> Option<&Array<B>> {
        self.slices.get(&(index, part)).map(|(buffer, _)| buffer)
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

/// The pins of a job, by number.
pub(crate) struct Pins<B: Backend>(RwLock<HashMap<u64, Arc<Pin<B>>>>);

impl<B: Backend> Default for Pins<B> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<B: Backend> Pins<B> {
    /// The pin with this number, unless it has ended.
    pub(super) fn get(&self, number: u64) -> Option<Arc<Pin<B>>> {
        self.0.read().expect("no holder of the lock panics").get(&number).cloned()
    }

    /// Adds a pin.
    pub(super) fn insert(&self, number: u64, pin: Pin<B>) {
        let pin = Arc::new(pin);
        self.0.write().expect("no holder of the lock panics").insert(number, pin);
    }

    /// Ends a pin.
    pub(super) fn remove(&self, number: u64) {
        self.0.write().expect("no holder of the lock panics").remove(&number);
    }
}
