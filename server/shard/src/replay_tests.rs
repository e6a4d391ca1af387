//! A captured step has the same result at every instruction set, and every changed bit is noticed.
//!
//! promise: same-bits

use std::sync::Arc;

use bytes::Bytes;
use zeroshard_kernels::{Cpu, loops::Level};
use zeroshard_model::{
    DType, Manifest, Optimizer, RunningAverage, StateDType, TensorSpec, geometry::blocks::BLOCK,
};

use super::*;

/// More than a block.
const NUMEL: usize = BLOCK + 77;
const WORLD: u32 = 3;
/// The steps before the captured one.
const STEPS: u64 = 3;

fn spec(optimizer: &str, dtype: DType, state_dtype: StateDType) -> JobSpec {
    let tensor = TensorSpec { dtype, ..TensorSpec::new("w", [NUMEL as u64]) };
    let manifest = Manifest::new(vec![tensor]).unwrap();
    let groups = vec![optimizer.parse().unwrap()];
    let averages = vec![RunningAverage::exponential("slow", 0.9)].into();
    JobSpec { world: WORLD, state_dtype, averages, ..JobSpec::new("job", manifest, groups) }
}

/// The values of a rank at a step, in the dtype in which it sends them.
fn values(rank: u32, step: u64) -> Chunk {
    let mut random = fastrand::Rng::with_seed(u64::from(rank) << 32 | step);
    let mut number = || random.f32() - 0.5;
    let (dtype, bytes) = match rank {
        1 => (
            DType::Bf16,
            (0..NUMEL).flat_map(|_| half::bf16::from_f32(number()).to_le_bytes()).collect(),
        ),
        _ => (DType::F32, (0..NUMEL).flat_map(|_| number().to_le_bytes()).collect::<Bytes>()),
    };
    Chunk { rank, offset: 0, dtype, bytes }
}

/// A slice that has made [`STEPS`] steps.
struct Trained {
    spec: JobSpec,
    slice: Slice<Cpu>,
    budget: Arc<Budget>,
}

impl Trained {
    fn new(spec: JobSpec) -> Self {
        let device = Device::new(Arc::new(Cpu::new()), None);
        let home = Home { device: &device, places: Places::default(), arena: None };
        let (contributions, attempt) = (spec.contributions(0), Attempt::first(1, 0));
        let role = Role::Primary;
        let slice = Slice::allocate(home, &spec, 0, &contributions, attempt, role).unwrap();
        slice.restore(Part::Values, 0, &values(0, 99).bytes).unwrap();
        slice.publish(0).unwrap();
        let trained = Self { spec, slice, budget: Budget::new(1 << 30) };
        (0..STEPS).for_each(|step| {
            trained.push(Attempt::first(1, step), NUMEL);
            trained.step(step, true);
        });
        trained
    }

    /// Pushes the gradients of an attempt: in parts, in another order than that of the ranks, and
    /// each part twice. Rank 0 has only `sent` elements.
    fn push(&self, attempt: Attempt, sent: usize) {
        let parked = Budget::new(1 << 30);
        for rank in (0..WORLD).rev() {
            let (all, sent) = (values(rank, attempt.step), if rank == 0 { sent } else { NUMEL });
            for start in (0..2 * sent).step_by(10_000).map(|start| start % sent) {
                let part = all.select(start..sent.min(start + 10_000));
                self.slice.contribute(attempt, &part, &parked, || Ok(())).unwrap();
            }
        }
        self.slice.absent(attempt, 0, || Ok(())).unwrap();
    }

    fn apply(&self) -> Apply<'_> {
        let groups = &self.spec.groups;
        Apply { groups, coefficient: 0.37, unclipped: 1.0, gradient_factors: &[] }
    }

    fn step(&self, step: u64, applies: bool) -> [u8; 32] {
        let (apply, next) = (applies.then(|| self.apply()), Attempt::first(1, step + 1));
        self.slice.step(0, &Step { apply, next, absent: &[] }).unwrap();
        self.slice.digest("job", next.step).unwrap()
    }

    /// Captures step [`STEPS`]. Returns it with the hash of the slice after it.
    fn captured(&self, applies: bool) -> (CapturedSlice, [u8; 32]) {
        self.slice.begin_capture(&self.budget);
        let attempt = Attempt { number: 1, ..Attempt::first(1, STEPS) };
        self.push(attempt, NUMEL / 2);
        let captured = self.slice.capture("job", STEPS, &self.budget).unwrap();
        (captured, self.step(STEPS, applies))
    }

    fn replay(&self, level: Level, captured: &CapturedSlice, applies: bool) -> Replayed {
        let device = Device::new(Arc::new(Cpu::at(level)), None);
        let apply = applies.then(|| self.apply());
        let replay = Replay { spec: &self.spec, step: STEPS, apply };
        replay.run(&device, 0, captured).unwrap()
    }
}

fn hashes(figures: &[Contributed]) -> Vec<(u32, u64)> {
    figures.iter().map(|one| (one.rank, one.tally.hash)).collect()
}

fn assert_equal(captured: &CapturedSlice, after: [u8; 32], replayed: &Replayed, what: &str) {
    assert_eq!(replayed.before, captured.before, "{what}");
    assert_eq!(hashes(&replayed.figures), hashes(&captured.figures), "{what}");
    assert_eq!(replayed.sum_of_squares.to_bits(), captured.sum_of_squares.to_bits(), "{what}");
    assert_eq!(replayed.after, after, "{what}");
}

#[test]
fn a_step_of_every_optimizer_has_the_same_hash_at_every_level() {
    let dtypes = [DType::F32, DType::Bf16, DType::F16];
    for (name, dtype) in Optimizer::NAMES.iter().zip(dtypes.into_iter().cycle()) {
        let trained = Trained::new(spec(name, dtype, StateDType::F32));
        let (captured, after) = trained.captured(true);
        for level in Level::all() {
            let replayed = trained.replay(level, &captured, true);
            assert_equal(&captured, after, &replayed, &format!("{name} at {level:?}"));
            assert_ne!(replayed.before, replayed.after, "{name}");
        }
    }
}

#[test]
fn a_step_with_8_bit_state_has_the_same_hash_at_every_level() {
    for name in ["adamw", "sgd", "lion"] {
        let trained = Trained::new(spec(name, DType::Bf16, StateDType::Int8));
        let (captured, after) = trained.captured(true);
        for level in Level::all() {
            let replayed = trained.replay(level, &captured, true);
            assert_equal(&captured, after, &replayed, &format!("{name} at {level:?}"));
        }
    }
}

#[test]
fn a_skipped_step_is_replayed_as_well() {
    let trained = Trained::new(spec("adamw", DType::F32, StateDType::F32));
    let (captured, after) = trained.captured(false);
    assert_equal(&captured, after, &trained.replay(Level::best(), &captured, false), "skipped");
    assert_ne!(trained.replay(Level::best(), &captured, true).after, after);
}

/// Flips the lowest bit of a byte.
fn flip(bytes: &mut Bytes, at: usize) {
    let mut changed = bytes.to_vec();
    changed[at] ^= 1;
    *bytes = changed.into();
}

#[test]
fn a_flipped_bit_changes_the_hash_and_that_of_its_rank_alone() {
    let trained = Trained::new(spec("adamw", DType::F32, StateDType::F32));
    let (mut captured, after) = trained.captured(true);
    for number in [0, 5, captured.chunks.len() - 1] {
        let rank = captured.chunks[number].rank;
        // The second byte of a number, because the lowest bit may be lost in the addition.
        flip(&mut captured.chunks[number].bytes, 1);
        let replayed = trained.replay(Level::best(), &captured, true);
        assert_ne!(replayed.after, after);
        let pairs = hashes(&replayed.figures).into_iter().zip(hashes(&captured.figures));
        let differing: Vec<u32> =
            pairs.filter(|(one, other)| one != other).map(|((rank, _), _)| rank).collect();
        assert_eq!(differing, [rank]);
        flip(&mut captured.chunks[number].bytes, 1);
    }
    for position in 0..captured.state.len() {
        flip(&mut captured.state[position], 4 * NUMEL - 1);
        let replayed = trained.replay(Level::best(), &captured, true);
        assert_ne!(replayed.before, captured.before);
        assert_ne!(replayed.after, after);
        flip(&mut captured.state[position], 4 * NUMEL - 1);
    }
    assert_equal(&captured, after, &trained.replay(Level::best(), &captured, true), "restored");
}

#[test]
fn an_incomplete_or_malformed_capture_is_refused() {
    type Change<'a> = &'a dyn Fn(&mut CapturedSlice);
    let trained = Trained::new(spec("sgd", DType::F32, StateDType::F32));
    let (captured, _) = trained.captured(true);
    let replay = Replay { spec: &trained.spec, step: STEPS, apply: Some(trained.apply()) };
    let device = Device::new(Arc::new(Cpu::new()), None);
    let refusal = |index, change: Change<'_>| {
        let (state, chunks) = (captured.state.clone(), captured.chunks.clone());
        let (absent, figures) = (captured.absent.clone(), captured.figures.clone());
        let mut changed = CapturedSlice { state, chunks, absent, figures, ..Default::default() };
        change(&mut changed);
        replay.run(&device, index, &changed).unwrap_err().to_string()
    };
    let cases: [(Change<'_>, &str); 6] = [
        (&|slice| drop(slice.chunks.remove(0)), "lacks elements of rank 2"),
        (&|slice| slice.absent.clear(), "lacks elements of rank 0"),
        (&|slice| slice.chunks[0].rank = 7, "rank 7"),
        (&|slice| slice.chunks[0].offset = usize::MAX, "of 65613 elements"),
        (&|slice| drop(slice.chunks[0].bytes.split_off(7)), "has 7 bytes"),
        (&|slice| drop(slice.state.pop()), "state of slice 0 is not that of tensor \"w\""),
    ];
    for (change, expected) in cases {
        let text = refusal(0, change);
        assert!(text.contains(expected), "{text}");
    }
    assert!(refusal(1, &|_| ()).contains("slice is 1"));
}

#[test]
fn a_capture_keeps_nothing_before_it_begins_and_after_it_ends() {
    let trained = Trained::new(spec("adamw", DType::F32, StateDType::F32));
    trained.push(Attempt::first(1, STEPS), NUMEL);
    assert_eq!(trained.budget.used(), 0);
    // It begins too late for this attempt.
    trained.slice.begin_capture(&trained.budget);
    let late = trained.slice.capture("job", STEPS, &trained.budget).unwrap_err();
    assert!(matches!(late, Error::Refused { .. }), "{late}");
    let (captured, _) = trained.captured(true);
    assert!(trained.budget.used() > 4 * 4 * NUMEL as u64);
    drop(captured);
    trained.push(Attempt::first(1, STEPS + 1), NUMEL);
    assert_eq!(trained.budget.used(), 0);
    trained.step(STEPS + 1, true);
}

#[test]
fn a_step_with_new_values_beside_gradients_is_refused() {
    let trained = Trained::new(spec("adamw", DType::F32, StateDType::F32));
    trained.slice.begin_capture(&trained.budget);
    let attempt = Attempt { number: 1, ..Attempt::first(1, STEPS) };
    trained.push(attempt, NUMEL);
    trained.slice.replace(attempt, &values(0, 98), || Ok(())).unwrap();
    let refused = trained.slice.capture("job", STEPS, &trained.budget).unwrap_err();
    assert!(refused.to_string().contains("new values"), "{refused}");
}

#[test]
fn a_capture_without_room_is_refused_and_the_step_is_the_same() {
    let new = || Trained::new(spec("adamw", DType::F32, StateDType::F32));
    let (_, after) = new().captured(true);
    // There is room for no contribution, for some of them, and for all of them but not for the
    // state.
    for limit in [0, 4 * NUMEL as u64, 3 * 4 * NUMEL as u64] {
        let trained = Trained { budget: Budget::new(limit), ..new() };
        trained.slice.begin_capture(&trained.budget);
        trained.push(Attempt { number: 1, ..Attempt::first(1, STEPS) }, NUMEL / 2);
        let full = trained.slice.capture("job", STEPS, &trained.budget).unwrap_err();
        assert!(matches!(full, Error::OutOfMemory { .. }), "{full}");
        trained.slice.end_capture();
        assert_eq!(trained.budget.used(), 0);
        assert_eq!(trained.step(STEPS, true), after);
    }
}
