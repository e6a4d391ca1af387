//! Steps beside a checkpoint, with little room for second copies.
//!
//! promise: atomic-steps

use bytes::Bytes;
use zeroshard_model::Error;
use zeroshard_model::checkpoint::Part as SavedPart;

use super::{reserve_tests::Subject, tests::bytes, *};
use crate::{instrumented::Instrumented, state_selector::StateSelector};

/// The bytes of a second copy: two f32 elements and their AdamW state.
const COPY: u64 = 24;

/// A slice, and a server with a budget for second copies.
struct Saved {
    subject: Subject,
    budget: Arc<Budget>,
    holds: Arc<Holds>,
}

impl Saved {
    fn new(budget: u64) -> Self {
        let budget = Budget::new(budget);
        let holds = Holds::new(budget.clone(), 0);
        Self { subject: Subject::new(usize::MAX), budget, holds }
    }

    fn hold(&self) -> HeldSlice<Instrumented> {
        self.hold_for(&self.holds)
    }

    fn hold_for(&self, holds: &Arc<Holds>) -> HeldSlice<Instrumented> {
        self.subject.slice.hold("job", 0, (0, holds)).unwrap()
    }

    fn end(&self) -> Result<Option<Reduced>> {
        self.end_of(&self.holds)
    }

    fn end_of(&self, holds: &Arc<Holds>) -> Result<Option<Reduced>> {
        let ended = self.subject.slice.end_save(holds)?;
        Ok(ended.map(|(_, reduced)| reduced))
    }

    fn values(&self, held: &HeldSlice<Instrumented>) -> Bytes {
        held.part(SavedPart::Values).unwrap()
    }

    fn waits(&self) -> bool {
        !self.holds.waiting.borrow().is_empty()
    }
}

#[test]
fn a_step_without_room_waits_until_nothing_refers_to_the_saved_version() {
    let saved = Saved::new(COPY - 1);
    let held = saved.hold();
    let stored = saved.values(&held);
    assert_eq!(saved.subject.push().unwrap(), None);
    let reason = saved.holds.waiting.borrow()[&0].clone();
    assert!(matches!(reason, Error::OutOfMemory { bytes: COPY, .. }));
    let text = reason.to_string();
    assert!(text.contains("--snapshot-bytes") && text.contains("23 bytes"), "{text}");
    drop(held);
    assert!(saved.holds.released.borrow().is_empty(), "the bytes are being stored");
    drop(stored);
    assert!(saved.holds.released.borrow().contains(&0));
    assert!(saved.end().unwrap().is_some());
    saved.holds.forget(0);
    assert!(!saved.waits());
    saved.subject.step();
    assert_eq!(saved.subject.slice.version(), Some(1));
    assert_eq!(saved.budget.used(), 0);
}

#[test]
fn a_second_copy_counts_until_nothing_refers_to_the_saved_version() {
    let saved = Saved::new(COPY);
    let held = saved.hold();
    assert_eq!(saved.budget.used(), 0);
    assert!(saved.subject.push().unwrap().is_some());
    assert_eq!(saved.budget.used(), COPY);
    saved.subject.step();
    let stored = saved.values(&held);
    drop(held);
    assert_eq!(saved.budget.used(), COPY);
    assert_eq!(stored, bytes(&[1.0, 2.0]));
    drop(stored);
    assert_eq!(saved.budget.used(), 0);
    assert_eq!(saved.end(), Ok(None));
    assert!(!saved.waits());
}

#[test]
fn a_step_after_the_saved_version_tells_the_save_that_it_waits_for_memory() {
    let saved = Saved::new(COPY);
    let held = saved.hold();
    assert!(saved.subject.push().unwrap().is_some());
    saved.subject.step();
    let reader = saved.subject.read(StateSelector::Parameters).unwrap();
    saved.subject.backend.room.store(0, Ordering::Relaxed);
    assert_eq!(saved.subject.push(), Ok(None));
    assert!(saved.waits());
    drop((reader, held));
    assert!(saved.end().unwrap().is_some());
}

#[test]
fn a_skipped_step_returns_its_room() {
    let saved = Saved::new(COPY);
    let held = saved.hold();
    assert!(saved.subject.push().unwrap().is_some());
    saved.subject.skip();
    assert_eq!(saved.budget.used(), 0);
    assert_eq!(saved.values(&held), bytes(&[1.0, 2.0]));
}

#[test]
fn memory_that_was_reserved_is_released_if_the_slice_is_written_before_the_step() {
    let saved = Saved::new(COPY);
    let held = saved.hold();
    let before = saved.subject.backend.room.load(Ordering::Relaxed);
    assert!(saved.subject.push().unwrap().is_some());
    assert_eq!(before - saved.subject.backend.room.load(Ordering::Relaxed), 3);
    drop(held);
    assert_eq!(saved.end(), Ok(None));
    assert_eq!(saved.budget.used(), 0);
    // The step writes in place: a reader that comes now needs memory again.
    let reader = saved.subject.read(StateSelector::Parameters).unwrap();
    assert_eq!(before - saved.subject.backend.room.load(Ordering::Relaxed), 4);
    saved.subject.step();
    drop(reader);
}

#[test]
fn a_save_that_begins_without_room_after_the_report_learns_that_the_step_waits() {
    let saved = Saved::new(0);
    assert!(saved.subject.push().unwrap().is_some());
    let held = saved.hold();
    assert!(saved.waits());
    // A reader needs memory of its own, as without a save.
    let reader = saved.subject.read(StateSelector::Parameters).unwrap().unwrap();
    drop(held);
    assert_eq!(saved.end(), Ok(None));
    saved.subject.step();
    assert_eq!(reader.read(&saved.subject.backend, 0..2, DType::F32).unwrap(), bytes(&[1.0, 2.0]));
    assert_eq!(saved.budget.used(), 0);
}

#[test]
fn a_step_does_not_wait_for_bytes_of_a_save_that_is_given_up() {
    for is_reported in [false, true] {
        let saved = Saved::new(0);
        let reported = is_reported.then(|| saved.subject.push().unwrap());
        let held = saved.hold();
        let stored = saved.values(&held);
        if !is_reported {
            assert_eq!(saved.subject.push().unwrap(), None);
        }
        drop(held);
        let ended = saved.end().unwrap();
        assert!(reported.unwrap_or(ended).is_some());
        // The memory beside the bytes is reserved already.
        saved.subject.backend.room.store(0, Ordering::Relaxed);
        saved.subject.step();
        assert_eq!(stored, bytes(&[1.0, 2.0]));
    }
}

#[test]
fn the_end_of_an_earlier_save_leaves_the_next_one_holding_the_slice() {
    let saved = Saved::new(0);
    let first = saved.hold();
    let next = Holds::new(saved.budget.clone(), 0);
    let second = saved.hold_for(&next);
    drop(first);
    assert_eq!(saved.end(), Ok(None));
    assert_eq!(saved.subject.push(), Ok(None));
    assert!(next.waiting.borrow().contains_key(&0));
    drop(second);
    assert!(saved.end_of(&next).unwrap().is_some());
}

#[test]
fn a_step_does_not_wait_for_bytes_of_two_saves_that_are_given_up() {
    let saved = Saved::new(0);
    assert!(saved.subject.push().unwrap().is_some());
    let next = Holds::new(saved.budget.clone(), 0);
    let held = [saved.hold(), saved.hold_for(&next)];
    let stored = held.each_ref().map(|held| saved.values(held));
    drop(held);
    assert_eq!(saved.end_of(&next), Ok(None));
    assert_eq!(saved.end(), Ok(None));
    saved.subject.step();
    assert!(stored.iter().all(|stored| *stored == bytes(&[1.0, 2.0])));
}
