//! Checks the changes between any two versions of a slice, and their hashes.

use zeroshard_changes::{
    apply::{Place, apply},
    hash, merge,
};
use zeroshard_model::{Manifest, StateDType, StridedBox, TensorBox, TensorSpec, View};
use zeroshard_shm::Arena;

use super::{
    tests::{PARAMETERS, Subject, chunk},
    *,
};
use crate::state_selector::StateSelector;

/// Large enough for an arena, and larger than a block of a change.
const SHAPE: [u64; 2] = [150, 128];
const NUMEL: usize = 150 * 128;

/// Optimizers with a loop of their own, with several passes, and with 8-bit state.
const OPTIMIZERS: [(&str, StateDType); 6] = [
    ("adamw", StateDType::F32),
    ("adamw", StateDType::Int8),
    ("sgd", StateDType::F32),
    ("lamb", StateDType::F32),
    ("adafactor", StateDType::F32),
    ("lion", StateDType::Int8),
];

fn numbers(random: &mut fastrand::Rng, scale: f32) -> Vec<f32> {
    (0..NUMEL).map(|_| scale * (random.f32() - 0.5)).collect()
}

fn subject(tensor: TensorSpec, optimizer: &str, state_dtype: StateDType) -> Subject {
    let arena = Arena::create("test", 6 * NUMEL * size_of::<f32>()).unwrap();
    let manifest = Manifest::new(vec![tensor]).unwrap();
    let groups = vec![optimizer.parse().unwrap()];
    let job = JobSpec { state_dtype, ..JobSpec::new("job", manifest, groups) };
    Subject::in_arena(job, Some(&arena))
}

/// A followed slice, and the values of each version as the readers in each view get them.
struct Followed {
    subject: Subject,
    views: Vec<(View, Vec<bytes::Bytes>)>,
    /// The number of pairs of versions with an unknown change, and with a known one.
    counts: [usize; 2],
}

impl Followed {
    /// Whole tensors in each dtype.
    fn new(subject: Subject, budget: &Arc<Budget>) -> Self {
        Self::in_views(subject, DType::ALL.map(View::whole), budget)
    }

    fn in_views(
        subject: Subject,
        views: impl IntoIterator<Item = View>,
        budget: &Arc<Budget>,
    ) -> Self {
        let views = views.into_iter().map(|view| (view, Vec::new())).collect();
        let followed = Self { subject, views, counts: [0; 2] };
        followed.follow(budget);
        followed
    }

    fn follow(&self, budget: &Arc<Budget>) {
        for (view, _) in &self.views {
            if let Some(unhashed) = self.subject.slice.follow(view, budget).unwrap() {
                let pending = self.subject.slice.changes(view, 0, 0);
                assert!(matches!(pending, Since::Pending | Since::Unknown), "{pending:?}");
                unhashed.compute(self.subject.slice.backend()).unwrap();
            }
        }
    }

    /// Stores the values of the version, and checks the changes that lead to it.
    fn check(&mut self, version: u64) {
        let slice = &self.subject.slice;
        let array = self.subject.held(StateSelector::Parameters, version);
        for (view, versions) in &mut self.views {
            let (dtype, positions) = (view.dtype(), view.positions(&slice.spec));
            let (first, numel) = (positions.start as u64, positions.len());
            let to = array.read(slice.backend(), 0..slice.spec.numel, dtype).unwrap();
            let elements = view.elements(&slice.spec);
            let bytes = |at: usize| at * dtype.size()..(at + 1) * dtype.size();
            let to: Vec<u8> =
                elements.runs().flatten().flat_map(|at| to[bytes(at)].to_vec()).collect();
            versions.push(to.clone().into());
            for (before, from) in (0..).zip(versions.iter()) {
                let Since::Known { changes, hash } = slice.changes(view, before, version) else {
                    self.counts[0] += 1;
                    continue;
                };
                self.counts[1] += 1;
                let what = format!("{view:?}: version {before} to {version}");
                assert_eq!(hash, hash::of(dtype, first, &to), "{what}");
                let parts: Vec<&[u8]> = changes.iter().map(|change| &change[..]).collect();
                assert_eq!(parts.len() as u64, version - before, "{what}");
                let mut values = from.to_vec();
                let place = Place { dtype, first };
                apply(place, &mut values, &merge(dtype, numel, &parts).unwrap()).unwrap();
                assert!(values == to, "{what}");
            }
            let ahead = slice.changes(view, version, version + 1);
            assert_eq!(ahead, Since::Unknown, "{view:?}: the next version");
        }
    }
}

#[test]
fn the_history_has_the_changes_of_all_steps_of_all_optimizers() {
    let budget = Budget::new(u64::MAX);
    let mut random = fastrand::Rng::with_seed(3);
    for ((optimizer, state), dtype) in
        OPTIMIZERS.into_iter().flat_map(|optimizer| DType::ALL.map(|dtype| (optimizer, dtype)))
    {
        let tensor = TensorSpec { dtype, ..TensorSpec::new("w", SHAPE) };
        let subject = subject(tensor, optimizer, state);
        assert!(subject.slice.follow(&View::whole(dtype), &budget).unwrap().is_none());
        subject.upload_chunk(PARAMETERS, &chunk(0, 0, &numbers(&mut random, 1.0))).unwrap();
        let mut followed = Followed::new(subject, &budget);
        followed.check(0);
        let mut held = None;
        for version in 0..8 {
            let subject = &followed.subject;
            match version {
                3 => subject.skip(version),
                4 => {
                    subject.absent(0);
                    subject.step(version, 1.0, 1.0);
                }
                5 => {
                    // An optimizer on the ranks.
                    subject.replace_chunk(&chunk(0, 0, &numbers(&mut random, 1.0)));
                    subject.absent(0);
                    subject.step(version, 1.0, 1.0);
                }
                6 => {
                    // A script has written values before the step.
                    subject.replace_chunk(&chunk(0, 0, &numbers(&mut random, 1.0)));
                    subject.push(0, &numbers(&mut random, 1.0));
                    subject.step(version, 0.5, 0.5);
                }
                _ => {
                    subject.push(0, &numbers(&mut random, 1.0));
                    subject.step(version, 0.5, 0.5);
                }
            }
            // A reader holds every other version, so steps rotate or write to other memory.
            held = held.xor(Some(subject.held(StateSelector::Parameters, version + 1)));
            followed.check(version + 1);
        }
        // There are 45 pairs in each of three dtypes. If every step changes a whole f32 slice, the
        // history has no room for more than a few steps.
        assert!(followed.counts[1] >= 3 * 9, "{optimizer} {dtype}: {:?}", followed.counts);
    }
}

#[test]
fn a_full_budget_drops_the_oldest_changes_and_keeps_the_hash() {
    let mut random = fastrand::Rng::with_seed(5);
    for bytes in [0, 3_000, 60_000, 200_000] {
        let budget = Budget::new(bytes);
        let subject = subject(TensorSpec::new("w", SHAPE), "sgd", StateDType::F32);
        subject.upload_chunk(PARAMETERS, &chunk(0, 0, &numbers(&mut random, 1.0))).unwrap();
        let mut followed = Followed::new(subject, &budget);
        followed.check(0);
        for version in 0..10 {
            // Ever smaller steps make ever smaller changes.
            followed.subject.push(0, &numbers(&mut random, 1.0));
            followed.subject.step(version, 0.1f64.powi(version as i32), 1.0);
            followed.check(version + 1);
            assert!(budget.used() <= bytes);
        }
        // The history knows the hash of the last version even without a change.
        for dtype in DType::ALL {
            let last = followed.subject.slice.changes(&View::whole(dtype), 10, 10);
            assert!(matches!(last, Since::Known { .. }), "{bytes}: {last:?}");
        }
        drop(followed);
        assert_eq!(budget.used(), 0);
    }
}

#[test]
fn nobody_who_follows_leaves_no_history() {
    let (budget, mut random) = (Budget::new(u64::MAX), fastrand::Rng::with_seed(6));
    let subject = subject(TensorSpec::new("w", SHAPE), "sgd", StateDType::F32);
    subject.upload_chunk(PARAMETERS, &chunk(0, 0, &numbers(&mut random, 1.0))).unwrap();
    let followed = Followed::new(subject, &budget);
    followed.subject.push(0, &numbers(&mut random, 1.0));
    followed.subject.step(0, 1.0, 1.0);
    assert!(budget.used() > 0);
    let slice = &followed.subject.slice;
    let [view, ..] = DType::ALL.map(View::whole);
    DType::ALL.map(View::whole).iter().for_each(|view| slice.unfollow(view));
    assert_eq!((budget.used(), slice.changes(&view, 0, 1)), (0, Since::Unknown));
    // New content under the same version number ends the history.
    followed.follow(&budget);
    slice.publish(1).unwrap();
    assert_eq!(slice.changes(&view, 1, 1), Since::Unknown);
}

/// Shapes of one to four dimensions with [`NUMEL`] elements.
const SHAPES: [&[u64]; 6] =
    [&[NUMEL as u64], &[150, 128], &[128, 150], &[6_400, 3], &[40, 3, 160], &[5, 16, 12, 20]];

/// A part of each dimension, or one index of it, or all of it.
fn any_box(random: &mut fastrand::Rng, shape: &[u64]) -> TensorBox {
    let part = |&all: &u64| {
        let size = match random.u32(..4) {
            0 => 1,
            1 => all,
            _ => random.u64(1..=all),
        };
        (random.u64(..=all - size), size)
    };
    let (offset, size) = shape.iter().map(part).unzip();
    TensorBox { offset, size }
}

#[test]
fn the_history_of_a_box_has_the_changes_of_its_elements() {
    let budget = Budget::new(u64::MAX);
    let mut random = fastrand::Rng::with_seed(7);
    let mut runs_of_one = 0;
    for (number, shape) in SHAPES.into_iter().cycle().take(24).enumerate() {
        let dtype = DType::ALL[number % DType::ALL.len()];
        let (optimizer, state) = OPTIMIZERS[number % OPTIMIZERS.len()];
        let tensor = TensorSpec { dtype, ..TensorSpec::new("w", shape) };
        let subject = subject(tensor, optimizer, state);
        subject.upload_chunk(PARAMETERS, &chunk(0, 0, &numbers(&mut random, 1.0))).unwrap();
        let mut views = DType::ALL.map(View::whole).to_vec();
        for dtype in DType::ALL.into_iter().cycle().take(12) {
            let of = Arc::new(StridedBox::new(shape, any_box(&mut random, shape)));
            let view = View::new(dtype, Some(of));
            let elements = view.elements(&subject.slice.spec);
            let is_one = elements.numel() > 1 && elements.runs().all(|run| run.len() == 1);
            runs_of_one += u32::from(is_one);
            views.push(view);
        }
        let mut followed = Followed::in_views(subject, views, &budget);
        followed.check(0);
        for version in 0..5 {
            let subject = &followed.subject;
            match version {
                2 => subject.skip(version),
                3 => {
                    // An optimizer on the ranks.
                    subject.replace_chunk(&chunk(0, 0, &numbers(&mut random, 1.0)));
                    subject.absent(0);
                    subject.step(version, 1.0, 1.0);
                }
                _ => {
                    subject.push(0, &numbers(&mut random, 1.0));
                    subject.step(version, 0.5, 0.5);
                }
            }
            followed.check(version + 1);
        }
        let [unknown, known] = followed.counts;
        assert!(known > 2 * unknown, "{shape:?}: {unknown} of {known} changes are unknown");
    }
    assert!(runs_of_one > 0, "no box has runs of one element");
}
