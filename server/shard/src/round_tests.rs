//! The order of arrival, the chunks and repetitions do not change a bit of the sum.
//!
//! promise: exactly-once

use proptest::prelude::*;
use zeroshard_kernels::Cpu;
use zeroshard_model::Error;

use super::{
    turns::{MAX_RANGES, PARKED_OVERHEAD},
    *,
};
use crate::test_jobs::whole;

const NUMEL: usize = 40;

/// Values whose sum depends on the order of addition.
fn gradient(rank: u32) -> Vec<f32> {
    (0..NUMEL)
        .map(|i| (1.0 + i as f32) * 10f32.powi((rank as i32 * 5 + i as i32) % 9 - 4) * 1.000_1)
        .collect()
}

fn chunk(rank: u32, range: Range<usize>) -> Chunk {
    let bytes = gradient(rank)[range.clone()].iter().flat_map(|v| v.to_le_bytes()).collect();
    Chunk { rank, offset: range.start, dtype: DType::F32, bytes }
}

fn sum_of(slice: u32, world: u32, chunks: &[Chunk], limit: u64) -> (Round, Result<Vec<u8>>) {
    let backend = Cpu::new();
    let budget = Budget::new(limit);
    let mut round = Round::new(slice, NUMEL, &whole(NUMEL, world));
    let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
    for chunk in chunks {
        if let Err(error) = round.contribute(&backend, &mut sum, chunk, &budget) {
            return (round, Err(error));
        }
    }
    let bytes = backend.read(&Arc::new(sum), 0..NUMEL, DType::F32).unwrap().to_vec();
    (round, Ok(bytes))
}

/// The definition: cyclic rank order from `slice mod world`.
fn expected(slice: u32, world: u32) -> Vec<u8> {
    let ranks = (0..world).map(|i| (slice + i) % world);
    let sum = ranks.map(gradient).reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
    sum.unwrap().iter().flat_map(|v| v.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn arrival_order_chunks_and_repetitions_do_not_change_a_bit(
        world in 1u32..6,
        slice in 0u32..9,
        cuts in prop::collection::vec((0u32..6, 0..NUMEL, 0..NUMEL), 0..40),
        order in any::<prop::sample::Index>(),
    ) {
        let mut chunks: Vec<_> = cuts
            .into_iter()
            .map(|(rank, a, b)| chunk(rank % world, a.min(b)..a.max(b)))
            .collect();
        // All elements, in some order, so that the sum becomes complete.
        let first = order.index(world as usize) as u32;
        chunks.extend((0..world).map(|i| chunk((first + i * (world - 1)) % world, 0..NUMEL)));
        chunks.extend((0..world).map(|rank| chunk(rank, 0..NUMEL)));
        let (round, sum) = sum_of(slice, world, &chunks, u64::MAX);
        prop_assert!(round.is_complete());
        prop_assert_eq!(sum.unwrap(), expected(slice, world));
    }
}

#[test]
fn two_workers_never_park() {
    let chunks = [chunk(1, 0..NUMEL), chunk(0, 0..NUMEL)];
    for slice in [0, 1] {
        let (round, sum) = sum_of(slice, 2, &chunks, 0);
        assert!(round.is_complete());
        assert_eq!(sum.unwrap(), expected(slice, 2));
    }
}

#[test]
fn the_next_rank_in_order_is_accepted_when_the_budget_is_exhausted() {
    let early = chunk(2, 0..NUMEL);
    let refused = |before: &[Chunk]| {
        let chunks = [before, std::slice::from_ref(&early)].concat();
        match sum_of(0, 3, &chunks, 100).1 {
            Err(Error::ParkingFull { slice: 0, rank: 2, offset, waiting_for, budget: 100 }) => {
                (offset, waiting_for)
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&[]), (0, 0));
    assert_eq!(refused(&[chunk(0, 0..NUMEL)]), (0, 1));
    // Elements whose turn it is are accepted, up to the first one that must wait for another rank.
    assert_eq!(refused(&[chunk(0, 0..20), chunk(1, 0..10)]), (10, 1));
    assert_eq!(refused(&[chunk(0, 0..20), chunk(1, 0..NUMEL)]), (20, 0));

    let in_order = [chunk(0, 0..NUMEL), chunk(1, 0..NUMEL), early];
    let (round, sum) = sum_of(0, 3, &in_order, 0);
    assert!(round.is_complete());
    assert_eq!(sum.unwrap(), expected(0, 3));
}

#[test]
fn parked_bytes_are_returned_when_the_whole_chunk_has_been_added() {
    let backend = Cpu::new();
    let budget = Budget::new(1000);
    let mut round = Round::new(0, NUMEL, &whole(NUMEL, 3));
    let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
    let mut contribute = |chunk| round.contribute(&backend, &mut sum, &chunk, &budget).unwrap();
    assert_eq!(contribute(chunk(2, 0..NUMEL)), NUMEL as u64);
    let pinned = 4 * NUMEL as u64 + PARKED_OVERHEAD;
    assert_eq!(budget.used(), pinned);
    assert_eq!(contribute(chunk(2, 3..9)), 0);
    contribute(chunk(1, 0..NUMEL));
    contribute(chunk(0, 0..10));
    assert_eq!(budget.used(), pinned, "it is one allocation");
    contribute(chunk(0, 10..NUMEL));
    assert_eq!(budget.used(), 0);
    assert!(round.is_complete());
    assert_eq!(round.missing_rank(), None);
}

#[test]
fn a_parked_chunk_keeps_no_network_buffer_and_counts_with_its_overhead() {
    let backend = Cpu::new();
    let budget = Budget::new(10_000);
    let mut round = Round::new(0, NUMEL, &whole(NUMEL, 3));
    let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
    let network = Bytes::from(vec![0; 1 << 20]);
    for offset in 0..10 {
        let chunk =
            Chunk { offset, bytes: network.slice(4 * offset..4 * offset + 4), ..chunk(2, 0..0) };
        assert_eq!(round.contribute(&backend, &mut sum, &chunk, &budget).unwrap(), 1);
    }
    assert!(network.is_unique(), "nothing of it is kept");
    assert_eq!(budget.used(), 10 * (4 + PARKED_OVERHEAD));
}

/// Different NaNs, and values whose sum is a NaN.
const SPECIAL: [u32; 9] = [
    0x7fc0_0001,
    0xffc0_0000,
    0x7f80_1234,
    0xff81_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7f7f_ffff,
    0x3f80_0000,
    0x8000_0000,
];

proptest! {
    #[test]
    fn every_nan_of_a_sum_has_the_same_bits_in_any_order(
        values in prop::collection::vec(prop::collection::vec(prop::sample::select(SPECIAL.to_vec()), NUMEL), 1..5),
        order in Just((0..4u32).collect::<Vec<_>>()).prop_shuffle(),
        slice in 0u32..5,
        dtype in prop::sample::select(DType::ALL.to_vec()),
        cut in 0..NUMEL,
    ) {
        let world = values.len() as u32;
        let element = |&bits: &u32| match dtype {
            DType::F32 => bits.to_le_bytes().to_vec(),
            // The upper half is a value of both types.
            DType::Bf16 | DType::F16 => ((bits >> 16) as u16).to_le_bytes().to_vec(),
        };
        let decode = |&bits: &u32| match dtype {
            DType::F32 => f32::from_bits(bits),
            DType::Bf16 => half::bf16::from_bits((bits >> 16) as u16).to_f32(),
            DType::F16 => half::f16::from_bits((bits >> 16) as u16).to_f32(),
        };
        let chunks: Vec<Chunk> = order.into_iter().filter(|&rank| rank < world).flat_map(|rank| {
            let values = &values[rank as usize];
            [cut..NUMEL, 0..cut].map(|range| {
                let bytes = values[range.clone()].iter().flat_map(element).collect();
                Chunk { rank, offset: range.start, dtype, bytes }
            })
        }).collect();
        let (round, sum) = sum_of(slice, world, &chunks, u64::MAX);
        prop_assert!(round.is_complete());
        let sum = sum.unwrap();
        for (i, actual) in sum.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).enumerate() {
            let ranks = (0..world).map(|rank| (slice + rank) % world);
            let expected = ranks.map(|rank| decode(&values[rank as usize][i])).reduce(|a, b| a + b).unwrap();
            let expected = if expected.is_nan() { 0x7fc0_0000 } else { expected.to_bits() };
            prop_assert_eq!(actual, expected);
        }
    }
}

#[test]
fn the_lowest_rank_with_an_overflow_is_named() {
    let bad = |rank| Chunk { bytes: f32::NAN.to_le_bytes().to_vec().into(), ..chunk(rank, 5..6) };
    let (round, _) = sum_of(0, 3, &[bad(1), bad(2), chunk(0, 0..NUMEL)], 1000);
    assert_eq!(round.overflow(), Some(1));
    assert_eq!(round.missing_rank(), Some(1));
}

#[test]
fn a_contribution_in_too_many_ranges_is_refused() {
    let backend = Cpu::new();
    let budget = Budget::new(0);
    let numel = 3 * MAX_RANGES;
    let mut round = Round::new(0, numel, &whole(numel, 1));
    let mut sum = backend.allocate(DType::F32, numel).unwrap();
    let one = |offset| Chunk { offset, ..chunk(0, 0..1) };
    let results: Vec<_> = (0..numel)
        .step_by(2)
        .map(|offset| round.contribute(&backend, &mut sum, &one(offset), &budget))
        .collect();
    assert_eq!(results.iter().filter(|r| r.is_ok()).count(), MAX_RANGES);
    assert!(matches!(results.last(), Some(Err(Error::Refused { .. }))));
}
