//! The figures of contributions.

use zeroshard_kernels::Cpu;
use zeroshard_loops::{Level, tally::Tally};

use super::*;
use crate::test_jobs::whole;

const NUMEL: usize = 600;

fn values(rank: u32) -> Vec<u8> {
    let value = |i: usize| ((i as f32) * 0.37 + rank as f32).sin() * 10f32.powi(rank as i32);
    (0..NUMEL).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// Sends elements of ranks to a slice of a job of three ranks, in this order.
fn round(slice: u32, parts: &[(u32, Range<usize>)]) -> Round {
    let (backend, budget) = (Cpu::new(), Budget::new(1 << 20));
    let mut round = Round::new(slice, NUMEL, &whole(NUMEL, 3));
    let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
    for (rank, range) in parts {
        let bytes = values(*rank)[4 * range.start..4 * range.end].to_vec().into();
        let chunk = Chunk { rank: *rank, offset: range.start, dtype: DType::F32, bytes };
        round.contribute(&backend, &mut sum, &chunk, &budget).unwrap();
    }
    round
}

fn by_rank(round: &Round) -> Vec<(u32, u64)> {
    let mut found: Vec<_> = round.contributions().map(|one| (one.rank, one.tally.hash)).collect();
    found.sort_unstable();
    found
}

#[test]
fn figures_do_not_depend_on_parts_order_parking_or_repetition() {
    let whole = round(1, &[(0, 0..NUMEL), (1, 0..NUMEL), (2, 0..NUMEL)]);
    let parts = [
        (2, 300..NUMEL), // repeated in part below
        (0, 100..NUMEL), // parked: rank 1 is the first of slice 1
        (2, 0..500),
        (1, 0..NUMEL),
        (1, 0..NUMEL),
        (0, 0..257),
    ];
    let cut = round(1, &parts);
    assert_eq!(by_rank(&whole), by_rank(&cut));
    for (rank, hash) in by_rank(&cut) {
        let first = contribution::first_element(1);
        let expected = Tally::of(Level::best(), &values(rank), DType::F32, first);
        assert_eq!(hash, expected.hash);
    }
    let largest = cut.largest().unwrap();
    assert_eq!(largest.rank, 2);
    let expected = Tally::of(Level::best(), &values(2), DType::F32, 0).squares;
    assert!((largest.squares - expected).abs() < 1e-6 * expected);
}

#[test]
fn another_slice_has_other_hashes() {
    let all = [(0, 0..NUMEL), (1, 0..NUMEL), (2, 0..NUMEL)];
    assert_ne!(by_rank(&round(0, &all)), by_rank(&round(1, &all)));
}

#[test]
fn ranks_without_a_gradient_have_no_figures() {
    let mut round = round(0, &[(1, 0..NUMEL), (2, 0..100)]);
    let (backend, mut sum) = (Cpu::new(), Cpu::new().allocate(DType::F32, NUMEL).unwrap());
    for rank in [0, 2] {
        round.absent(&backend, &mut sum, rank).unwrap();
    }
    assert!(round.is_complete());
    let ranks: Vec<u32> = by_rank(&round).into_iter().map(|(rank, _)| rank).collect();
    assert_eq!(ranks, [1, 2], "rank 2 has sent a part");
    round.reset();
    assert_eq!((by_rank(&round), round.largest()), (vec![], None));
}

#[test]
fn nan_is_the_largest() {
    let (backend, budget) = (Cpu::new(), Budget::new(1 << 20));
    let mut round = Round::new(0, 1, &whole(1, 2));
    let mut sum = backend.allocate(DType::F32, 1).unwrap();
    for (rank, value) in [(0, f32::INFINITY), (1, -f32::NAN)] {
        let bytes = value.to_le_bytes().to_vec().into();
        let chunk = Chunk { rank, offset: 0, dtype: DType::F32, bytes };
        round.contribute(&backend, &mut sum, &chunk, &budget).unwrap();
    }
    assert_eq!(round.largest().map(|largest| largest.rank), Some(1));
}
