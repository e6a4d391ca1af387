//! For any layout, order of arrival and absent ranks, each element has the bits of the definition.
//!
//! promise: exactly-once

use proptest::prelude::*;
use zeroshard_kernels::Cpu;
use zeroshard_model::{
    JobSpec, SliceSpec,
    geometry::{Contributors, blocks::BLOCK},
};

use super::*;
use crate::{
    instrumented::Instrumented,
    test_jobs::{elements, jobs},
};

/// The value that a rank sends for element `at` of the slice. The sum depends on the order.
fn value(rank: u32, at: usize) -> f32 {
    match (at + rank as usize) % 5 {
        0 => -0.0,
        k => (1.0 + at as f32) * 10f32.powi((rank as i32 * 5 + k as i32 + at as i32 % 7) % 9 - 4),
    }
}

/// A rank's part in a scenario.
struct Sender {
    rank: u32,
    /// The elements to which it contributes, by their positions in the slice.
    elements: Vec<usize>,
    /// The number of elements that it sends before it is absent.
    sent: usize,
}

/// The definition: element by element, in the order of the ranks, with zeros for absent ranks.
fn naive(index: u32, numel: usize, groups: &[Vec<Sender>]) -> Vec<f32> {
    let mut sum = vec![f32::NAN; numel];
    for group in groups {
        let first = index as usize % group.len();
        let order = || (0..group.len()).map(|i| &group[(first + i) % group.len()]);
        for (number, &at) in group[0].elements.iter().enumerate() {
            let values = order()
                .map(|sender| if number < sender.sent { value(sender.rank, at) } else { 0.0 });
            sum[at] = values.reduce(|a, b| a + b).unwrap();
        }
    }
    sum
}

/// A generator of pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    /// The chunks of `0..end`, in any order, with some repetitions.
    fn chunks(&mut self, end: usize) -> Vec<Range<usize>> {
        let mut cuts: Vec<usize> =
            (0..self.below(5)).map(|_| self.below(end + 1)).chain([0, end]).collect();
        cuts.sort_unstable();
        let mut chunks: Vec<_> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
        chunks.push(chunks[self.below(chunks.len())].clone());
        for i in 0..chunks.len() {
            let other = self.below(chunks.len());
            chunks.swap(i, other);
        }
        chunks
    }
}

/// Plays a scenario, and returns the final round and accumulator.
fn play(
    job: &JobSpec,
    index: u32,
    slice: &SliceSpec,
    groups: &[Vec<Sender>],
    dice: &mut Dice,
) -> (Round, Vec<u8>) {
    let (backend, budget) = (Instrumented::new(), Budget::new(u64::MAX));
    let mut round = Round::new(index, slice.numel, &job.contributions(0).of_slice(slice));
    // The buffer has other values, so that elements that are not cleared are detected.
    let mut sum = backend.allocate(DType::F32, slice.numel).unwrap();
    backend.store(&mut sum, 0..slice.numel, &[0xff].repeat(4 * slice.numel), DType::F32).unwrap();
    // The remaining actions of each rank: its chunks, and then its absence.
    type Rest<'a> = (&'a Sender, Vec<Range<usize>>, bool);
    let mut rest: Vec<Rest<'_>> = Vec::new();
    for sender in groups.iter().flatten() {
        rest.push((sender, dice.chunks(sender.sent), sender.sent < sender.elements.len()));
    }
    while !rest.is_empty() {
        let next = dice.below(rest.len());
        let (sender, chunks, absent) = &mut rest[next];
        let Sender { rank, elements, .. } = sender;
        if let Some(range) = chunks.pop() {
            let bytes =
                elements[range.clone()].iter().flat_map(|&at| value(*rank, at).to_le_bytes());
            let bytes = bytes.collect();
            let chunk = Chunk { rank: *rank, offset: range.start, dtype: DType::F32, bytes };
            round.contribute(&backend, &mut sum, &chunk, &budget).unwrap();
        } else if std::mem::take(absent) {
            assert!(round.absent(&backend, &mut sum, *rank).unwrap());
        } else {
            rest.swap_remove(next);
        }
    }
    assert_eq!(budget.used(), 0);
    (round, backend.read(&Arc::new(sum), 0..slice.numel, DType::F32).unwrap().to_vec())
}

fn check(job: &JobSpec, index: u32, slice: &SliceSpec, seed: u64) {
    let (dice, shape) = (&mut Dice(seed), &job.manifest.tensors()[0].shape);
    // All elements, some elements, or none.
    let kinds = 1 + dice.below(4);
    let mut groups: Vec<Vec<Sender>> = Vec::new();
    for Contributors { of, ranks, .. } in job.contributions(0).contributors {
        let elements = elements(shape, of.bounds(), slice);
        if elements.is_empty() {
            continue;
        }
        let senders = ranks.iter().map(|&rank| {
            let sent = match dice.below(kinds) {
                0 => elements.len(),
                1 => dice.below(elements.len() + 1),
                _ => 0,
            };
            Sender { rank, elements: elements.clone(), sent }
        });
        groups.push(senders.collect());
    }
    let (round, sum) = play(job, index, slice, &groups, dice);
    assert!(round.is_complete());
    assert_eq!(round.missing_rank(), None);
    let senders = || groups.iter().flatten();
    let everywhere = senders().all(|sender| sender.sent == 0);
    let absent = senders().filter(|sender| sender.sent < sender.elements.len());
    let lowest = absent.map(|sender| sender.rank).min();
    assert_eq!(round.absentees(&[]), lowest.map(|rank| Absent { rank, everywhere }));
    let mut expected = naive(index, slice.numel, &groups);
    if everywhere {
        assert!(sum.iter().all(|&byte| byte == 0xff), "it is not touched");
        expected.fill(0.0);
    } else {
        let bits: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(sum == bits, "the sums differ");
    }
    let squares = zeroshard_kernels::loops::sum::of_squares(
        zeroshard_kernels::loops::Level::best(),
        &expected,
    );
    assert_eq!(round.sum_of_squares().to_bits(), squares.to_bits());
}

/// A slice of a tensor of `numel` elements.
fn slice_of(numel: u64, cut: [prop::sample::Index; 2]) -> SliceSpec {
    let [a, b] = cut.map(|cut| cut.index(numel as usize + 1));
    let (start, end) = (a.min(b), a.max(b));
    if start == end {
        return SliceSpec { tensor: 0, offset: 0, numel: numel as usize };
    }
    SliceSpec { tensor: 0, offset: start, numel: end - start }
}

proptest! {
    #[test]
    fn any_layout_order_of_arrival_and_absence_give_the_bits_of_the_definition(
        job in prop::collection::vec(1u64..9, 0..4).prop_flat_map(jobs),
        index in 0u32..9,
        cut in any::<[prop::sample::Index; 2]>(),
        seed: u64,
    ) {
        let slice = slice_of(job.manifest.tensors()[0].numel(), cut);
        check(&job, index, &slice, seed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn blocks_are_summed_when_all_contributors_are_complete(
        job in prop_oneof![
            Just(vec![3, BLOCK as u64 - 7]),
            Just(vec![BLOCK as u64 + 3, 2]),
            Just(vec![5, 4, 8_000]),
        ].prop_flat_map(jobs),
        index in 0u32..9,
        cut in any::<[prop::sample::Index; 2]>(),
        seed: u64,
    ) {
        let slice = slice_of(job.manifest.tensors()[0].numel(), cut);
        check(&job, index, &slice, seed);
    }
}

#[test]
fn a_rank_that_does_not_contribute_is_not_absent() {
    let mesh = zeroshard_model::ProcessMesh::dense([2], ["tp"]).unwrap();
    let shard = [zeroshard_model::DimPlacement::Shard(0)];
    let job = crate::test_jobs::job(zeroshard_model::TensorSpec::new("w", [4]), mesh, &shard);
    let slice = SliceSpec { tensor: 0, offset: 0, numel: 2 };
    let mut round = Round::new(0, 2, &job.contributions(0).of_slice(&slice));
    let (backend, budget) = (Cpu::new(), Budget::new(0));
    let mut sum = backend.allocate(DType::F32, 2).unwrap();
    assert!(!round.absent(&backend, &mut sum, 1).unwrap());
    assert_eq!((round.absentees(&[]), round.missing_rank()), (None, Some(0)));
    let chunk = Chunk { rank: 0, offset: 0, dtype: DType::F32, bytes: vec![0; 8].into() };
    round.contribute(&backend, &mut sum, &chunk, &budget).unwrap();
    assert!(round.is_complete() && round.absentees(&[]).is_none());
}
