//! Slices of which arrays are on disk have the same bits as slices in memory.
//!
//! promise: same-bits

use std::sync::atomic::{AtomicU64, Ordering};

use zeroshard_kernels::Cpu;
use zeroshard_model::checkpoint::Part as SavedPart;
use zeroshard_model::{
    Elements, Manifest, RunningAverage, StateDType, StridedBox, TensorBox, TensorSpec, View,
};

use super::{
    tests::{PARAMETERS, bytes},
    *,
};
use crate::{
    state_selector::StateSelector,
    tier::{
        Places, Tier, Traffic,
        tests::{Fault, failing, tiers},
    },
};

/// Two whole pieces, and a part of one that ends within a page.
const NUMEL: usize = 2 * (1 << 18) + 1_077;
const BYTES: u64 = 4 * NUMEL as u64;
/// The bytes of an array, which ends with a page.
const PAGED: u64 = BYTES.next_multiple_of(4096);
const WORLD: u32 = 2;

struct Subject {
    backend: Arc<Cpu>,
    job: JobSpec,
    slice: Slice<Cpu>,
    traffic: Traffic,
}

/// The same job with 8-bit state.
fn int8(dtype: DType, numel: usize) -> JobSpec {
    JobSpec { state_dtype: StateDType::Int8, ..job(dtype, numel) }
}

fn job(dtype: DType, numel: usize) -> JobSpec {
    let tensor = TensorSpec { dtype, ..TensorSpec::new("w", [numel as u64]) };
    let groups = vec!["adamw".parse().unwrap()];
    JobSpec { world: WORLD, ..JobSpec::new("job", Manifest::new(vec![tensor]).unwrap(), groups) }
}

/// The same job with averages, of which one is on disk together with the state.
fn averaged(dtype: DType, numel: usize) -> JobSpec {
    let averages = ["slow", "fast"].map(|name| RunningAverage::exponential(name, 0.9));
    JobSpec { averages: averages.into(), ..job(dtype, numel) }
}

/// The arrays on disk: none, the state, the state and the sum, all.
fn cases() -> [Places; 4] {
    // Of averages, the values of the first one, and the rest of the second one.
    let state = [0, 1, 2, 5].map(Kind::State);
    let with = |kinds: &[Kind]| {
        kinds.iter().chain(&state).map(|&kind| (kind, Tier::Disk)).collect::<Places>()
    };
    [Places::default(), with(&[]), with(&[Kind::Sum]), with(&[Kind::Sum, Kind::Master])]
}

fn values(seed: u64, numel: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..numel).map(|_| random.f32() - 0.5).collect()
}

impl Subject {
    fn new(job: JobSpec, places: Places) -> Self {
        let backend = Arc::new(Cpu::new());
        let (tiers, traffic) = tiers(&backend, 1 << 30);
        Self::on(backend, job, (&tiers, places), traffic)
    }

    fn on(
        backend: Arc<Cpu>,
        job: JobSpec,
        (tiers, places): (&Arc<Tiers<Cpu>>, Places),
        traffic: Traffic,
    ) -> Self {
        let device = Device::new(backend.clone(), Some(tiers.clone()));
        let home = Home { device: &device, places, arena: None };
        let first = Attempt::first(1, 0);
        let slice = Slice::allocate(home, &job, 0, &job.contributions(0), first, Role::Primary);
        Self { slice: slice.unwrap(), backend, job, traffic }
    }

    fn numel(&self) -> usize {
        self.slice.spec.numel
    }

    fn attempt(&self) -> Attempt {
        Attempt::first(1, self.slice.version().unwrap_or(0))
    }

    /// Uploads in chunks of any size, and publishes.
    fn initialise(&self) -> Result<()> {
        self.upload()?;
        self.slice.publish(0).map(drop)
    }

    fn upload(&self) -> Result<()> {
        let initial = values(9, self.numel());
        for (number, part) in initial.chunks(100_003).enumerate() {
            let chunk = tests::chunk(0, number * 100_003, part);
            let attempt = Attempt::first(1, 0);
            self.slice.upload(attempt, PARAMETERS, &chunk, || Ok(()))?;
        }
        Ok(())
    }

    fn push(&self, rank: u32) -> Result<Option<Reduced>> {
        let step = self.attempt().step;
        let gradient = values(10 * step + u64::from(rank), self.numel());
        let mut reduced = None;
        for (number, part) in gradient.chunks(77_777).enumerate() {
            let chunk = tests::chunk(rank, number * 77_777, part);
            let budget = Budget::new(u64::MAX);
            let attempt = self.attempt();
            let pushed = self.slice.contribute(attempt, &chunk, &budget, || Ok(()))?;
            reduced = reduced.or(pushed.1);
        }
        Ok(reduced)
    }

    fn decide(&self) -> Result<()> {
        let groups = &self.job.groups;
        let apply = Apply { groups, coefficient: 0.5, unclipped: 1.0, gradient_factors: &[] };
        let next = Attempt::first(1, self.attempt().step + 1);
        let step = Step { apply: Some(apply), next, absent: &[] };
        self.slice.step(0, &step).map(drop)
    }

    fn step(&self) -> Result<Option<Reduced>> {
        self.push(1)?;
        let reduced = self.push(0)?;
        self.decide()?;
        Ok(reduced)
    }

    fn digest(&self) -> [u8; 32] {
        self.slice.digest("job", self.attempt().step).unwrap()
    }

    fn held(&self, part: StateSelector) -> Array<Cpu> {
        self.slice.read(part, "job", self.attempt().step).unwrap().unwrap()
    }

    fn all(&self, array: &Array<Cpu>) -> bytes::Bytes {
        array.read(&self.backend, 0..self.numel(), DType::F32).unwrap()
    }
}

#[test]
fn every_version_has_the_same_bits_wherever_its_arrays_are() {
    let of: [fn(DType, usize) -> JobSpec; 3] = [job, int8, averaged];
    let sizes = [(DType::F32, NUMEL), (DType::Bf16, NUMEL), (DType::F32, 5), (DType::F32, 1)];
    for (of, (dtype, numel)) in of.into_iter().flat_map(|of| sizes.map(|size| (of, size))) {
        let subjects = cases().map(|places| Subject::new(of(dtype, numel), places));
        let same = |of: &dyn Fn(&Subject) -> Vec<u8>| {
            let [expected, others @ ..] = subjects.each_ref().map(of);
            others.iter().for_each(|found| assert!(*found == expected, "{dtype} {numel}"));
        };
        subjects.iter().for_each(|subject| subject.initialise().unwrap());
        same(&|subject| subject.digest().to_vec());
        for _ in 0..3 {
            let reduced = subjects.each_ref().map(|subject| subject.step().unwrap().unwrap());
            assert!(reduced.iter().all(|other| *other == reduced[0]));
            same(&|subject| subject.digest().to_vec());
        }
        for part in [
            StateSelector::Parameters,
            StateSelector::Master,
            StateSelector::State(0),
            StateSelector::State(1),
        ] {
            same(&|subject| subject.all(&subject.held(part)).to_vec());
            let half = |subject: &Subject| {
                let held = subject.held(part);
                held.read(&subject.backend, numel / 3..numel, DType::F16).unwrap().to_vec()
            };
            same(&half);
        }
    }
}

#[test]
fn a_step_moves_the_bytes_of_the_formula() {
    for (places, arrays) in cases().into_iter().zip([0, 2, 2, 3]) {
        let subject = Subject::new(job(DType::F32, NUMEL), places);
        let sum = u64::from(places.tier(Kind::Sum) == Tier::Disk);
        subject.initialise().unwrap();
        subject.step().unwrap();
        let moved = || [&subject.traffic.read, &subject.traffic.written].map(|bytes| bytes.get());
        let before = moved();
        subject.step().unwrap();
        let moved = [0, 1].map(|direction| moved()[direction] - before[direction]);
        // A sum is written when it is complete, and read by the step.
        assert_eq!(moved, [(arrays + sum) * PAGED; 2], "{places:?}");
        // A reader reads what it needs.
        let before = subject.traffic.read.get();
        subject.all(&subject.held(StateSelector::Parameters));
        let read = if places.tier(Kind::Master) == Tier::Disk { PAGED } else { 0 };
        assert_eq!(subject.traffic.read.get() - before, read);
    }
}

#[test]
fn a_step_with_8_bit_state_on_disk_moves_a_quarter_of_its_bytes() {
    let subject = Subject::new(int8(DType::F32, NUMEL), cases()[1]);
    subject.initialise().unwrap();
    subject.step().unwrap();
    let moved = || [&subject.traffic.read, &subject.traffic.written].map(|bytes| bytes.get());
    let before = moved();
    subject.step().unwrap();
    // Two pieces of 2^18 elements with 2^11 exponents, and the rest, each in whole pages.
    let pages = [1 << 18, 1 << 18, 1_077].map(|of| StateDType::Int8.bytes(of).div_ceil(4_096));
    let expected = 2 * 4_096 * pages.iter().sum::<usize>() as u64;
    assert_eq!([0, 1].map(|direction| moved()[direction] - before[direction]), [expected; 2]);
}

#[test]
fn readers_and_checkpoints_keep_their_version_beside_steps() {
    let of: [fn(DType, usize) -> JobSpec; 3] = [job, int8, averaged];
    for (job, places) in of.into_iter().flat_map(|of| cases().map(|places| (of, places))) {
        let subject = Subject::new(job(DType::F32, NUMEL), places);
        subject.initialise().unwrap();
        subject.step().unwrap();
        let parts = [StateSelector::Parameters, StateSelector::State(0), StateSelector::State(1)];
        let held = parts.map(|part| subject.held(part));
        let before = held.each_ref().map(|array| subject.all(array));
        let holds = Holds::new(Budget::new(u64::MAX), 1);
        let saved = subject.slice.hold("job", 1, (0, &holds)).unwrap();
        subject.push(0).unwrap();
        subject.push(1).unwrap().unwrap();
        let sum = subject.held(StateSelector::GradientSum);
        let sum_before = subject.all(&sum);
        subject.decide().unwrap();
        subject.step().unwrap();
        assert!(held.iter().zip(&before).all(|(array, before)| subject.all(array) == *before));
        let part = |part| saved.part(part).unwrap();
        assert_eq!(part(SavedPart::Values), before[0]);
        assert_eq!(part(SavedPart::State(1)), before[2]);
        assert_eq!(subject.all(&sum), sum_before);
        let other = Subject::new(job(DType::F32, NUMEL), Places::default());
        other.initialise().unwrap();
        (0..3).for_each(|_| _ = other.step().unwrap());
        assert_eq!(subject.digest(), other.digest());
    }
}

#[test]
fn elements_of_a_box_are_read_like_those_in_memory() {
    let [memory, .., disk] = cases().map(|places| {
        let subject = Subject::new(int8(DType::F32, NUMEL), places);
        subject.initialise().unwrap();
        subject
    });
    let shape = [1_000, NUMEL as u64 / 1_000];
    let bounds = zeroshard_model::TensorBox { offset: vec![3, 100], size: vec![900, 77] };
    let bounds = Arc::new(zeroshard_model::StridedBox::new(&shape, bounds));
    let whole: Elements = bounds.elements(&SliceSpec { tensor: 0, offset: 0, numel: NUMEL });
    for range in [0..whole.numel(), 1_000..1_077, 500..50_000] {
        for part in [StateSelector::Parameters, StateSelector::State(1)] {
            let read = |subject: &Subject| {
                let elements = whole.select(range.clone());
                subject.held(part).read(&subject.backend, elements, DType::F32).unwrap()
            };
            assert!(read(&memory) == read(&disk), "{part:?}");
        }
    }
}

#[test]
fn slices_that_arrive_at_the_same_time_share_a_few_working_buffers() {
    let backend = Arc::new(Cpu::new());
    // Room for two arrays.
    let (tiers, traffic) = tiers(&backend, 2 * BYTES as usize);
    let all = cases()[3];
    let subjects: Vec<Subject> = (0..4)
        .map(|_| {
            Subject::on(backend.clone(), job(DType::F32, NUMEL), (&tiers, all), traffic.clone())
        })
        .collect();
    let expected = Subject::new(job(DType::F32, NUMEL), Places::default());
    let steps = |subjects: &[&Subject]| {
        subjects.iter().for_each(|subject| subject.upload().unwrap());
        subjects.iter().for_each(|subject| _ = subject.slice.publish(0).unwrap());
        for _ in 0..2 {
            for rank in [0, 1] {
                subjects.iter().for_each(|subject| _ = subject.push(rank).unwrap());
            }
            subjects.iter().for_each(|subject| subject.decide().unwrap());
        }
    };
    steps(&subjects.iter().collect::<Vec<_>>());
    steps(&[&expected]);
    assert!(subjects.iter().all(|subject| subject.digest() == expected.digest()));
}

#[test]
fn a_later_attempt_does_not_read_the_sum_of_an_earlier_one() {
    let [memory, .., disk] = cases().map(|places| {
        let subject = Subject::new(job(DType::F32, NUMEL), places);
        subject.initialise().unwrap();
        subject
    });
    for subject in [&memory, &disk] {
        let budget = Budget::new(u64::MAX);
        let chunk = tests::chunk(0, 0, &values(1, 1_000));
        let attempt = subject.attempt();
        let pushed = subject.slice.contribute(attempt, &chunk, &budget, || Ok(()));
        pushed.unwrap();
        let next = Attempt { number: 1, ..attempt };
        let gradient = bytes(&values(2, NUMEL));
        for rank in 0..WORLD {
            let chunk = Chunk { rank, offset: 0, dtype: DType::F32, bytes: gradient.clone() };
            subject.slice.contribute(next, &chunk, &budget, || Ok(())).unwrap();
        }
        subject.decide().unwrap();
    }
    assert_eq!(memory.digest(), disk.digest());
}

#[test]
fn a_failing_disk_is_an_error_that_names_slice_and_file_and_the_slice_is_not_read_again() {
    for fault in Fault::ALL {
        // Every operation of two steps fails once.
        for operation in 0.. {
            let (backend, left) = (Arc::new(Cpu::new()), Arc::new(AtomicU64::new(u64::MAX)));
            let (tiers, traffic) = failing(&backend, fault, &left, 1 << 30);
            let subject =
                Subject::on(backend, int8(DType::F32, 70_000), (&tiers, cases()[3]), traffic);
            left.store(operation, Ordering::Relaxed);
            let all = subject.initialise().and_then(|()| {
                subject.step()?;
                subject.step()
            });
            let Err(error) = all else {
                assert!(operation > 4, "{fault:?}");
                break;
            };
            assert!(matches!(error, Error::Storage { .. }), "{fault:?} {operation}: {error}");
            let text = error.to_string();
            assert!(
                text.contains("slice 0") && text.contains("scratch file in /scratch"),
                "{text}"
            );
            // What can still be read is a whole version.
            let version = subject.attempt().step;
            left.store(u64::MAX, Ordering::Relaxed);
            if subject.slice.version().is_some()
                && let Ok(digest) = subject.slice.digest("job", version)
            {
                let expected = Subject::new(int8(DType::F32, 70_000), Places::default());
                expected.initialise().unwrap();
                (0..version).for_each(|_| _ = expected.step().unwrap());
                assert_eq!(digest, expected.digest(), "{fault:?} {operation}");
            }
        }
    }
}

#[test]
fn steps_record_the_same_changes_wherever_the_arrays_are() {
    for (dtype, numel) in [(DType::F32, NUMEL), (DType::Bf16, NUMEL), (DType::F32, 5)] {
        let subjects = cases().map(|places| Subject::new(job(dtype, numel), places));
        let budget = Budget::new(u64::MAX);
        let bounds = TensorBox { offset: vec![numel as u64 / 3], size: vec![numel as u64 / 2] };
        let bounds = Arc::new(StridedBox::new(&[numel as u64], bounds));
        let views = [View::whole(DType::Bf16), View::new(DType::Bf16, Some(bounds))];
        for subject in &subjects {
            subject.initialise().unwrap();
            for view in &views {
                let unhashed = subject.slice.follow(view, &budget).unwrap().unwrap();
                unhashed.compute(&subject.backend).unwrap();
            }
        }
        for version in 1..4 {
            let [expected, others @ ..] = subjects.each_ref().map(|subject| {
                subject.step().unwrap();
                views.each_ref().map(|view| subject.slice.changes(view, version - 1, version))
            });
            let is_known = |since: &Since| matches!(since, Since::Known { .. });
            assert!(expected.iter().all(is_known), "{dtype} {numel} {version}");
            assert!(others.iter().all(|other| *other == expected), "{dtype} {numel} {version}");
        }
    }
}
